"""Watches over what an engine compiles: tells the user, shows graphs to observers, makes ranks agree, keeps plans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch.fx import Graph

from lightning_zero.compile.agreement import Agreement
from lightning_zero.compile.backend import Compiler, GraphObserver
from lightning_zero.compile.plan import GraphPlan, Plan
from lightning_zero.config import CompileConfig

__all__ = ["Supervisor"]

log = logging.getLogger(__name__)


class Supervisor:
    """One engine's.

    Args:
        agreement: of the ranks.
        observers: see every graph that is compiled; more may join with :meth:`observe`.
        say: shows a line to the user; called on every rank.
    """

    def __init__(
        self,
        agreement: Agreement,
        observers: Sequence[GraphObserver] = (),
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._agreement = agreement
        self._observers = list(observers)
        self._say = say or log.info
        self._plans: list[GraphPlan] = []
        self._started: set[str] = set()
        self._compiler: Compiler | None = None

    def compiler(self, config: CompileConfig, world_size: int) -> Callable[[str], dict[str, Any]]:
        """Arguments of ``torch.compile`` by module name; replaces the compiler before."""
        self._compiler = Compiler(config, world_size, self)
        return self._compiler.arguments

    def observe(self, observer: GraphObserver) -> None:
        """``observer`` sees every graph that is compiled from now on."""
        self._observers.append(observer)

    @property
    def plan(self) -> Plan:
        """Of all graphs that have run."""
        return Plan(tuple(self._plans))

    # -- events

    @property
    def wants_graphs(self) -> bool:
        return bool(self._observers)

    def graph(self, what: str, graph: Graph) -> None:
        for observer in self._observers:
            observer(what, graph)

    def compiling(self, name: str, busy: bool, seconds: float) -> None:
        shown = repr(name) if name else "the LightningModule"
        if busy and name not in self._started:
            self._started.add(name)
            self._say(f"Compiling calls of {shown}: this step takes longer.")
        elif not busy:
            self._say(f"Compiled a graph of {shown} in {seconds:.1f} s.")
        with suppress(Exception):  # an exception of the compiler must not be hidden by one of the store
            self._agreement.compiling(busy)

    def new_plan(self, digest: str, text: str) -> None:
        """A graph is about to run whose plan is new to this rank.

        Raises:
            RankMismatchError: see :meth:`Agreement.check`.
        """
        plan = GraphPlan.from_json(text)
        self._agreement.check(digest, plan.collectives())
        self._plans.append(plan)
        if self._compiler is not None:
            self._compiler.agreed.append(plan)
