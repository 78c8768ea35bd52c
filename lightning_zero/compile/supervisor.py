"""Watches over what an engine compiles: tells the user, shows graphs to observers, makes ranks agree, keeps plans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.fx import Graph

from lightning_zero.compile.agreement import Agreement
from lightning_zero.compile.backend import Compiler, GraphObserver
from lightning_zero.compile.discover import CallNotes
from lightning_zero.compile.passes import PassSpec
from lightning_zero.compile.plan import GraphPlan, Plan
from lightning_zero.compile.schedule import check_passes
from lightning_zero.config import CompileConfig
from lightning_zero.profiling.estimate import NOMINAL, Costs

__all__ = ["Supervisor"]

log = logging.getLogger(__name__)


class Supervisor:
    """One engine's.

    Args:
        agreement: of the ranks.
        observers: see every graph that is compiled; more may join with :meth:`observe`.
        say: shows a line to the user; called on every rank.
        busy: is told what takes long, in words, and "" when it is over.
    """

    def __init__(
        self,
        agreement: Agreement,
        observers: Sequence[GraphObserver] = (),
        say: Callable[[str], None] | None = None,
        busy: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._agreement = agreement
        self._observers = list(observers)
        self._say = say or log.info
        self._busy = busy
        self._plans: list[GraphPlan] = []
        self._compiler: Compiler | None = None
        self.compiled = 0  # how often something was compiled, or ran that was new to this rank

    def compiler(
        self,
        config: CompileConfig,
        world_size: int,
        costs: Costs = NOMINAL,
        hold: bool = False,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> dict[str, Any]:
        """Arguments of ``torch.compile``; replaces the compiler before, whose passes stay chosen."""
        before, self._compiler = self._compiler, Compiler(config, world_size, self, costs, hold, wrap)
        if before is not None:
            self._compiler.registered, self._compiler.chosen = before.registered, before.chosen
        return self._compiler.arguments()

    def first_step_showed(self, last_read: Tensor | None, notes: CallNotes) -> None:
        """Which shard a step's forward reads last, and more; graphs that are compiled from now on go by it."""
        assert self._compiler is not None
        self._compiler.last_weight, self._compiler.notes = last_read, notes

    def register_pass(self, spec: PassSpec) -> None:
        """Makes a user's pass known.

        Raises:
            ValueError: there is a pass of that name.
        """
        assert self._compiler is not None
        if self._compiler.known().get(spec.name, spec) != spec:
            raise ValueError(f"There is a pass named {spec.name!r} already. Give yours another name.")
        self._compiler.registered[spec.name] = spec

    def use_passes(self, names: Sequence[str] | None) -> dict[str, Any] | None:
        """Arguments of ``torch.compile`` with these passes; None when they are in use already.

        Raises:
            ValueError: see :func:`check_passes`.
        """
        assert self._compiler is not None
        chosen = None if names is None else check_passes(names, self._compiler.known())
        if chosen == self._compiler.chosen:
            return None
        self._compiler.chosen = chosen
        return self._compiler.arguments()

    def keep(self, share: float) -> dict[str, Any]:
        """Arguments of ``torch.compile`` with which graphs keep this share of their weights for backward."""
        assert self._compiler is not None
        self._compiler.share = share
        return self._compiler.arguments()

    @property
    def known_passes(self) -> dict[str, PassSpec]:
        assert self._compiler is not None
        return self._compiler.known()

    def observe(self, observer: GraphObserver) -> None:
        """``observer`` sees every graph that is compiled from now on."""
        self._observers.append(observer)

    @property
    def plan(self) -> Plan:
        """Of all graphs that have run."""
        return Plan(tuple(self._plans))

    @property
    def plans_in_use(self) -> Sequence[GraphPlan]:
        """Of the graphs that have run with the chosen passes and what is kept now."""
        return self._compiler.agreed if self._compiler is not None else ()

    def say(self, line: str) -> None:
        """Shows a line to the user."""
        self._say(line)

    # -- events

    @property
    def wants_graphs(self) -> bool:
        return bool(self._observers)

    def graph(self, what: str, graph: Graph) -> None:
        for observer in self._observers:
            observer(what, graph)

    def compiling(self, what: str, busy: bool, seconds: float) -> None:
        self.compiled += 1
        if busy:
            self._say(f"Compiling {what}; this step takes longer.")
        else:
            self._say(f"Compiled it in {seconds:.1f} s.")
        self._busy(f"compiling {what}," if busy else "")
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
        self.compiled += 1
        if self._compiler is not None:
            self._compiler.agreed.append(plan)
