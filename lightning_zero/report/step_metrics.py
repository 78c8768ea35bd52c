"""Measure a window of training steps, and compute the metrics that :class:`CommMonitor` logs.

:class:`StepWindow` records events without waiting for the device. :func:`window_metrics` adds memory by role and an
estimate of exposed communication, which is computed because a measurement would slow the pass down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_zero.compile.graph_plan import GraphPlan, Plan
from lightning_zero.engine import Engine
from lightning_zero.profiling.device_gauges import DeviceTimer, MemoryGauge
from lightning_zero.profiling.devices import PeakFlops
from lightning_zero.report.engine_report import memory_by_role, replay_blockers
from lightning_zero.sharding.fp8_health import Fp8Health

HALVINGS = 40  # of the interval in which the compute factor is searched
REDUCE, START, WAIT = range(3)  # in this order if they are at the same place


@dataclass(frozen=True)
class EngineCounters:
    """Running counts of an engine.

    Attributes:
        gathered: bytes of unsharded weights.
        reduced: bytes of reduced buckets.
        replayed_graphs: replays of CUDA graphs of forward and backward.
        replayed_steps: replays of optimizer steps.
        compiled: compilations begun or ended.
    """

    gathered: int
    reduced: int
    replayed_graphs: int
    replayed_steps: int
    compiled: int

    def since(self, before: EngineCounters) -> EngineCounters:
        return EngineCounters(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))


@dataclass
class BatchTotals:
    """Sums over the batches of a window, on this rank."""

    batches: int = 0
    samples: int = 0
    lengths: int = 0
    flops: float = 0.0


@dataclass
class StepWindow:
    """Times a window of steps, from its construction to :meth:`end`.

    Call :meth:`pass_begins` and :meth:`pass_ends` around each forward and backward, of which the first is measured, and
    :meth:`pause` and :meth:`resume` around everything that is no training. Read :meth:`seconds` once :attr:`over`.

    Attributes:
        device: of the engine.
        counts: returns the engine's counters.
        tally: sums over the batches.
        during: counts of the window, once it has ended.
        pass_gathered: bytes that the measured pass gathered.
    """

    device: torch.device
    counts: Callable[[], EngineCounters]
    tally: BatchTotals = field(default_factory=BatchTotals)
    during: EngineCounters | None = None
    pass_gathered: int = 0

    def __post_init__(self) -> None:
        self._timer = DeviceTimer(self.device)
        self._begun, self._before = self._timer.now(), self.counts()
        self._pauses: list[tuple[Any, Any]] = []
        self._paused: Any = None
        self._pass: list[Any] = []
        self._ended: Any = None

    def pass_begins(self) -> None:
        if not self._pass:
            self._pass.append(self._timer.now())
            self.pass_gathered = -self.counts().gathered

    def pass_ends(self) -> None:
        if len(self._pass) == 1:
            self._pass.append(self._timer.now())
            self.pass_gathered += self.counts().gathered

    def pause(self) -> None:
        self._paused = self._timer.now()

    def resume(self) -> None:
        if self._paused is not None:
            self._pauses.append((self._paused, self._timer.now()))
            self._paused = None

    def end(self) -> None:
        self.resume()
        self._ended = self._timer.now()
        self.during = self.counts().since(self._before)

    @property
    def over(self) -> bool:
        """Return True if the device has reached the end."""
        return self._timer.is_done(self._ended)

    def seconds(self) -> float:
        """Return the seconds of the window without pauses. Waits for the device unless :attr:`over`."""
        paused = sum(self._timer.elapsed_s(*pause) for pause in self._pauses)
        return self._timer.elapsed_s(self._begun, self._ended) - paused

    def pass_seconds(self) -> float | None:
        """Return the seconds of the measured forward and backward; None without one."""
        return self._timer.elapsed_s(*self._pass) if len(self._pass) == 2 else None


def window_metrics(
    engine: Engine, optimizers: Sequence[torch.optim.Optimizer], window: StepWindow, steps: int, peak: PeakFlops | None
) -> tuple[dict[str, float], list[str]]:
    """Return the metrics by their names in ``CommMonitor``, and a line for each missing one.

    Args:
        window: a window that has ended.
        steps: number of optimizer steps in it.
    """
    during = window.during
    assert during is not None
    values: dict[str, float] = {}
    missing: list[str] = []
    if not during.compiled:
        values |= _rates(window, steps, engine.world_size, peak)
        exposed = exposed_per_pass(engine, window.pass_gathered, window.pass_seconds())
        if isinstance(exposed, float):
            values["comm/exposed_ms_estimated"] = exposed * window.tally.batches / steps * 1e3
        else:
            missing.append(f"CommMonitor logs no exposed communication: {exposed}.")
    values["comm/gathered_mib"] = during.gathered / steps / 2**20
    values["comm/reduced_mib"] = during.reduced / steps / 2**20
    values |= {f"memory/{role}_mib": nbytes / 2**20 for role, nbytes in _memory(engine, optimizers).items()}
    if engine.fp8_health is not None:
        values |= fp8_metrics(engine.fp8_health)
    replayed, why = _replays(engine, optimizers, during)
    return values | replayed, missing + why


def fp8_metrics(health: Fp8Health) -> dict[str, float]:
    """Return the last report about fp8 matrices by its names in ``CommMonitor``; empty without one."""
    steps = {"fp8/steps": float(health.steps)} if health.reports else {}
    return steps | {f"fp8/{name}": number for name, number in health.values.items()}


def pass_plans(plan: Plan, gathered: int) -> list[GraphPlan] | None:
    """Return the graphs of a pass: the last one of each kind for the same weights.

    Args:
        plan: of all graphs.
        gathered: bytes that a pass gathers.

    Returns:
        None if these graphs gather other bytes, so that a pass does not run each of them once.
    """
    latest: dict[object, GraphPlan] = {}
    for graph in plan.graphs:
        touched = graph.gathers if graph.kind == "forward" else graph.reduces
        latest[graph.kind, frozenset(name for entry in touched for name in entry.weights)] = graph
    graphs = list(latest.values())
    return graphs if sum(gather.bytes for graph in graphs for gather in graph.gathers) == gathered else None


def exposed_seconds(graphs: Sequence[GraphPlan], pass_s: float | None = None) -> float | None:
    """Return the seconds in which compute waits for weights, or gradients are reduced after the last node.

    Args:
        graphs: of the pass; their plans estimate compute and transfers.
        pass_s: measured seconds of the graphs together, by which a factor corrects compute; None if unknown.

    Returns:
        None if some plan has no seconds.
    """
    computed = sum(graph.compute_s for graph in graphs)
    if not graphs or not all(graph.compute_s for graph in graphs):
        return None
    factor = 1.0
    # If transfers alone are estimated to take longer than the pass did, nothing is corrected.
    if pass_s is not None and _run(graphs, 0.0)[0] < pass_s:
        low, factor = 0.0, pass_s / computed  # the latter is right if no transfer is exposed
        for _ in range(HALVINGS):
            middle = (low + factor) / 2
            low, factor = (middle, factor) if _run(graphs, middle)[0] < pass_s else (low, middle)
    return _run(graphs, factor)[1]


def _run(graphs: Sequence[GraphPlan], factor: float) -> tuple[float, float]:
    """Return all and exposed seconds if compute takes ``factor`` times as long as planned.

    Gathers run one after another on a stream of their own, and so do reductions.
    """
    seconds = exposed = 0.0
    for graph in graphs:
        events = [(gather.started_s, START, n) for n, gather in enumerate(graph.gathers)]
        events += [(gather.waited_s, WAIT, n) for n, gather in enumerate(graph.gathers)]
        events += [(reduce.at_s, REDUCE, n) for n, reduce in enumerate(graph.reduces)]
        now = at = gathers_end = reduces_end = waited = 0.0
        ends: dict[int, float] = {}
        for place, what, number in sorted(events):
            now, at = now + (place - at) * factor, place
            if what == START:
                gathers_end = ends[number] = max(now, gathers_end) + graph.gathers[number].transfer_s
            elif what == WAIT:
                waited += max(ends[number] - now, 0.0)
                now = max(now, ends[number])
            else:
                reduces_end = max(now, reduces_end) + graph.reduces[number].transfer_s
        now += (graph.compute_s - at) * factor
        seconds += max(now, gathers_end, reduces_end)
        exposed += waited + max(reduces_end - now, 0.0)
    return seconds, exposed


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


def exposed_per_pass(engine: Engine, gathered_bytes: int, pass_s: float | None) -> float | str:
    """Return the estimated exposed seconds of one pass, or the reason why they are unknown.

    Args:
        gathered_bytes: measured for the pass.
        pass_s: measured seconds of the pass; None if unknown.
    """
    if engine.world_size == 1:
        return 0.0
    if not engine.config.compiled.enabled:
        return "there are no plans, since nothing is compiled"
    if engine.session.costs is None:
        return f"it is estimated from the speed of links, which is not measured on {str(engine.device)!r}"
    graphs = pass_plans(engine.session.plans.plan, gathered_bytes)
    if graphs is None:
        return "a batch does not run each of its graphs once"
    seconds = exposed_seconds(graphs, pass_s)
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
    lines = [
        f"{name.replace('_', ' ').replace('forward backward', 'forward and backward')}: not replayed: {why[name]}."
        for name, was in replayed.items()
        if not was and why[name]
    ]
    return {f"replays/{name}": float(was) for name, was in replayed.items()}, lines
