"""Methods of strategies to observe and configure the compiler, and to read plans and counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_zero.compile.events import GraphObserver, PassObserver
from lightning_zero.compile.graph_plan import Plan
from lightning_zero.compile.passes import PassSpec
from lightning_zero.engine import Engine, engine_of
from lightning_zero.memory_planner.memory_plan import MemoryPlan
from lightning_zero.profiling.cost_model import CostModel


class EngineIntrospectionMixin:
    """Public methods that a strategy inherits; the strategy provides its engine."""

    _engine: Engine | None
    _observers: list[GraphObserver]
    _pass_observers: list[PassObserver]
    lightning_module: Any

    def _require_engine(self) -> Engine:
        raise NotImplementedError

    def observe_graphs(self, observer: GraphObserver) -> None:
        """Call ``observer(stage, graph)`` for every graph that is compiled from now on.

        Call it before ``fit()``, or in a callback's ``setup``.

        Args:
            observer: must not keep graphs. The stage is ``"joint"`` (after Inductor's joint passes if layers are
                deduplicated), or ``"before"`` or ``"after"`` the graph passes.
        """
        self._observers.append(observer)
        if self._engine is not None:
            self._engine.session.progress.observe(observer)

    def observe_passes(self, observer: PassObserver) -> None:
        """Call ``observer(trace)`` for each pass over each graph that is compiled from now on.

        Disables the compiler's cache. Call it before ``fit()``, or in a callback's ``setup``.

        Args:
            observer: gets a :class:`PassTrace` with changed nodes, a diff and milliseconds.
        """
        self._pass_observers.append(observer)
        if self._engine is not None:
            self._engine.session.progress.observe_passes(observer)

    def _observe_engine(self, engine: Engine) -> None:
        """Register observers that were added before the engine was made."""
        for observer in self._observers:
            engine.session.progress.observe(observer)
        for pass_observer in self._pass_observers:
            engine.session.progress.observe_passes(pass_observer)

    def register_pass(self, spec: PassSpec) -> None:
        """Register a graph pass for :meth:`use_passes` and ``PassSchedule``. Call it in a hook, on every rank.

        Raises:
            ValueError: there is a pass of that name.
        """
        self._require_engine().session.register_pass(spec)

    def use_passes(self, names: Sequence[str] | None) -> None:
        """Run the passes of these names from now on. Call it between steps, on every rank.

        Args:
            names: in order; None: the default passes.

        Raises:
            ValueError: unknown names, broken contracts, or passes that leave a graph incomplete.
        """
        self._require_engine().session.use_passes(names)

    def disable_passes(self, names: Sequence[str]) -> None:
        """Disable exactly these passes, to find a faulty one. Call it between steps, on every rank.

        Passes that an earlier call has disabled run again.

        Raises:
            ValueError: unknown names, or passes that graphs need; the message says what would be missing.
        """
        self._require_engine().session.disable_passes(names)

    def known_passes(self) -> dict[str, PassSpec]:
        """Return all passes by name, the built-in ones in their default order."""
        return self._require_engine().session.known_passes

    def plan(self) -> Plan:
        """Return the all-gathers and gradients of each compiled graph; ``print()`` shows them as tables."""
        return self._require_engine().session.plans.plan

    def fp8_health(self) -> dict[str, float]:
        """Return this rank's amax, underflow and overflow of fp8 matrices.

        Empty without ``fp8_health_every``. Numbers are the largest of the last reported steps, by name, such as
        ``"layer.weight/input_amax"``. After ``fit()`` these are the steps since the last full report.
        """
        health = self._require_engine().fp8_health
        return {} if health is None else health.read()

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """The plan for ``memory=`` and its expected peak; prints as a table, and ``as_dict()`` is for JSON.

        None without ``memory``, and before optimizers are set up.
        """
        return self._require_engine().memory.plan

    @property
    def peer_bytes(self) -> int:
        """This rank's symmetric memory in bytes, which ``torch.cuda.max_memory_allocated()`` does not count."""
        return self._require_engine().transports.nbytes

    def costs(self) -> CostModel | None:
        """Return the measured costs of the device and the links, or None. Call it on every rank."""
        module = self.lightning_module  # an earlier Trainer may have sharded it
        return (self._engine or (module is not None and engine_of(module)) or self._require_engine()).session.costs

    def counters(self) -> dict[str, int]:
        """Return this rank's counts of all-gathers and reductions."""
        return self._require_engine().executor.counters()
