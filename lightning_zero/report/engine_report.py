"""Report an engine's memory by role, reasons against CUDA graphs, and a startup line."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from lightning_zero.compat.tensors import tree_leaves
from lightning_zero.compile.graph_plan import FP8
from lightning_zero.compile.passes.gather_groups import dtype_name
from lightning_zero.config.text import format_bytes
from lightning_zero.engine import Engine
from lightning_zero.profiling.device_gauges import MemoryGauge
from lightning_zero.sharding.fp8_shards import DTYPE as FP8_DTYPE
from lightning_zero.sharding.fp8_shards import fp8_shards_conflict
from lightning_zero.sharding.param_record import Role
from lightning_zero.sharding.shard_tensor import no_shard_dispatch

log = logging.getLogger(__name__)

FORWARD_BACKWARD, OPTIMIZER = "forward_backward", "optimizer_step"
MOST_NAMES = 3  # of compiled modules in a line
SEPARATE_ROLES = {
    "matrix_updates": "full updates of matrices",
    "reduce_buckets": "reduce buckets",
    "captures": "captured graphs",
    "optimizer_state_on_host": "optimizer state on the host",
    "master_shard_on_host": "master weights on the host",
    "activations_on_host": "activations on the host",
}


def memory_by_role(engine: Engine, optimizers: Sequence[torch.optim.Optimizer] = ()) -> dict[str, int]:
    """Return this rank's bytes by role.

    Names that end in ``_on_host`` are host memory. ``peers`` is symmetric memory, which the allocator does not see; its
    bytes also count under their roles.
    """
    memory = engine.sharder.memory
    with no_shard_dispatch():
        found = {role.value.replace(" ", "_").replace("-", "_"): _bytes(memory.tensors(role)) for role in Role}
        copies = {
            t.data_ptr() for what in (Role.COMPUTE_SHARD, Role.FULL_PRECISION_SHARD) for t in memory.tensors(what)
        }
        # Gradients may alias copies, and cached weights may be host shards.
        for name, role in (("gradient", Role.GRADIENT), ("unsharded_cache", Role.UNSHARDED_CACHE)):
            found[name] = _bytes([tensor for tensor in memory.tensors(role) if tensor.data_ptr() not in copies])
        on_host = memory.on_host.nbytes if memory.on_host is not None else 0
        found["master_shard"] -= on_host
        found["master_shard_on_host"] = on_host
        kept = tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])
        states = [value for value in kept if isinstance(value, torch.Tensor)]
        host_states = [value for value in states if engine.optimizers.on_host and value.device.type == "cpu"]
        found["optimizer_state"] = _bytes(states) - _bytes(host_states)
        found["optimizer_state_on_host"] = _bytes(host_states)
    found["matrix_updates"] = sum(engine.optimizers.stepper(optimizer).update_bytes for optimizer in optimizers)
    found["reduce_buckets"] = engine.executor.counters().get("bucket_bytes", 0)
    found["activations_on_host"] = engine.executor.activations.nbytes
    found["captures"] = engine.cuda_graphs.nbytes
    found["peers"] = engine.transports.nbytes
    return found


def replay_blockers(engine: Engine, optimizers: Sequence[torch.optim.Optimizer] = ()) -> dict[str, str]:
    """Return why "forward_backward" and "optimizer_step" are not CUDA graphs; "" if they may be."""
    compiled = engine.config.compiled.enabled
    steps = [engine.optimizers.stepper(optimizer).eager_reason for optimizer in optimizers]
    return {
        FORWARD_BACKWARD: engine.cuda_graphs.disabled_reason() if compiled else "nothing is compiled",
        OPTIMIZER: "; ".join(sorted({reason for reason in steps if reason})),
    }


def startup_summary(engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return a line like ``Runs: ZeRO-3 on 2 CPU ranks; compiled: 'net'; ... 1.6 MiB on each rank.``."""
    blockers = replay_blockers(engine, optimizers)
    log.debug("Runs: details (transports=%s, blockers=%s)", engine.transports.describe(), blockers)
    parts = [_stage(engine), _compiled(engine), *_fp8_layers(engine), *_transports(engine), _replays(engine, blockers)]
    return f"Runs: {'; '.join(parts)}. {_memory(engine, optimizers)}"


def _stage(engine: Engine) -> str:
    dtype = engine.config.compute_dtype
    computing = f" in {str(dtype).removeprefix('torch.')}" if dtype is not None else ""
    hosts, replicas = engine.mesh.host_count, engine.config.tuning.replicate_over is not None
    where = f" of {hosts} hosts" if hosts > 1 else " (replicate_over changes nothing on one host)" if replicas else ""
    where += ", a replica on each" if engine.mesh.replicated else ""
    ranks = f"{engine.device.type.upper()} rank{'s' if engine.world_size > 1 else ''}"
    return f"ZeRO-{engine.config.stage} on {engine.world_size} {ranks}{where}{computing}"


