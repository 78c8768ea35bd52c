"""``lightning_zero.plan``: bytes by role, the peak, and seconds of a step, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_zero.compile.context import PassContext
from lightning_zero.config import EngineConfig
from lightning_zero.config.engine_config import HOST_BYTES_PER_S
from lightning_zero.config.schema import OFFLOAD_CHOICES
from lightning_zero.memory_planner.inputs import (
    EngineMemoryFacts,
    GradientBytes,
    MemoryConfig,
    PlannerInputs,
    apply_memory_config,
    constraints_of,
    memory_config,
)
from lightning_zero.memory_planner.memory_plan import choose_plan
from lightning_zero.offload.pinned_memory import check_host_masters
from lightning_zero.planning.fake_step import Precision, StepEstimate, TraceConfig, run_step
from lightning_zero.planning.persistent_memory import (
    OptimizerMemory,
    ParamShard,
    aliasable_gradient_bytes,
    aliased_gradient_bytes,
    host_master_bytes,
    persistent_bytes,
    reduce_bucket_bytes,
    shard_parameters,
)
from lightning_zero.planning.step_seconds import Cluster, step_seconds
from lightning_zero.planning.training_plan import PassEstimates, TrainingPlan
from lightning_zero.planning.user_code import UserCode
from lightning_zero.profiling.cost_model import NOMINAL_COSTS
from lightning_zero.profiling.device_gauges import memory_limit
from lightning_zero.profiling.devices import LINKS, Device, find_device
from lightning_zero.sharding.frozen_weights import frozen_weights

# Estimates of a configuration that was chosen by an earlier estimate; each may choose another one.
MAX_ESTIMATES = 6


@dataclass(frozen=True)
class Training:
    """Properties of a training that :func:`plan` cannot read from a LightningModule.

    Attributes:
        loss: Returns the loss of a module and a batch; by default ``module.training_step(batch, 0)``.
        optimizer: Makes an optimizer of a list of parameters; by default ``module.configure_optimizers()``, or AdamW.
        accumulate: Micro-batches in one optimizer step.
        ranks_per_host: GPUs of one host.

    Examples:
        >>> from lightning_zero import Training
        >>> Training(loss=lambda module, batch: module(batch).mean(), accumulate=4).ranks_per_host
        8
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
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> TrainingPlan:
    """Estimate memory and time of each GPU that trains ``module`` under ``ZeroStrategy``.

    This needs one process without a GPU, a process group, or memory for the model. The module is unchanged afterwards.

    Args:
        module: A LightningModule, or any module with ``training.loss``; on the CPU, or on the meta device
            (``with torch.device("meta"): module = Module()``).
        batch: A micro-batch of one rank; tensors on any device, including the meta device.
        world_size: Number of GPUs.
        device: Name in ``lightning_zero.profiling.devices``, such as ``"H200"``, or a :class:`Device`.
        precision: ``precision`` of the Trainer.
        training: Loss, optimizer, accumulation and hosts; by default those of the LightningModule.
        progress: Called with a few words when a part of the work begins; the work takes seconds to minutes.
        options: Options of ``ZeroStrategy``. With ``memory`` in GiB, the result has a plan within that limit.

    Returns:
        Estimated bytes and seconds of one rank; ``print()`` shows them as tables.

    Raises:
        ValueError: A device, precision or option is unknown.
        UnsupportedError: Options cannot be combined.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_zero import Training, plan
        >>> with torch.device("meta"):
        ...     module, batch = nn.Linear(1024, 1024), torch.empty(8, 1024)
        >>> plan(module, batch, world_size=2, training=Training(loss=lambda m, x: m(x).sum())).parameters
        1049600
    """
    how, card = training or Training(), find_device(device) if isinstance(device, str) else device
    kind = Precision.of(precision)
    cluster = Cluster(card, world_size, how.ranks_per_host)
    hosts = cluster.hosts
    config = _config(kind, options).for_hosts(hosts, cluster.gpus)
    shard_group = cluster.gpus if config.tuning.replicate_over is not None else world_size
    check_host_masters(config, hosts)
    config.uses_grad_aliasing(hosts)  # raises
    code = UserCode(module, how.loss, how.optimizer)
    with code.configured():
        shards = shard_parameters(module, shard_group, kind.own, config.quantizes_state, frozen_weights(config))
        optimizers = code.optimizer_memory(kind.own, shard_group, config)
        costs = replace(NOMINAL_COSTS, speed=card.speed)
        buffers = sum(b.nbytes for b in module.buffers())
        eager: list[tuple[StepEstimate | None, str]] = []
        report = progress or (lambda text: None)

        def trace_config(config: EngineConfig) -> TraceConfig:
            context = PassContext(config.compiled, shard_group, costs, compute_dtype=config.compute_dtype)
            return TraceConfig(context, kind, card.speed, True, code.loss)

        def estimate(config: EngineConfig) -> TrainingPlan:
            trace = trace_config(config)
            report("tracing and partitioning the compiled step")
            compiled, why = _step(module, batch, trace, True) if config.compile else (None, "")
            if not eager:  # independent of the plan
                report("tracing the first step, which is not compiled")
                eager.append(_step(module, batch, trace, False))
            passes = PassEstimates(compiled, eager[0][0], why or eager[0][1], buffers)
            return _assemble(shards, optimizers, config, (cluster, how.accumulate), passes)

        def offloaded_pass() -> StepEstimate | None:  # without compiling, all steps are eager, and none is offloaded
            report("tracing the first step with offloaded activations")
            return _step(module, batch, trace_config(config), False, True)[0] if config.compile else None

        if config.memory is None:
            return with_first_step_peak(estimate(config), offloaded_pass)
        known = _facts(shards, optimizers, config, card, shard_group, hosts)
        if how.accumulate < 2 or hosts > 1:
            known = known.without_deferred_reduction()
        if how.accumulate > 1 or hosts > 1 or not code.is_automatic:
            known = known.without_grad_aliasing()
        found = plan_within_limit(config, estimate, known, how.accumulate)
        return with_first_step_peak(found, offloaded_pass, known.gradients.aliasable)


