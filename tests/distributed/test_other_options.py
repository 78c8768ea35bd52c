"""A later Trainer brings other options: every one is applied from then on, or refused by its name."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import Tuning
from lightning_zero.config import EngineConfig
from lightning_zero.config.options import Options
from lightning_zero.config.schema import OnChange, option_fields
from lightning_zero.engine import Engine
from lightning_zero.errors import UnsupportedError
from tests.helpers.models import build, make_batches
from tests.helpers.options import OTHERS
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks

CHANGES = {name: option.on_change for cls in (Options, Tuning) for name, (_, option) in option_fields(cls).items()}
BEFORE: dict[str, Any] = {"reduce_transport": "collective", "compile_backend": "aot_eager"}
# Values instead of OTHERS, if the engine has those already or this machine does not support them.
NOW: dict[str, Any] = OTHERS | {"compile_backend": "inductor"}


class Recorded:
    """Records the options of the C++ executor, or of the watchdog."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.options: tuple[Any, ...] = ()

    def configure(self, *options: Any) -> None:
        self.options = options
        self._native.configure(*options)

    def set_report_interval(self, *options: Any) -> None:
        self.options = options
        self._native.set_report_interval(*options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


def record(engine: Engine) -> None:
    engine.executor._native, engine.watchdog.native = map(Recorded, (engine.executor._native, engine.watchdog.native))
    engine.executor.configure(engine.config)
    engine.watchdog.configure(engine.config.tuning.report_stall_after_s)


def in_force(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the value in use of each option that applies without recompilation."""
    bucket, double, free, sync, nan_fill, dtype, _ = engine.executor._native.options
    return {
        "compiled": engine.session._compiler._config,
        "cuda_graphs": engine.optimizers.stepper(optimizer).eager_reason,
        "memory": engine.session.config.memory,  # by which the session plans: test_memory_budget.py
        "offload": type(engine.optimizers.stepper(optimizer)._runners[-1]),
        "state_dtype": engine.optimizers.stepper(optimizer)._layouts._rounding.state_dtype,
        "bf16_stochastic_round": engine.optimizers.stepper(optimizer)._layouts._rounding[1],
        "offload_buffer_mb": engine.optimizers.config.tuning.offload_buffer_mb,
        "reduce_dtype": dtype,
        "broadcast_buffers": engine.buffers._enabled,
        "state_dict_type": engine.config.state_dict_type,  # which the strategy asks, too: test_sharded_checkpoints.py
        "async_save": engine.config.async_save,
        "free_reduce_buckets": free,
        "reduce_bucket_mb": bucket,
        "matrix_bucket_mb": engine.optimizers.stepper(optimizer)._captured._matrix_bucket_bytes,
        "reduce_double_buffer": double,
        "report_stall_after_s": engine.watchdog.native.options,
        "consensus_timeout_s": engine.session._consensus.patience_s,
        "cross_host_reduce": engine.executor.reduces_across_once,
        "cuda_graph_step": engine.optimizers.stepper(optimizer).eager_reason,
        "cuda_graph_model": engine.cuda_graphs._option,
        "share_capture_memory": engine.cuda_graphs.memory.shared,
        "sync_collectives": sync,
        "nan_fill": nan_fill,
        "emulate_cross_host_gb_per_s": engine.executor.transport._limit,
        "emulate_cuda_graph_step": engine.optimizers.stepper(optimizer).eager_reason,
        "emulate_cuda_graph_model": engine.cuda_graphs.enabled,
    }


def other(config: EngineConfig, name: str) -> EngineConfig:
    if name in option_fields(Options):
        return replace(config, **{name: NOW[name]})
    first = replace(config, reshard_after_forward=False) if name == "unsharded_cache_until" else config
    return replace(first, tuning=replace(first.tuning, **{name: NOW[name]}))


def change_each() -> dict[str, str]:
    """Return the effect of each option's other value: refused, compiled or applied.

    Train before and after.
    """
    model = build("OddMLP")
    model.register_parameter("narrow", nn.Parameter(torch.zeros(8, dtype=torch.bfloat16)))  # without a gradient
    optimizer, batches, found = sgd(model), make_batches("OddMLP", 4, 6), {}
    with engine_for(model, **BEFORE) as engine:
        record(engine)
        train_sharded(engine, model, batches[:2], optimizer)
        first = engine.config
        for name in OTHERS:
            start = replace(first, reshard_after_forward=False) if name == "unsharded_cache_until" else first
            engine.configure(start)
            before, chosen = in_force(engine, optimizer), other(start, name)
            try:
                engine.configure(chosen)
            except UnsupportedError as error:
                by_name = f"and cannot change to {name}={NOW[name]!r}" in str(error) and engine.config == start
                found[name] = "refused" if by_name else str(error)
                continue
            assert engine.config == chosen
            after = in_force(engine, optimizer)
            assert after["compiled"] == chosen.compiled
            found[name] = "compiled" if after["compiled"] != before["compiled"] else "ignored"
            if name in before:
                found[name] = "applied" if before[name] != after[name] else "ignored"
            engine.configure(first)
        train_sharded(engine, model, batches[2:], optimizer)
    return found


def test_every_option_is_applied_or_refused_by_name(ranks: Ranks) -> None:
    words = {OnChange.REFUSE: "refused", OnChange.RECOMPILE: "compiled", OnChange.APPLY: "applied"}
    words[OnChange.NEGOTIATE] = "refused"  # test_peers.py has those with the same result
    expected = {name: words[change] for name, change in CHANGES.items() if name != "tuning"}
    for found in ranks.run(2, change_each, deadline=240):
        assert found == expected


# Options of which one is impossible, with possible ones, and the words of the error.
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"cuda_graph_model": True}, "cuda_graph_model=True, but compiled code cannot be replayed"),
    ({"prefetch": False}, "cannot do without 'split_gathers'"),
    ({"reduce_transport": "copy"}, "sharded with reduce_transport='collective'"),
    ({"report_stall_after_s": 7.0, "timeout": timedelta(seconds=77)}, "sharded with timeout="),
]
BESIDES: dict[str, Any] = {
    "emulate_cuda_graph_step": True,
    "nan_fill": True,
    "gather_transport": "copy",
    "gather_group_mb": 7.0,
    "reduce_bucket_mb": 0.5,
}


def refused_together() -> list[str]:
    """Return the changes after each error, as a rule an empty text. Train before and after."""
    model = build("OddMLP")
    optimizer, batches, found = sgd(model), make_batches("OddMLP", 4, 6), []
    with engine_for(model, **BEFORE) as engine:
        record(engine)
        train_sharded(engine, model, batches[:2], optimizer)
        engine.session.disable_passes(["split_gathers"])
        config, compiler, compiled_modules = engine.config, engine.session._compiler, engine.session.compiled_modules
        ways = engine.transports._weights, engine.transports._gradients
        before = in_force(engine, optimizer), [way._choice for way in ways], engine.cuda_graphs._required
        for chosen, words in IMPOSSIBLE:
            inside = BESIDES | {name: value for name, value in chosen.items() if name in option_fields(Tuning)}
            outside = {name: value for name, value in chosen.items() if name not in inside}
            other = replace(
                config, broadcast_buffers=False, reduce_dtype="bf16", tuning=replace(config.tuning, **inside), **outside
            )
            with pytest.raises((UnsupportedError, ValueError), match=words):
                engine.configure(other)
            after = in_force(engine, optimizer), [way._choice for way in ways], engine.cuda_graphs._required
            same = engine.config is config and engine.optimizers.config is config and engine.session.config is config
            same = same and engine.session._compiler is compiler and engine.session.compiled_modules is compiled_modules
            found.append("" if same and before == after else f"{chosen}: {before} -> {after}")
        train_sharded(engine, model, batches[2:], optimizer)
    return found


def test_where_one_option_cannot_be_had_none_is_changed(ranks: Ranks) -> None:
    for found in ranks.run(2, refused_together, deadline=240):
        assert found == [""] * len(IMPOSSIBLE)
