"""What users may look at, and choose, in the engine under a strategy: graphs, passes, plans, costs, counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_zero.compile.backend import GraphObserver
from lightning_zero.compile.passes import PassSpec
from lightning_zero.compile.plan import Plan
from lightning_zero.engine import Engine, engine_of
from lightning_zero.profiling.estimate import Costs

__all__ = ["Inspection"]


class Inspection:
    """For a strategy, which says where its engine is."""

    _engine: Engine | None
    _observers: list[GraphObserver]
    lightning_module: Any

    def _require_engine(self) -> Engine:
        raise NotImplementedError

    def observe_graphs(self, observer: GraphObserver) -> None:
        """``observer(what, graph)`` sees every graph that is compiled from now on: "joint", and "before" and "after"
        the passes. It must not keep graphs. Call it before ``fit()``, or in a callback's ``setup``."""
        self._observers.append(observer)
        if self._engine is not None:
            self._engine.observe(observer)

    def register_pass(self, spec: PassSpec) -> None:
        """Makes a graph pass of your own known, for :meth:`use_passes` and ``PassSchedule``. Call it in a hook, on
        every rank.

        Raises:
            ValueError: there is a pass of that name.
        """
        self._require_engine().register_pass(spec)

    def use_passes(self, names: Sequence[str] | None) -> None:
        """Graphs go through the passes of these names from now on, None meaning the default ones. Call it between
        steps, on every rank.

        Raises:
            ValueError: unknown names, broken contracts, or passes that leave a graph unfinished.
        """
        self._require_engine().use_passes(names)

    def known_passes(self) -> dict[str, PassSpec]:
        """All passes that can be used, by name; the order of the built-in ones is that in which they run by default."""
        return self._require_engine().known_passes

    def plan(self) -> Plan:
        """What the compiled graphs that have run so far gather and reduce, and when; prints as a table."""
        return self._require_engine().plan

    @property
    def peer_bytes(self) -> int:
        """Memory of this rank that peers read, which ``torch.cuda.max_memory_allocated()`` leaves out."""
        return self._require_engine().peers.nbytes

    def costs(self) -> Costs | None:
        """What was measured of the device and the links; None where nothing was. Call it on every rank."""
        module = self.lightning_module  # which an earlier Trainer may have sharded
        return (self._engine or (module is not None and engine_of(module)) or self._require_engine()).costs

    def counters(self) -> dict[str, int]:
        """Counts of what this rank has gathered and reduced so far."""
        return self._require_engine().executor.counters()