def plan_within_limit(
    config: EngineConfig, estimate: Callable[[EngineConfig], TrainingPlan], known: EngineMemoryFacts, passes: int
) -> TrainingPlan:
    """Return the estimate of the configuration that the planner would choose within ``config.memory``."""
    current, free = memory_config(config), constraints_of(config, known.offloadable)
    plain = replace(config, memory=None)
    estimates: dict[MemoryConfig, TrainingPlan] = {}
    too_large: dict[tuple[object, ...], float] = {}  # least share of activations that did not fit, by the rest

    def estimated(chosen: MemoryConfig) -> TrainingPlan:
        if chosen not in estimates:
            estimates[chosen] = estimate(apply_memory_config(plain, chosen))
        return estimates[chosen]

    for _ in range(MAX_ESTIMATES):
        found = estimated(current)
        inputs = _inputs(found, config, known, passes, current)
        if inputs.peak > inputs.limit:
            share, place = current.activation_memory_budget, (current.offload, current.ring, current.grad_aliasing)
            too_large[place] = min(share, too_large.get(place, share))
        chosen = choose_plan(inputs, free)
        # A smaller share may leave so much that a larger one, which did not fit, seems to fit.
        below = too_large.get((chosen.chosen.offload, chosen.chosen.ring, chosen.chosen.grad_aliasing))
        if below is not None and chosen.chosen.activation_memory_budget >= below:
            chosen = choose_plan(inputs, replace(free, below=below))
        # Kept weights follow from the rest.
        following = replace(chosen.chosen, weights=0.0, reduce_once=False)
        if replace(following, until=current.until) == replace(current, weights=0.0, reduce_once=False):
            break
        current = following
    else:  # the last choice, with the peak of its own estimate
        found = estimated(current)
        peak = _inputs(found, config, known, passes, current).peak
        extra = chosen.chosen.weights + known.gradients.full * chosen.chosen.reduce_once
        chosen = replace(chosen, peak=int(peak + extra))
    roles = found.roles | {"unsharded_cache": found.roles.get("unsharded_cache", 0) + int(chosen.chosen.weights)}
    if chosen.chosen.reduce_once:
        roles["deferred_gradient"] = roles.get("deferred_gradient", 0) + int(known.gradients.full)
    return replace(found, roles=roles, memory=replace(chosen, source="estimated"))


def with_first_step_peak(
    found: TrainingPlan, offloaded_pass: Callable[[], StepEstimate | None], aliasable: float = 0.0
) -> TrainingPlan:
    """Return the plan with the peak of the eager first step, which offloads saved tensors within a limit.

    Args:
        offloaded_pass: returns an eager pass with all saved tensors on the host; None if it could not be traced.
        aliasable: bytes of gradients that may alias compute copies. They do so in the first step only if setup has
            shown that not everything fits.
    """
    memory_plan, eager = found.memory, found.passes.eager
    if eager is None:
        return found
    context = found.device.context
    limit = memory_limit(None, found.device.memory) if memory_plan is None else memory_plan.limit
    aliases_later = (
        memory_plan is not None and memory_plan.chosen.grad_aliasing and context + found.stays + aliasable <= limit
    )
    extra = aliasable * aliases_later
    most = context + found.first_peak_with(eager, extra)
    if most > limit and (least := offloaded_pass()) is not None:
        most = max(context + found.first_peak_with(least, extra), limit)
    memory = None if memory_plan is None else replace(memory_plan, first_step=int(most))
    return replace(found, first_peak=int(most - context), memory=memory)