def _compiled(engine: Engine) -> str:
    compiled = engine.session.compiled_modules
    if compiled is None or not engine.config.compiled.enabled:
        return "nothing compiled, because of compile=False"
    names = [
        repr(name) if name else "the whole module" for name in compiled.modules if name not in compiled.limit_reasons
    ]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    reasons = compiled.eager_reasons | compiled.limit_reasons
    eager = [f"{name or 'the whole module'!r} runs eagerly: {why}" for name, why in reasons.items()]
    others = [f"{len(eager) - MOST_NAMES} more run eagerly"] if len(eager) > MOST_NAMES else []
    shown = f"compiled: {', '.join(names[:MOST_NAMES]) or 'nothing yet'}{more}"
    if names and compiled.call_info.called and not engine.session.progress.compiled:
        shown = (
            f"nothing compiled, because torch found no graph in {', '.join(names[:MOST_NAMES])}{more} (it skips a "
            "method whose loop breaks a graph; TORCH_LOGS=graph_breaks names the line)"
        )
    return "; ".join([shown, *eager[:MOST_NAMES], *others])


def _fp8_layers(engine: Engine) -> list[str]:
    """Return how many weights have products in fp8, and why others have none, with ``linear_dtype="fp8"``."""
    if engine.config.linear_dtype != FP8:
        return []
    plans = engine.session.plans.plan.graphs
    linears = {linear.weight: linear for plan in plans if plan.kind == "forward" for linear in plan.linears}
    reasons = Counter(reason for linear in linears.values() for reason in linear.reasons)
    converted = sum(not linear.reasons for linear in linears.values())
    listed = [f"{reason} ({count})" for reason, count in reasons.most_common(MOST_NAMES)]
    others = f", in 16 bits: {', '.join(listed)}" if listed else ""
    scales = "" if engine.config.tuning.fp8_recipe == "tensorwise" else f" {engine.config.tuning.fp8_recipe}"
    return [f"fp8{scales}: {converted} of {len(linears)} linear layers{others}", *_fp8_gathers(engine)]


def _fp8_gathers(engine: Engine) -> list[str]:
    """Return how many weights are gathered or read in fp8, with ``fp8_shards=True``."""
    if not engine.config.tuning.fp8_shards:
        return []
    if (conflict := fp8_shards_conflict(engine.config, engine.mesh)) is not None:
        return [f"fp8_shards=True changes nothing, because {conflict}"]
    if engine.world_size == 1:
        return [f"{len(engine.sharder.memory.tensors(Role.FP8_SHARD))} weights are read in fp8"]
    gathers = [gather for plan in engine.session.plans.plan.graphs for gather in plan.gathers]
    names = {name for gather in gathers if gather.dtype == dtype_name(FP8_DTYPE) for name in gather.weights}
    return [f"{len(names)} weights are gathered in fp8"]


def _transports(engine: Engine) -> list[str]:
    """Return how data moves between ranks, if it is slower than it could be on this device."""
    if engine.world_size == 1 or engine.device.type == "cpu":
        return []
    used, prefix = engine.transports.collectives_used, "collectives ("
    if not used:
        return ["weights and gradients use peer copies"]
    reasons = [how.removeprefix(prefix) for how in engine.transports.describe().values() if how.startswith(prefix)]
    return [f"{used} ({reasons[0].removesuffix(')')})" if reasons and reasons[0].endswith(")") else used]


def _replays(engine: Engine, blockers: Mapping[str, str]) -> str:
    if engine.device.type == "cpu" and all(blockers.values()):
        return "no CUDA graphs, because the device is a CPU"
    if all(blockers.values()):
        return f"no CUDA graphs, because {blockers[FORWARD_BACKWARD]}"
    names = {FORWARD_BACKWARD: "forward and backward", OPTIMIZER: "optimizer step"}
    replayed = ", ".join(name for what, name in names.items() if not blockers[what])
    reasons = [f" (not {name}: {blockers[what]})" for what, name in names.items() if blockers[what]]
    return f"CUDA graphs: {replayed}{''.join(reasons)}"


def _memory(engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    roles = memory_by_role(engine, optimizers)
    shards = sum(nbytes for what, nbytes in roles.items() if what not in ("peers", *SEPARATE_ROLES))
    separate = {name: roles[what] for what, name in SEPARATE_ROLES.items() if roles[what]}
    log.debug("Runs: memory of this rank (shards=%s, others=%s)", format_bytes(shards), separate)
    host = sum(nbytes for what, nbytes in roles.items() if what.endswith("_on_host"))
    parts = [f"{format_bytes(shards)} of model state"]
    parts += [f"{format_bytes(host)} on the host"] if host else []
    gauge = MemoryGauge(engine.device)
    if gauge.reports_memory:
        read = gauge.read()
        parts.append(f"a peak of {format_bytes(read.allocated)}")
    return f"Each rank has {', '.join(parts)}."


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
