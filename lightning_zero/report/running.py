"""What runs in a training, and what does not and why: a line at the end of its start."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_zero.engine import Engine
from lightning_zero.profiling.headroom import MemoryGauge
from lightning_zero.report.readings import FORWARD_BACKWARD, OPTIMIZER, memory_by_role, replay_blockers

__all__ = ["running"]

MOST_NAMES = 3
OTHERS = {
    "reduce_buckets": "reduce buckets",
    "captures": "captured graphs",
    "optimizer_state_on_host": "optimizer state on the host",
    "master_shard_on_host": "master weights on the host",
    "activations_on_host": "activations on the host",
}


def running(engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """E.g. ``Runs: ZeRO-3 on 2 x cuda, bfloat16; compiled: 'net'; weights: copies in memory that all ranks can read;
    gradients: ...; replayed: forward and backward, optimizer step; not replayed: nothing. Memory of each rank: ...``"""
    return f"Runs: {'; '.join([_stage(engine), _compiled(engine), *_ways(engine), _replays(engine, optimizers)])}. " + (
        _memory(engine, optimizers)
    )


def _stage(engine: Engine) -> str:
    dtype = engine.config.compute_dtype
    computing = f", computing in {str(dtype).removeprefix('torch.')}" if dtype is not None else ""
    hosts, replicas = engine.mesh.host_count, engine.config.tuning.replicate_over is not None
    where = f" on {hosts} hosts" if hosts > 1 else " (replicate_over changes nothing on one host)" if replicas else ""
    where += ", a replica on each" if engine.mesh.replicated else ""
    return f"ZeRO-{engine.config.stage} over {engine.world_size} x {engine.device.type}{where}{computing}"


def _compiled(engine: Engine) -> str:
    compiled_modules = engine.session.compiled_modules
    if compiled_modules is None or not engine.config.compiled.enabled:
        return "nothing compiled: compile=False"
    names = [repr(name) if name else "the whole module" for name in compiled_modules.modules if name not in compiled_modules.limit_reasons]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    reasons = compiled_modules.eager_reasons | compiled_modules.limit_reasons
    eager_reasons = [f"{name or 'the whole module'!r} runs eagerly: {why}" for name, why in reasons.items()]
    return "; ".join([f"compiled: {', '.join(names[:MOST_NAMES]) or 'nothing yet'}{more}", *eager_reasons])


def _ways(engine: Engine) -> list[str]:
    if engine.world_size == 1:
        return []
    return [f"{what} travel by {how}" for what, how in engine.transports.describe().items()]


def _replays(engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    why = replay_blockers(engine, optimizers)
    names = {FORWARD_BACKWARD: "forward and backward", OPTIMIZER: "optimizer step"}
    if why[FORWARD_BACKWARD] == why[OPTIMIZER] and why[OPTIMIZER]:
        return f"no replays: {why[OPTIMIZER]}"
    return "; ".join(
        f"{name} not replayed: {why[what]}" if why[what] else f"{name} replayed" for what, name in names.items()
    )


def _memory(engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    roles = memory_by_role(engine, optimizers)
    held = sum(nbytes for what, nbytes in roles.items() if what not in ("peers", *OTHERS))
    parts = [f"{_size(held)} of shards, gradients, copies and optimizer state"]
    parts += [f"{_size(roles[what])} of {name}" for what, name in OTHERS.items() if roles[what]]
    gauge = MemoryGauge(engine.device)
    if gauge.reports_memory:
        read = gauge.read()
        parts.append(f"{_size(read.allocated)} at the peak, {_size(read.reserved)} reserved")
    return f"On each rank: {', '.join(parts)}."


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
