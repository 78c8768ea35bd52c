"""The numbers of a window of steps, by the names under which they are logged."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_zero.engine import Engine
from lightning_zero.profiling.headroom import MemoryGauge
from lightning_zero.report.exposed import exposed_seconds, pass_plans
from lightning_zero.report.peaks import PeakFlops
from lightning_zero.report.readings import memory_by_role, replay_blockers
from lightning_zero.report.window import EngineCounters, StepWindow

__all__ = ["window_metrics"]


def window_metrics(
    engine: Engine, optimizers: Sequence[torch.optim.Optimizer], window: StepWindow, steps: int, peak: PeakFlops | None
) -> tuple[dict[str, float], list[str]]:
    """See ``CommMonitor`` for the names; and lines that say what is missing, and why.

    Args:
        window: that has ended.
        steps: of the optimizer, in it.
    """
    during = window.during
    assert during is not None
    values: dict[str, float] = {}
    said: list[str] = []
    if not during.compiled:
        values |= _rates(window, steps, engine.world_size, peak)
        exposed = _exposed(engine, window)
        if isinstance(exposed, float):
            values["comm/exposed_ms_estimated"] = exposed * window.tally.batches / steps * 1e3
        else:
            said.append(f"CommMonitor logs no exposed communication: {exposed}.")
    values["comm/gathered_mib"] = during.gathered / steps / 2**20
    values["comm/reduced_mib"] = during.reduced / steps / 2**20
    values |= {f"memory/{what}_mib": nbytes / 2**20 for what, nbytes in _memory(engine, optimizers).items()}
    replayed, why = _replays(engine, optimizers, during)
    return values | replayed, said + why


def _rates(window: StepWindow, steps: int, world_size: int, peak: PeakFlops | None) -> dict[str, float]:
    seconds, tally = window.seconds(), window.tally
    found = {
        "throughput/step_ms": seconds / steps * 1e3,
        "throughput/samples_per_sec": tally.samples * world_size / seconds,
    }
    if tally.lengths:
        found["throughput/tokens_per_sec"] = tally.lengths * world_size / seconds
    if tally.flops:
        found["throughput/tflops_per_device"] = tally.flops / seconds / 1e12
        if peak is not None:
            found["throughput/mfu"] = tally.flops / seconds / peak.flops
    return found


def _exposed(engine: Engine, window: StepWindow) -> float | str:
    """Seconds of one pass; or why they are not known."""
    if engine.world_size == 1:
        return 0.0
    if not engine.config.compiled.enabled:
        return "there are no plans, since nothing is compiled"
    if engine.session.costs is None:
        return f"it is estimated from the speed of links, which is not measured on {str(engine.device)!r}"
    graphs = pass_plans(engine.session.plans.plan, window.pass_gathered)
    if graphs is None:
        return "a batch does not run each of its graphs once"
    seconds = exposed_seconds(graphs, window.pass_seconds())
    return "the plan has no estimates" if seconds is None else seconds


def _memory(engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, int]:
    gauge = MemoryGauge(engine.device)
    found = {}
    if gauge.reports_memory:
        read = gauge.read()
        found = {"peak": read.allocated, "reserved": read.reserved}
    return found | memory_by_role(engine, optimizers)


def _replays(
    engine: Engine, optimizers: Sequence[torch.optim.Optimizer], during: EngineCounters
) -> tuple[dict[str, float], list[str]]:
    replayed = {"forward_backward": during.replayed_graphs > 0, "optimizer_step": during.replayed_steps > 0}
    why = replay_blockers(engine, optimizers)
    said = [
        f"{what.replace('_', ' ').replace('forward backward', 'forward and backward')}: not replayed: {why[what]}."
        for what, was in replayed.items()
        if not was and why[what]
    ]
    return {f"replays/{what}": float(was) for what, was in replayed.items()}, said
