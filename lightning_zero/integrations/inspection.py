"""What users may look at, and choose, in the engine under a strategy: graphs, passes, plans, costs, counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_zero.memory_planner.memory_plan import MemoryPlan
from lightning_zero.compile.events import GraphObserver, PassObserver
from lightning_zero.compile.passes import PassSpec
from lightning_zero.compile.graph_plan import Plan
from lightning_zero.engine import Engine, engine_of
from lightning_zero.profiling.cost_model import CostModel

__all__ = ["Inspection"]


class Inspection:
    """For a strategy, which says where its engine is."""

    _engine: Engine | None
    _observers: list[GraphObserver]
    _pass_observers: list[PassObserver]
    lightning_module: Any

    def _require_engine(self) -> Engine:
        raise NotImplementedError

    def observe_graphs(self, observer: GraphObserver) -> None:
        """``observer(what, graph)`` sees every graph that is compiled from now on: "joint" (where its layers are alike,
        after Inductor's own passes over it), and "before" and "after" the passes. It must not keep graphs. Call it
        before ``fit()``, or in a callback's ``setup``."""
        self._observers.append(observer)
        if self._engine is not None:
            self._engine.session.progress.observe(observer)

    def observe_passes(self, observer: PassObserver) -> None:
        """``observer(trace)`` is told what each pass does to each graph that is compiled from now on: nodes added,
        removed, changed and moved, a diff, and milliseconds (:class:`PassTrace`). Graphs then do not come out of the
        compiler's cache. Call it before ``fit()``, or in a callback's ``setup``."""
        self._pass_observers.append(observer)
        if self._engine is not None:
            self._engine.session.progress.observe_passes(observer)

    def _observe_engine(self, engine: Engine) -> None:
        """Lets those observers see the engine's graphs that were there before it."""
        for observer in self._observers:
            engine.session.progress.observe(observer)
        for pass_observer in self._pass_observers:
            engine.session.progress.observe_passes(pass_observer)

    def register_pass(self, spec: PassSpec) -> None:
        """Makes a graph pass of your own known, for :meth:`use_passes` and ``PassSchedule``. Call it in a hook, on
        every rank.

        Raises:
            ValueError: there is a pass of that name.
        """
        self._require_engine().session.register_pass(spec)

    def use_passes(self, names: Sequence[str] | None) -> None:
        """Graphs go through the passes of these names from now on, None meaning the default ones. Call it between
        steps, on every rank.

        Raises:
            ValueError: unknown names, broken contracts, or passes that leave a graph unfinished.
        """
        self._require_engine().session.use_passes(names)

    def disable_passes(self, names: Sequence[str]) -> None:
        """Switches the passes of these names off, whichever are in use, and those that were switched off before on
        again; to find out whether one of them is to blame. Call it between steps, on every rank.

        Raises:
            ValueError: unknown names, or passes that graphs cannot do without; the message says what would be missing.
        """
        self._require_engine().session.disable_passes(names)

    def known_passes(self) -> dict[str, PassSpec]:
        """All passes that can be used, by name; the order of the built-in ones is that in which they run by default."""
        return self._require_engine().session.known_passes

    def plan(self) -> Plan:
        """What the compiled graphs that have run so far gather and reduce, and when; prints as a table."""
        return self._require_engine().session.plans.plan

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """How ``memory`` is spent, and what that is expected to come to; prints as a table, ``as_dict()`` is for JSON.
        None without ``memory``, and before optimizers are set up."""
        return self._require_engine().memory.plan

    @property
    def peer_bytes(self) -> int:
        """Memory of this rank that peers read, which ``torch.cuda.max_memory_allocated()`` leaves out."""
        return self._require_engine().transports.nbytes

    def costs(self) -> CostModel | None:
        """What was measured of the device and the links; None where nothing was. Call it on every rank."""
        module = self.lightning_module  # which an earlier Trainer may have sharded
        return (self._engine or (module is not None and engine_of(module)) or self._require_engine()).session.costs

    def counters(self) -> dict[str, int]:
        """Counts of what this rank has gathered and reduced so far."""
        return self._require_engine().executor.counters()