def _config(kind: Precision, options: dict[str, Any]) -> EngineConfig:
    config = EngineConfig(**options)
    if kind.autocast is torch.bfloat16:
        config = replace(config, reduce_dtype=config.reduce_dtype or "bf16")
    return replace(config, compute_dtype=kind.autocast)


def _step(
    module: nn.Module, batch: Any, trace: TraceConfig, compiles: bool, saves_on_host: bool = False
) -> tuple[StepEstimate | None, str]:
    """Return a step, or the reason why there is none."""
    try:
        return run_step(module, batch, trace, compiles, saves_on_host), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _facts(
    shards: list[ParamShard], optimizers: OptimizerMemory, config: EngineConfig, card: Device, ranks: int, hosts: int
) -> EngineMemoryFacts:
    dtype = config.compute_dtype if config.compile else None
    full = sum(s.elements * ranks * (s.dtype if s.keeps_dtype else s.compute_dtype(dtype)).itemsize for s in shards)
    trained = [s for s in shards if s.trained] if ranks > 1 else []
    masters = 0 if dtype is None else host_master_bytes(shards, replace(config, offload=("optimizer", "parameters")))
    masters_may_move = masters and hosts == 1 and not config.tuning.grad_aliasing
    possible = {"activations": config.compile, "parameters": masters_may_move}
    return EngineMemoryFacts(
        states=optimizers.states,
        matrix_updates=_update_bytes(optimizers, config),
        gradients=GradientBytes(
            full=sum(s.elements * ranks * torch.promote_types(s.dtype, torch.float32).itemsize for s in trained),
            reduced=sum(s.elements * ranks * (config.wire_dtype or s.dtype).itemsize for s in trained),
            aliasable=aliasable_gradient_bytes(shards, config),
        ),
        masters=masters,
        full_weights=full if ranks > 1 and config.stage == 3 else 0,
        ring=config.offload_buffer_bytes,
        prefetches_state=config.cuda_graph_step is not False,
        offloadable=tuple(name for name in OFFLOAD_CHOICES if possible.get(name, True)),
        gather_s=1 / (card.inside * LINKS) if ranks > 1 else 0.0,
    )


def _update_bytes(optimizers: OptimizerMemory, config: EngineConfig) -> int:
    """Return the bytes of full updates of matrices that exist between steps."""
    captured = config.cuda_graph_step is not False
    return optimizers.updates.buffers + optimizers.updates.workspace * captured


def _assemble(
    shards: list[ParamShard],
    optimizers: OptimizerMemory,
    config: EngineConfig,
    where: tuple[Cluster, int],
    passes: PassEstimates,
) -> TrainingPlan:
    cluster, accumulate = where
    ranks, inside = cluster.ranks, cluster.gpus
    roles = persistent_bytes(shards, config, cluster.hosts, accumulate)
    offloads = "optimizer" in config.offload
    moved = (optimizers.states if offloads else 0) + host_master_bytes(shards, config)
    ring = min(config.offload_buffer_bytes, moved)
    roles["optimizer_state"] = 0 if offloads else optimizers.states
    roles["offload_buffers"] = int(ring)
    roles["matrix_updates"] = _update_bytes(optimizers, config)
    roles["reduce_buckets"] = reduce_bucket_bytes(
        shards, config, inside, copied=ranks > 1 and inside > 1, alone=ranks == 1
    )
    roles["buffers"] = passes.buffers
    found = TrainingPlan(
        device=cluster.device,
        ranks=ranks,
        parameters=sum(s.numel for s in shards),
        roles=roles,
        passes=passes,
        # An optimizer's own step reads gradients in the weights' dtype, so aliased ones are copied.
        temporary=max(
            optimizers.temporary + aliased_gradient_bytes(shards, config) * optimizers.casts_gradients,
            optimizers.updates.workspace,
        ),
        graphs=config.cuda_graphs is not False and config.compile,
    )
    step = passes.compiled or passes.eager
    if step is None:
        return found
    seconds = step_seconds(step, shards, config, cluster, accumulate)
    waits = moved / HOST_BYTES_PER_S
    if config.cuda_graph_step is not False and "parameters" not in config.offload:
        # The staging buffers are filled and drained during forward and backward.
        waits -= min(ring / HOST_BYTES_PER_S, seconds.compute, waits)
    return replace(found, seconds=replace(seconds, optimizer=seconds.optimizer + waits))


def _inputs(
    found: TrainingPlan, config: EngineConfig, known: EngineMemoryFacts, passes: int, current: MemoryConfig
) -> PlannerInputs:
    step = found.passes.compiled or found.passes.eager
    limit = memory_limit(config.memory, found.device.memory)
    inputs = known.inputs("estimated", limit, found.peak + found.device.context, current)
    if step is None:
        return inputs
    times = replace(inputs.times, pass_s=step.forward_s + step.backward_s, passes=float(passes), pass_known="estimated")
    saved = step.saved / max(current.activation_memory_budget, 0.01)
    return replace(inputs, activations=saved, weights=known.full_weights, times=times)
