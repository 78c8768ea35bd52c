"""``lightning_zero.plan``: bytes by role, the peak, and seconds of a step, before there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import nn

from lightning_zero.budget.facts import GradientBytes
from lightning_zero.compile.context import PassContext
from lightning_zero.compile.known import EngineMemoryFacts
from lightning_zero.config import EngineConfig
from lightning_zero.config.engine_config import HOST_BYTES_PER_S
from lightning_zero.config.schema import OFFLOAD_CHOICES
from lightning_zero.offload.pinned_memory import check_host_masters
from lightning_zero.planning.buckets import reduce_bucket_bytes
from lightning_zero.planning.result import PassEstimates, TrainingPlan
from lightning_zero.planning.seconds import step_seconds
from lightning_zero.planning.states import OptimizerMemory
from lightning_zero.planning.static import (
    ParamShard,
    cut,
    masters_away,
    may_lie_over_copies,
    over_copies,
    persistent_bytes,
)
from lightning_zero.planning.training import Precision, StepEstimate, TraceConfig, run_step
from lightning_zero.planning.user_code import UserCode
from lightning_zero.planning.within import plan_within_limit, with_first_step_peak
from lightning_zero.profiling.devices import LINKS, Device, find_device
from lightning_zero.profiling.estimate import NOMINAL_COSTS

__all__ = ["Training", "plan"]


@dataclass(frozen=True)
class Training:
    """What :func:`plan` cannot read off a LightningModule.

    Attributes:
        loss: of the module and a batch; by default ``module.training_step(batch, 0)``.
        optimizer: made of a list of parameters; by default ``module.configure_optimizers()``, or AdamW.
        accumulate: micro-batches in one step of the optimizer.
        ranks_per_host: GPUs of one host.
    """

    loss: Callable[[nn.Module, Any], Any] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    accumulate: int = 1
    ranks_per_host: int = 8


def plan(
    module: nn.Module,
    batch: Any,
    world_size: int = 1,
    device: str | Device = "H200",
    precision: str = "bf16-mixed",
    training: Training | None = None,
    **options: Any,
) -> TrainingPlan:
    """What training ``module`` under ``ZeroStrategy`` takes of each GPU, and how long a step takes. No GPU, no process
    group and no memory for the model are needed; it is as before afterwards. Made on one process.

    Args:
        module: a LightningModule, or any module with ``training.loss``; on the CPU, or on the meta device
            (``with torch.device("meta"): module = Module()``).
        batch: of one rank: tensors on any device, the meta device among them.
        world_size: GPUs.
        device: one of ``lightning_zero.profiling.devices``' table, or one of your own.
        precision: the Trainer's.
        training: the rest.
        options: of ``ZeroStrategy``. With ``memory`` the plan is one of what would be chosen, see
            :attr:`TrainingPlan.memory`.

    Raises:
        ValueError: an unknown device, precision or option.
        UnsupportedError: options that do not go together.
    """
    how, card = training or Training(), find_device(device) if isinstance(device, str) else device
    kind = Precision.of(precision)
    hosts = ceil(world_size / how.ranks_per_host)
    inside = ceil(world_size / hosts)
    config = _config(kind, options).for_hosts(hosts, inside)
    replicas = config.tuning.replicate_over is not None
    holders = inside if replicas else world_size
    check_host_masters(config, hosts)
    config.uses_grad_aliasing(hosts)  # raises
    code = UserCode(module, how.loss, how.optimizer)
    with code.configured():
        cuts = cut(module, holders, kind.own)
        kept = code.kept(kind.own, holders, config.tuning.state_dtype is not None)
        costs = replace(NOMINAL_COSTS, speed=card.speed)
        buffers = sum(b.nbytes for b in module.buffers())
        eager: list[tuple[StepEstimate | None, str]] = []

        def how_traced(config: EngineConfig) -> TraceConfig:
            return TraceConfig(PassContext(config.compiled, holders, costs), kind, card.speed, True, code.loss)

        def estimate(config: EngineConfig) -> TrainingPlan:
            trace = how_traced(config)
            compiled, why = _step(module, batch, trace, True) if config.compile else (None, "")
            eager[:] = eager or [_step(module, batch, trace, False)]  # which no plan changes
            passes = PassEstimates(compiled, eager[0][0], why or eager[0][1], buffers)
            return _assembled(cuts, kept, config, (card, world_size, how), passes)

        def held() -> StepEstimate | None:  # without compiling, all steps are like the first, and none is held
            return _step(module, batch, how_traced(config), False, away=True)[0] if config.compile else None

        if config.memory is None:
            return with_first_step_peak(estimate(config), held)
        known = _known(cuts, kept, config, card, holders, hosts)
        if how.accumulate < 2 or hosts > 1:
            known = known.reduced_at_once()
        if how.accumulate > 1 or hosts > 1 or not code.is_automatic:
            known = known.in_place()
        found = plan_within_limit(config, estimate, known, how.accumulate)
        return with_first_step_peak(found, held, known.gradients.over)


def _config(kind: Precision, options: dict[str, Any]) -> EngineConfig:
    config = EngineConfig(**options)
    if kind.autocast is torch.bfloat16:
        config = replace(config, reduce_dtype=config.reduce_dtype or "bf16")
    return replace(config, compute_dtype=kind.autocast)


def _step(
    module: nn.Module, batch: Any, trace: TraceConfig, compiles: bool, away: bool = False
) -> tuple[StepEstimate | None, str]:
    """A step, or why there is none."""
    try:
        return run_step(module, batch, trace, compiles, away), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _known(
    cuts: list[ParamShard], kept: OptimizerMemory, config: EngineConfig, card: Device, ranks: int, hosts: int
) -> EngineMemoryFacts:
    used = config.compute_dtype if config.compile else None
    whole = sum(
        c.elements * ranks * (c.dtype if c.stays_full_precision else c.compute_dtype_of(used)).itemsize for c in cuts
    )
    trained = [c for c in cuts if c.trained] if ranks > 1 else []
    masters = masters_away(cuts, replace(config, offload=("optimizer", "parameters"))) if used is not None else 0
    masters_may = masters and hosts == 1 and not config.tuning.grad_aliasing
    needs = {"activations": config.compile, "parameters": masters_may}
    return EngineMemoryFacts(
        states=kept.states,
        gradients=GradientBytes(
            whole=sum(c.elements * ranks * torch.promote_types(c.dtype, torch.float32).itemsize for c in trained),
            wire=sum(c.elements * ranks * (config.wire_dtype or c.dtype).itemsize for c in trained),
            over=may_lie_over_copies(cuts, config),
        ),
        masters=masters,
        whole=whole if ranks > 1 and config.stage == 3 else 0,
        ring=config.offload_buffer_bytes,
        ahead=config.cuda_graph_step is not False,
        may_leave=tuple(name for name in OFFLOAD_CHOICES if needs.get(name, True)),
        gather_s=1 / (card.inside * LINKS) if ranks > 1 else 0.0,
    )


def _assembled(
    cuts: list[ParamShard],
    kept: OptimizerMemory,
    config: EngineConfig,
    where: tuple[Device, int, Training],
    passes: PassEstimates,
) -> TrainingPlan:
    card, ranks, how = where
    hosts = ceil(ranks / how.ranks_per_host)
    inside = ceil(ranks / hosts)
    roles = persistent_bytes(cuts, config, hosts, how.accumulate)
    away = "optimizer" in config.offload
    moved = (kept.states if away else 0) + masters_away(cuts, config)
    ring = min(config.offload_buffer_bytes, moved)
    roles["optimizer_state"] = 0 if away else kept.states
    roles["offload_buffers"] = int(ring)
    roles["reduce_buckets"] = reduce_bucket_bytes(cuts, config, inside, copied=ranks > 1 and inside > 1)
    roles["buffers"] = passes.buffers
    found = TrainingPlan(
        device=card,
        ranks=ranks,
        parameters=sum(c.layout.numel for c in cuts),
        roles=roles,
        passes=passes,
        temporary=kept.temporary + over_copies(cuts, config),  # which an optimizer's own step wants as wide as weights
        graphs=config.cuda_graphs is not False and config.compile,
    )
    step = passes.compiled or passes.eager
    if step is None:
        return found
    seconds = step_seconds(step, cuts, config, where)
    waits = moved / HOST_BYTES_PER_S
    if config.cuda_graph_step is not False and "parameters" not in config.offload:
        # What buffers hold of state goes beside forward and backward.
        waits -= min(ring / HOST_BYTES_PER_S, seconds.compute, waits)
    return replace(found, seconds=replace(seconds, optimizer=seconds.optimizer + waits))
