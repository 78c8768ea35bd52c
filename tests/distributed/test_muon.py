"""Muon on shards has the weights of a single process with all options, and checkpoints at any world size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero import Rule, register_matrix_rule
from lightning_zero.engine import Engine
from lightning_zero.errors import RankMismatchError, UnsupportedError
from lightning_zero.optim.matrix_rules import _muon
from lightning_zero.report.engine_report import memory_by_role
from tests.helpers.muon import ROWS, Net, WideMuon, batch, orthogonalize
from tests.helpers.sharded import engine_for, whole_params, whole_state
from tests.ranks.pool import Ranks

STEPS = 20


def optimizers(model: nn.Module, muon: Any = WideMuon, **options: Any) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    others = [param for param in model.parameters() if param.ndim < 2]
    options = {"lr": 0.02, "weight_decay": 0.1} | options
    return [muon(matrices, **options), torch.optim.AdamW(others, lr=0.01, eps=1e-4)]


CLIP = 0.5
NOISE = 0.02  # weights are about 0.1; an update of Muon changes each element by about 0.02 / 8 per step


def plain(steps: int = STEPS, clip: float | None = None, **options: Any) -> dict[str, Any]:
    model = Net()
    steppers = optimizers(model, **options)
    for step in range(steps):
        x, y = batch(step)
        ((model(x) - y) ** 2).mean().backward()
        for optimizer in steppers:
            if clip is not None:
                nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip)
            optimizer.step()
        for optimizer in steppers:
            optimizer.zero_grad()
    names = {param: name for name, param in model.named_parameters()}
    state = {
        f"{names[param]}.momentum_buffer": entries["momentum_buffer"] for param, entries in steppers[0].state.items()
    }
    return {"params": {name: param.detach() for name, param in model.named_parameters()}, "state": state}


def take_steps(engine: Engine, model: nn.Module, steppers: list[Any], steps: range, clip: float | None) -> None:
    for step in steps:
        x, y = batch(step, engine.rank, engine.world_size)
        with engine.train_step():
            loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        for optimizer in steppers:
            with engine.optimizers.stepping(optimizer, clip=clip):
                optimizer.step()
        for optimizer in steppers:
            optimizer.zero_grad()


@contextmanager
def sharded(muon: dict[str, Any], backend: str = "eager", **options: Any) -> Iterator[tuple[Engine, Net, list[Any]]]:
    model = Net()
    with engine_for(model, backend, **options) as engine:
        steppers = optimizers(model, **muon)
        for optimizer in steppers:
            engine.optimizers.check(optimizer)
        engine.optimizers.arrange(steppers)
        yield engine, model, steppers


SMALL = {"matrix_bucket_mb": 0.01}  # several buckets
# name: (options of the strategy, of Muon, clip)
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {
    "plain": ({}, {}, None),
    "small buckets, clipped": (SMALL, {}, CLIP),
    "captured": (SMALL | {"emulate_cuda_graph_step": True}, {}, CLIP),
    "compiled": ({"backend": "aot_eager"}, {}, None),
    "stage 2": ({"stage": 2}, {"nesterov": False}, None),
    "stage 1": ({"stage": 1}, {"adjust_lr_fn": "match_rms_adamw"}, None),
    "state on the host": (SMALL | {"offload": ("optimizer",), "offload_buffer_mb": 0.01}, {"ns_steps": 3}, CLIP),
    "hosts": ({"ranks_per_host": 1}, {}, None),
    "replicated": ({"ranks_per_host": 1, "replicate_over": "hosts"}, {}, None),
}


def close(found: Tensor, expected: Tensor, *what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=lambda text: f"{', '.join(what)}: {text}")


THREE = ("small buckets, clipped", "captured", "stage 1", "hosts")  # ways that depend on the number of ranks


@cache
def expected_of(name: str) -> dict[str, Any]:
    _, muon, clip = WAYS[name]
    return plain(clip=clip, **muon)


def train_all(names: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        options, muon, clip = WAYS[name]
        if "replicate_over" in options and dist.get_world_size() == 1:
            continue
        with sharded(muon, **options) as (engine, model, steppers):
            take_steps(engine, model, steppers, range(STEPS), clip)
            found[name] = {"params": whole_params(engine, model), "state": whole_state(engine, steppers[0])}
    return found


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(1, (*WAYS,)), (2, (*WAYS,)), (3, THREE), (3, (*WAYS,))],
    ids=["one rank", "two ranks", "three ranks, some ways", "three ranks"],
)
@pytest.mark.exhaustive_variants("one rank", "three ranks")
def test_weights_and_momentum_are_those_of_one_process(ranks: Ranks, world_size: int, names: tuple[str, ...]) -> None:
    for found in ranks.run(world_size, train_all, names, deadline=240):
        assert len(found) >= len(names) - 1
        for name, values in found.items():
            expected = expected_of(name)
            for part, tensors in values.items():
                assert tensors.keys() >= {key for key in expected[part] if "unused" not in key}, (name, part)
                for key, value in tensors.items():
                    close(value, expected[part][key], name, key)


class Flat(nn.Module):
    """Parameters that ``torch.optim.Muon`` accepts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(70, 70, bias=False) for _ in range(3))
        self.wide = nn.Linear(70, 130, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.wide(x)


def flat_batch(step: int, rank: int = 0, world: int = 1) -> Tensor:
    return torch.randn(ROWS, 70, generator=torch.Generator().manual_seed(step))[rank::world]


def plain_flat(steps: range, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        model(flat_batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def flat_steps(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, **begin: Any) -> None:
    for step in steps:
        with engine.train_step():
            loss = model(flat_batch(step, engine.rank, engine.world_size)).square().mean()
        loss.backward()
        with engine.optimizers.stepping(optimizer, **begin):
            optimizer.step()
        optimizer.zero_grad()


@contextmanager
def flat(make: Any = torch.optim.Muon, **options: Any) -> Iterator[tuple[Engine, Flat, torch.optim.Optimizer]]:
    model = Flat()
    with engine_for(model, "eager", **SMALL | options) as engine:
        optimizer = make(model.parameters(), lr=0.02)
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        yield engine, model, optimizer


def _torchs_own() -> dict[str, Tensor]:
    with flat() as (engine, model, optimizer):
        assert memory_by_role(engine, [optimizer])["matrix_updates"] == 0
        flat_steps(engine, model, optimizer, range(STEPS))
        # Six buffers: of the largest matrix on its owner, of another one on the other rank, and of their padding.
        assert 6 * 2 * 70 * 70 <= memory_by_role(engine, [optimizer])["matrix_updates"] < 1.1 * 6 * 2 * 70 * 130
        return whole_params(engine, model)


def _states() -> dict[str, Any]:
    """Train 6 steps; then with skips, another setting, and a frozen layer; return the results of each."""
    found = {}
    for emulate in (False, True):
        with flat(WideMuon, emulate_cuda_graph_step=emulate) as (engine, model, optimizer):
            flat_steps(engine, model, optimizer, range(3))
            skip = torch.ones(())
            flat_steps(engine, model, optimizer, range(3, 5), skip=skip)  # as a loss scaler skips
            optimizer.param_groups[0]["ns_steps"] = 3
            flat_steps(engine, model, optimizer, range(5, 7))
            model.wide.requires_grad_(False)
            flat_steps(engine, model, optimizer, range(7, 9))
            found[f"captured: {emulate}"] = whole_params(engine, model)
    return found


def _narrow(state_dtype: str) -> dict[str, Any]:
    with flat(WideMuon, state_dtype=state_dtype) as (engine, model, optimizer):
        flat_steps(engine, model, optimizer, range(6))
        kinds = {value.dtype for entries in optimizer.state.values() for value in entries.values() if value.dim()}
        return {"params": whole_params(engine, model), "kinds": kinds}


def _missing_gradients() -> dict[str, Any]:
    """Clear a gradient on one rank, then on all ranks; return the error and the weights."""
    with flat(WideMuon) as (engine, model, optimizer):
        with engine.train_step():
            loss = model(flat_batch(0, engine.rank, engine.world_size)).square().mean()
        loss.backward()
        wide = dict(model.named_parameters())["wide.weight"]
        if engine.rank == 1:
            wide.grad = None
        with pytest.raises(RankMismatchError) as raised, engine.optimizers.stepping(optimizer, clip=1.0):
            optimizer.step()
        wide.grad = None
        with engine.optimizers.stepping(optimizer):
            optimizer.step()
        optimizer.zero_grad()
        flat_steps(engine, model, optimizer, range(1, 3))
        return {"error": str(raised.value), "params": whole_params(engine, model)}


def _everything() -> dict[str, Any]:
    narrow = {state_dtype: _narrow(state_dtype) for state_dtype in ("bf16", "8bit")}
    return {"torch": _torchs_own(), "states": _states(), "narrow": narrow, "missing": _missing_gradients()}


def test_options_and_events_change_what_they_should(ranks: Ranks) -> None:
    model = Flat()
    plain_flat(range(STEPS), model, torch.optim.Muon(model.parameters(), lr=0.02))
    own = {name: param.detach() for name, param in model.named_parameters()}
    model = Flat()
    optimizer = WideMuon(model.parameters(), lr=0.02)
    plain_flat(range(3), model, optimizer)
    optimizer.param_groups[0]["ns_steps"] = 3
    plain_flat(range(5, 7), model, optimizer)
    model.wide.requires_grad_(False)
    plain_flat(range(7, 9), model, optimizer)
    events = {name: param.detach() for name, param in model.named_parameters()}
    model = Flat()
    plain_flat(range(6), model, WideMuon(model.parameters(), lr=0.02))
    six = {name: param.detach() for name, param in model.named_parameters()}
    model = Flat()
    optimizer = WideMuon(model.parameters(), lr=0.02)
    model(flat_batch(0)).square().mean().backward()
    model.wide.weight.grad = None
    optimizer.step()
    optimizer.zero_grad()
    plain_flat(range(1, 3), model, optimizer)
    missing = {name: param.detach() for name, param in model.named_parameters()}
    for rank, found in enumerate(ranks.run(2, _everything)):
        here = ["present", "None"][rank]
        assert f"None on some ranks only: 'wide.weight' ({here} here)" in found["missing"]["error"]
        for name, value in missing.items():
            close(found["missing"]["params"][name], value, "missing", name)
        for name, value in own.items():
            # bfloat16 products round differently in batches
            torch.testing.assert_close(found["torch"][name], value, rtol=0, atol=NOISE)
        for way, params in found["states"].items():
            for name, value in events.items():
                close(params[name], value, way, name)
        kinds = {"bf16": {torch.bfloat16}, "8bit": {torch.int8, torch.float32}}
        for state_dtype, noise in (("bf16", NOISE), ("8bit", 8 * NOISE)):
            narrow = found["narrow"][state_dtype]
            assert narrow["kinds"] == kinds[state_dtype]
            for name, value in six.items():
                difference = (narrow["params"][name] - value).abs().max()
                assert 0 < difference < noise, (name, state_dtype, difference)


# -- one class for matrices and other parameters


class Both(torch.optim.Optimizer):
    """Muon for groups with ``matrices``, SGD of a falling learning rate for others."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1, "matrices": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                state["step"] = state.get("step", torch.zeros(())) + 1
                if not group["matrices"]:
                    param.sub_(param.grad * group["lr"] / state["step"])
                    continue
                average = state.setdefault("momentum_buffer", torch.zeros_like(param)).lerp_(param.grad, 0.05)
                update = orthogonalize(param.grad.lerp(average, 0.95), *NEWTON_SCHULZ)
                factor = max(1, param.shape[0] / param.shape[1]) ** 0.5 / state["step"]
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update * factor, alpha=group["lr"])


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315), 5, 1e-7
MUON = _muon(True, *NEWTON_SCHULZ, "original", torch.float32)
FALLING = replace(
    MUON,
    scalars=lambda setting, step: MUON.scalars(setting, step) | {"step": step.double()},
    finish=lambda param, update, s, factor: param * s["keep"] - update * (s["lr"] * factor / s["step"]),
    counts=("step",),
)
OTHERS = Rule(
    ("lr",),
    (),
    lambda setting, step: {"size": setting["lr"] / step},
    lambda param, grad, state, s: (param - grad * s["size"], {}),
)
register_matrix_rule(Both, lambda group: FALLING if group["matrices"] else OTHERS)


def _added(emulate: bool) -> dict[str, Tensor]:
    model = Net()
    with engine_for(model, "eager", emulate_cuda_graph_step=emulate) as engine:
        params = dict(model.named_parameters())
        optimizer = Both([params["first.bias"], params["last.bias"]])
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        take_steps(engine, model, [optimizer], range(3), None)
        matrices = [param for name, param in params.items() if name.startswith(("first.w", "alike"))]
        optimizer.add_param_group({"params": matrices, "matrices": True})
        take_steps(engine, model, [optimizer], range(3, 6), None)
        return whole_params(engine, model)


@pytest.mark.parametrize("emulate", [False, True])
def test_a_group_of_matrices_is_added_after_some_steps(ranks: Ranks, emulate: bool) -> None:
    model = Net()
    optimizer = Both([model.first.bias, model.last.bias])
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": [model.first.weight, *model.alike.parameters()], "matrices": True})
        x, y = batch(step)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks.run(2, _added, emulate):
        for name, value in model.named_parameters():
            close(found[name], value.detach(), name)


class Doubles(torch.optim.Muon):
    """Muon of float64 throughout."""


DOUBLES = _muon(True, *NEWTON_SCHULZ, "original", torch.float64)
register_matrix_rule(Doubles, lambda group: DOUBLES)


def _doubles() -> dict[str, Tensor]:
    model = Flat().double()
    with engine_for(model, "eager", **SMALL) as engine:
        optimizer = Doubles(model.parameters(), lr=0.02)
        for step in range(4):
            with engine.train_step():
                loss = model(flat_batch(step, engine.rank, engine.world_size).double()).square().mean()
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
        return whole_params(engine, model)


def test_float64_is_float64_throughout(ranks: Ranks) -> None:
    model = Flat().double()
    optimizer = WideMuon(model.parameters(), lr=0.02)
    for step in range(4):
        model(flat_batch(step).double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks.run(2, _doubles):
        for name, value in model.named_parameters():
            torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-11)


# -- rules that are wrong


class Wrong(torch.optim.SGD):
    pass


WRONG: dict[str, tuple[Any, str]] = {
    "of another shape": ({"transform": lambda x: x.mT}, "The transform of a MatrixRule returned .*rows, columns"),
    "without state": ({"prepare": lambda p, g, state, s: (g, {})}, "with the state .'momentum_buffer'"),
    "with one number": ({"prepare": lambda p, g, state, s: (g.mean(), state)}, "each of the shard's shape"),
    "of another setting": ({"settings": ("lr", "momentumm")}, "reads the settings .'momentumm'.*'momentum'"),
}
_rules = {"now": MUON}
register_matrix_rule(Wrong, lambda group: _rules["now"])


def _wrong() -> dict[str, str]:
    found = {}
    for name, (changes, _) in WRONG.items():
        _rules["now"] = replace(MUON, transform_batches=None, **changes)
        with pytest.raises((ValueError, UnsupportedError)) as raised, flat(Wrong) as (engine, model, optimizer):
            flat_steps(engine, model, optimizer, range(1))
        found[name] = str(raised.value)
    return found


def test_a_rule_that_returns_something_else_is_refused_with_the_reason(ranks: Ranks) -> None:
    for found in ranks.run(1, _wrong):
        for name, (_, message) in WRONG.items():
            assert re.search(message, found[name]), (name, found[name])
    with pytest.raises(ValueError, match="differ in size"):
        replace(MUON, result_dtype=torch.bfloat16)


# -- checkpoints


def _saves(path: str) -> dict[str, Any]:
    with flat(WideMuon) as (engine, model, optimizer):
        flat_steps(engine, model, optimizer, range(4))
        weights, state = engine.model_state(), engine.optimizer_state(optimizer)
        if engine.rank == 0:
            torch.save({"weights": weights, "state": state}, path)
        return whole_params(engine, model)


def _resumes(path: str) -> dict[str, Tensor]:
    saved = torch.load(path)
    with flat(WideMuon) as (engine, model, optimizer):
        with engine.full_parameters():
            model.load_state_dict(saved["weights"])
        engine.load_optimizer_state(optimizer, saved["state"])
        flat_steps(engine, model, optimizer, range(4, 8))
        return whole_params(engine, model)


def test_checkpoints_are_those_of_plain_torch_at_any_world_size(ranks: Ranks, tmp_path: Any) -> None:
    path = str(tmp_path / "muon.pt")
    model = Flat()
    optimizer = WideMuon(model.parameters(), lr=0.02)
    plain_flat(range(8), model, optimizer)
    expected = {name: param.detach() for name, param in model.named_parameters()}

    def check(params: dict[str, Tensor]) -> None:
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, rtol=0, atol=1e-5)

    ranks.run(2, _saves, path)
    for found in ranks.run(3, _resumes, path):
        check(found)
    saved = torch.load(path)
    model = Flat()
    model.load_state_dict(saved["weights"])
    optimizer = WideMuon(model.parameters(), lr=0.02)
    optimizer.load_state_dict(saved["state"])
    plain_flat(range(4, 8), model, optimizer)
    check({name: param.detach() for name, param in model.named_parameters()})
    model = Flat()
    optimizer = WideMuon(model.parameters(), lr=0.02)
    plain_flat(range(4), model, optimizer)
    torch.save({"weights": model.state_dict(), "state": optimizer.state_dict()}, path)
    for found in ranks.run(2, _resumes, path):
        check(found)
