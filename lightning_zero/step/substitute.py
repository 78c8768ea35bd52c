"""Other parameters and state in the place of an optimizer's own, for the length of one of its steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from lightning_zero.optim.flat_runs import State

__all__ = ["Groups", "OwnParams", "FlatParams", "ParamSwap"]

Groups = list[dict[str, Any]]


class OwnParams(NamedTuple):
    """What users know of an optimizer: ``param_groups`` and ``state`` of its own parameters."""

    groups: Groups
    state: State


class FlatParams(NamedTuple):
    """What an optimizer sees for the length of a step.

    Attributes:
        groups: none if nothing is left to do.
        state: of the parameters in them.
        origins: for each of the groups, the number of the own one whose settings it has.
    """

    groups: Groups
    state: State
    origins: Sequence[int]


class ParamSwap:
    """Swaps ``param_groups`` and ``state`` of one optimizer. Its own are back as soon as its ``step`` is over, before
    any of the user's post-hooks look at them.

    Attributes:
        stepped: its ``step`` has come to its end since it saw others last.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._own: OwnParams | None = None  # while others are in their place
        self._flat_params = FlatParams([], defaultdict(dict), [])
        self._before: Groups = []
        self._after: Callable[[OwnParams], None] = lambda own: None
        self._hook: Any = None
        self.stepped = False
        self._around: AbstractContextManager[Any] | None = None

    @property
    def shown(self) -> bool:
        """Whether the optimizer's own parameters are out of its sight: its ``step`` is still to come or under way."""
        return self._own is not None

    @property
    def own(self) -> OwnParams:
        return self._own or OwnParams(self._optimizer.param_groups, self._optimizer.state)

    def swap_in(
        self, shown: FlatParams, after: Callable[[OwnParams], None], around: AbstractContextManager[Any] | None = None
    ) -> None:
        """From now on until the end of the optimizer's next ``step``, or :meth:`end`, it sees this, inside of
        ``around``; ``after`` is then called with what is its own."""
        self._own, self._flat_params, self._after = self.own, shown, after
        self._before = [dict(group) for group in shown.groups]
        self._optimizer.param_groups, self._optimizer.state = shown.groups, shown.state
        self.stepped = False
        self._hook = self._optimizer.register_step_post_hook(lambda *_: self._restore(stepped=True))
        # The user's own hooks come after this one.
        hooks: Any = self._optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._hook.id, last=False)
        if around is not None:
            around.__enter__()
            self._around = around

    def end(self) -> bool:
        """The optimizer has its own again. Harmless when repeated; returns whether there was something to end."""
        self._restore()
        if self._hook is None:
            return False
        self._hook.remove()
        self._hook = None
        return True

    @contextmanager
    def swap_groups(self, groups: Groups) -> Iterator[None]:
        """Inside, the optimizer has these groups and nothing is stepped."""
        own = self._optimizer.param_groups
        self._optimizer.param_groups = groups
        try:
            yield
        finally:
            self._optimizer.param_groups = own

    def _restore(self, stepped: bool = False) -> None:
        self.stepped = self.stepped or stepped
        if self._own is None:
            return
        if self._around is not None:
            around, self._around = self._around, None
            around.__exit__(None, None, None)
        own, self._own = self._own, None
        self._optimizer.param_groups, self._optimizer.state = own
        for origin, now, before in zip(self._flat_params.origins, self._flat_params.groups, self._before, strict=True):
            # Some optimizers keep counters and averages in their groups.
            changes = {k: v for k, v in now.items() if k != "params" and before.get(k, self) is not v}
            own.groups[origin].update(changes)
        self._after(own)
