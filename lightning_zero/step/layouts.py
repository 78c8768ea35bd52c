"""Which layout an optimizer's next step has.

A change of what is stepped (groups, settings that are no numbers, state that was loaded) makes all layouts anew; which
parameters have gradients may alternate, and a few such patterns are kept.
"""

from __future__ import annotations

import logging
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from lightning_zero.offload.pinned_memory import HostMemory
from lightning_zero.optim.bf16_state import bf16_state_names, check_bf16_state
from lightning_zero.optim.clip import norm_dtype
from lightning_zero.optim.flat_runs import State, make_flat_runs
from lightning_zero.optim.kernel import StepKernel
from lightning_zero.optim.support import check_members
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.step.layout import StepLayout
from lightning_zero.step.substitute import Groups, OwnParams

__all__ = ["StepLayouts"]

log = logging.getLogger(__name__)

_PATTERNS = 8  # kept at a time


class StepLayouts:
    """The layouts of one optimizer.

    Args:
        optimizer: of shards.
        sharder: knows them.
        host: where the optimizer's state lies that is as large as the shards; None: on their device.
        narrow: keep it in bfloat16 for parameters that are not small.

    Attributes:
        last: the layout that :meth:`current` returned last.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sharder: Sharder,
        host: HostMemory | None = None,
        bf16_state: bool = False,
    ) -> None:
        self._host = host
        self._bf16_state = bf16_state
        self._optimizer = optimizer
        self._sharder = sharder
        self.last: StepLayout | None = None
        self._by_pattern: dict[Any, StepLayout] = {}
        self._made_for: Any = None  # what the layouts were made for
        self._key = 0  # of the gradients that `last` is of
        self._values: list[Any] = []
        self._kinds: dict[int, int] = {}
        self._one_per_parameter = False

    def split_parameters(self, one_per_parameter: bool) -> None:
        """From the next step on, make each parameter a segment of its own, or join neighbours."""
        if one_per_parameter != self._one_per_parameter:
            self._one_per_parameter, self._made_for = one_per_parameter, None

    def current(self, own: OwnParams) -> StepLayout:
        """Of the gradients that there are now."""
        why = self._rebuild_reason(own)
        key = self._sharder.executor.gradients.attachment_key()
        if why is None and self.last is not None and key == self._key:
            return self.last
        if why is not None:
            self._rebuild(own, why)
        pattern = tuple(self._has_gradient(param) for group in own.groups for param in group["params"])
        layout = self._by_pattern.get(pattern)
        if layout is None:
            if why is None and self._by_pattern:
                self._report("other parameters have gradients")
            layout = self._make(own)
            self._by_pattern[pattern] = layout
            if len(self._by_pattern) > _PATTERNS:
                del self._by_pattern[next(iter(self._by_pattern))]
        self.last, self._key = layout, self._sharder.executor.gradients.attachment_key()
        self.remember_state(own.state)
        return layout

    def remember_state(self, state: State) -> None:
        """What the optimizer keeps now is ours: nobody has loaded or replaced it."""
        self._values = _values(state)

    def drop_others(self, layout: StepLayout) -> None:
        """Only this one is still good."""
        self._by_pattern = {pattern: other for pattern, other in self._by_pattern.items() if other is layout}

    def _rebuild_reason(self, own: OwnParams) -> str | None:
        if self._made_for is None:
            return (
                "its parameters are stepped one by one"
                if self._one_per_parameter
                else "its parameters are stepped together"
            )
        if _settings(own.groups) != self._made_for[0]:
            return "its parameter groups or their settings changed"
        if own.state is not self._made_for[1] or not _identical(_values(own.state), self._values):
            return "its state was loaded or replaced"
        return None

    def _rebuild(self, own: OwnParams, why: str) -> None:
        check_members(own.groups, type(self._optimizer).__name__, self._sharder.find)
        if self._bf16_state:
            check_bf16_state(self._optimizer, own.groups)
        if self._by_pattern:
            self._report(why)
        self._by_pattern.clear()
        self._kinds.clear()
        self._made_for = _settings(own.groups), own.state, list(own.groups)  # held, so that their ids stay theirs

    def _has_gradient(self, param: Tensor) -> bool | int:
        """Whether there is a gradient; one that somebody put in place of ours is copied to where ours lies. Its address
        where we have no place for it, or none now."""
        grad = param.grad
        if grad is None:
            return False
        record = self._sharder.find(param)
        assert record is not None
        home = record.gradient
        if home is None or not self._sharder.executor.gradients.may_write_gradient(record.index):
            return grad.data_ptr()
        if grad.data_ptr() != home.data_ptr():
            home.copy_(grad.reshape(-1))
            shown = record.visible_grad
            param.grad = home.view(record.layout.visible_shape).data if shown is None else shown
        return True

    def _make(self, own: OwnParams) -> StepLayout:
        records = [[self._sharder.find(p) for p in group["params"] if p.grad is not None] for group in own.groups]
        present = [[r for r in group if r is not None] for group in records]
        self._split_kinds({r.index for group in present for r in group}, own.state)
        bf16_state = bf16_state_names(self._optimizer, own.groups, self._sharder.find) if self._bf16_state else {}
        mix = StepKernel.supports(self._optimizer, own.groups)
        runs = make_flat_runs(
            present, self._kinds, mix_dimensions=mix, bf16_state=bf16_state, one_per_parameter=self._one_per_parameter
        )
        if self._host is not None:
            self._host.settle()
        moved = [run.join_state(own.state, self._host) for run in runs]
        if any(moved):
            self._by_pattern.clear()  # the others look at memory that is the optimizer's no more
        dtype = norm_dtype(param for group in own.groups for param in group["params"])
        return StepLayout(runs, self._sharder.executor.device, dtype)

    def _split_kinds(self, stepped: set[int], state: State) -> None:
        """Parameters that are stepped without others of their kind, or that come with another state, are of another
        kind from now on: their step counts differ."""
        fresh = not self._kinds

        def counted(record: ShardedParameter) -> Any:
            # Reading the device takes time, but state that was loaded shows only there how often it was stepped.
            values = state.get(record.param, {}).items()
            return [
                (k, float(v) if not isinstance(v, Tensor) or (fresh and v.numel() == 1) else None)
                for k, v in values
                if isinstance(v, int | float | Tensor)
            ]

        classes: dict[str, list[int]] = {}
        for record in self._sharder.live:
            index = record.index
            name = repr((self._kinds.get(index, 0), index in stepped, counted(record)))
            classes.setdefault(name, []).append(index)
        numbers = {index: number for number, indices in enumerate(classes.values()) for index in indices}
        if len(classes) != len(set(self._kinds.values())):
            self._by_pattern.clear()
        self._kinds = numbers

    def _report(self, why: str) -> None:
        log.info("The step of %s is laid out anew: %s.", type(self._optimizer).__name__, why)


def _values(state: State) -> list[Any]:
    """All that the optimizer keeps, parameter by parameter."""
    return list(chain.from_iterable(entries.values() for entries in state.values() if isinstance(entries, dict)))


def _identical(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


def _settings(groups: Groups) -> Any:
    """All of the groups that a layout depends on: of a number only whether it is zero, and of the learning rate not
    even that, as no rule asks and schedules start, turn or end at zero."""

    def kind(name: str, value: Any) -> Any:
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return value
        return name == "lr" or value != 0 if isinstance(value, int | float) else type(value)

    return [
        (id(group), list(map(id, group["params"])), [(k, kind(k, v)) for k, v in group.items() if k != "params"])
        for group in groups
    ]
