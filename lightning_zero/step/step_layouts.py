"""Layouts of an optimizer's step: the flat runs of its parameters that have a gradient.

:class:`StepLayouts` rebuilds all layouts if groups, non-numeric settings or the optimizer state change. It keeps a few
layouts for alternating patterns of parameters with gradients.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.native.capture import GraphedSequence
from lightning_zero.offload.pinned_memory import HostMemory
from lightning_zero.optim.flat_runs import FlatRun, State, make_flat_runs
from lightning_zero.optim.grad_norms import clip_factor, norm_dtype
from lightning_zero.optim.quantized_state import SCALES
from lightning_zero.optim.reduction_rules import ReductionRule, shared_names
from lightning_zero.optim.state_dtypes import (
    NO_ROUNDING,
    Rounding,
    check_rounding,
    pack_own_state,
    stored_dtypes_by_index,
)
from lightning_zero.optim.step_kernel import StepKernel
from lightning_zero.optim.support import check_matrices, check_members
from lightning_zero.optim.update_rules import needs_ranks, rule_for
from lightning_zero.sharding.layout import as_real
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.sharder import Sharder

log = logging.getLogger(__name__)

Groups = list[dict[str, Any]]


class OwnParams(NamedTuple):
    """An optimizer's own parameters: ``param_groups`` and ``state`` as users know them."""

    groups: Groups
    state: State


class FlatParams(NamedTuple):
    """Flat parameters that an optimizer sees during a step.

    Attributes:
        groups: Parameter groups; empty if nothing is left to step.
        origins: For each group, the number of the own group whose settings it has.
    """

    groups: Groups
    state: State
    origins: Sequence[int]


class StepDemands(NamedTuple):
    """Describes what one step has to do besides the update.

    Attributes:
        max_norm: Clip the gradients to this norm, unless None; ``StepLayout.squared`` is of all ranks.
        skip: 0-dim on the device; if not zero, change nothing. Only for a runner with ``can_skip``.
        keeps_gradients: Hooks may read gradients after the step.
    """

    max_norm: float | None = None
    skip: Tensor | None = None
    keeps_gradients: bool = False


class StepLayout:
    """The flat runs for one pattern of parameters with gradients.

    Attributes:
        runs: The flat runs. The optimizer steps each of them as one tensor.
        squared: Sum of the squared gradients, 0-dim, of the norms' dtype; of all ranks after the all-reduce.
        eager_steps: Steps made by the optimizer itself. State may be missing before the first one.
    """

    def __init__(self, runs: list[FlatRun], device: torch.device, dtype: torch.dtype) -> None:
        self.runs = runs
        self.squared = torch.zeros((), dtype=dtype, device=device)
        self.state: State = defaultdict(dict, {s.param: s.state for s in runs if s.state})
        self.eager_steps = 0
        # Do not bind self: a reference cycle would keep moved state alive until garbage collection.
        self._sum_squares = partial(_sum_squares, runs, self.squared)
        self._captured_sum = GraphedSequence(self._sum_squares, device)

    def sum_squares(self, captured: bool) -> Tensor:
        """Compute ``squared`` of this rank's gradients, by replay of a CUDA graph if ``captured``."""
        (self._captured_sum if captured else self._sum_squares)()
        return self.squared

    def clip_norm(self, max_norm: float) -> None:
        """Scale the gradients to a norm of at most ``max_norm``. ``squared`` must be of all ranks."""
        factor = clip_factor(self.squared, max_norm)
        for run in self.runs:
            wide = factor.to(run.param.dtype).view(1)  # 1-D: a 0-dim factor would be rounded to the gradients' dtype
            torch.mul(run.grad, wide, out=run.grad)

    def prepare_eager_step(self, state: State, max_norm: float | None) -> None:
        """Prepare for a step of the optimizer itself; clip the gradients to ``max_norm`` unless it is None."""
        if max_norm is not None:
            self.clip_norm(max_norm)
        for run in self.runs:
            run.read_non_tensor_state(state)

    def finish_eager_step(self, state: State) -> None:
        """Copy the changes of the optimizer's own step from the flat runs to ``state``."""
        self.eager_steps += 1
        for run in self.runs:
            run.broadcast_counts()
            run.export_state(state)

    def clip_value(self, limit: float) -> None:
        """Clamp the gradients to [-most, most]."""
        for run in self.runs:
            run.grad.clamp_(-limit, limit)

    def flat_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return parameter groups with the settings of ``groups`` and the flat parameters, with gradients."""
        flat: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
        for run in self.runs:
            run.set_param_grad()
            flat[run.group]["params"].append(run.param)
        return flat


def _sum_squares(runs: Sequence[FlatRun], out: Tensor) -> None:
    parts = [torch.linalg.vector_norm(as_real(run.grad), dtype=out.dtype) for run in runs]
    out.copy_(torch.stack(parts).square().sum() if parts else torch.zeros_like(out))


_PATTERNS = 8  # layouts kept at a time


class StepLayouts:
    """The layouts of one optimizer.

    Args:
        host: Host memory for shard-sized optimizer state; None keeps it on the shards' device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sharder: Sharder,
        host: HostMemory | None = None,
        rounding: Rounding = NO_ROUNDING,
    ) -> None:
        self._host = host
        self._rounding = rounding
        self._optimizer = optimizer
        self._sharder, self._gradients = sharder, sharder.executor.gradients
        self.last: StepLayout | None = None
        self._by_pattern: dict[Any, StepLayout] = {}
        self._made_for: Any = None  # settings, state and groups for which the layouts were made
        self._key = 0  # key of the gradients of `last`
        self._values: list[Any] = []
        self._kinds: dict[int, int] = {}
        self._one_per_parameter = False

    def split_parameters(self, one_per_parameter: bool) -> None:
        """Make each parameter a run of its own from the next step on, or join neighbors."""
        if one_per_parameter != self._one_per_parameter:
            self._one_per_parameter, self._made_for = one_per_parameter, None

    def current(self, own: OwnParams) -> StepLayout:
        """Return the layout of the present gradients."""
        why = self._rebuild_reason(own)
        key = self._gradients.attachment_key()
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
        self.last, self._key = layout, self._gradients.attachment_key()
        self.remember_state(own.state)
        return layout

    def remember_state(self, state: State) -> None:
        """Remember the optimizer state, to detect if it is loaded or replaced."""
        self._values = _values(state)

    def drop_others(self, layout: StepLayout) -> None:
        self._by_pattern = {pattern: other for pattern, other in self._by_pattern.items() if other is layout}

    def _rebuild_reason(self, own: OwnParams) -> str | None:
        if self._made_for is None:
            return (
                "its parameters are stepped one by one"
                if self._one_per_parameter
                else "its parameters are stepped together"
            )
        if self._settings(own.groups) != self._made_for[0]:
            return "its parameter groups or their settings changed"
        if own.state is not self._made_for[1] or not _identical(_values(own.state), self._values):
            return "its state was loaded or replaced"
        return None

    def _rebuild(self, own: OwnParams, why: str) -> None:
        check_members(own.groups, type(self._optimizer).__name__, self._sharder.find)
        masters_on_host = any(record.on_host is not None for record in self._sharder.live)
        check_matrices(self._optimizer, self._sharder.find, masters_on_host)
        check_rounding(self._optimizer, own.groups, self._rounding)
        if self._by_pattern:
            self._report(why)
        self._by_pattern.clear()
        self._kinds.clear()
        # holds the groups, so that their ids are not reused
        self._made_for = self._settings(own.groups), own.state, list(own.groups)

    def _settings(self, groups: Groups) -> Any:
        """Return all settings that a layout depends on."""
        rules = [rule_for(self._optimizer, group) for group in groups]
        # Numbers such as the iterations of Newton-Schulz are constants of the rule.
        return _settings(groups), [rule if needs_ranks(rule) else None for rule in rules]

    def _has_gradient(self, param: Tensor) -> bool | int:
        """Return True if the parameter has a gradient; move it to the engine's gradient memory.

        Return the gradient's address if the engine has no memory for it, or cannot use the memory now.
        """
        grad = param.grad
        if grad is None:
            return False
        record = self._sharder.find(param)
        assert record is not None
        home = record.gradient
        if home is None or not self._gradients.may_write_gradient(record.index):
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
        dtypes = stored_dtypes_by_index(self._optimizer, own.groups, self._sharder.find, self._rounding)
        pack_own_state(own.state, self._sharder.find, dtypes)
        mix = StepKernel.supports(self._optimizer, own.groups)
        kinds = self._kinds_by_rule(own.groups)
        runs = make_flat_runs(
            present,
            kinds,
            mix_dimensions=mix,
            stored_dtypes=dtypes,
            one_per_parameter=self._one_per_parameter,
            rounding=self._rounding,
            writes_copies=self._sharder.memory.steps_write_copies,
        )
        for run in runs:
            rule = rule_for(self._optimizer, own.groups[run.group])
            run.shared_names = shared_names(rule)
        if self._host is not None:
            self._host.settle()
        moved = [run.join_state(own.state, self._host) for run in runs]
        if any(moved):
            self._by_pattern.clear()  # the other layouts view memory that is no longer the optimizer's
        dtype = norm_dtype(param for group in own.groups for param in group["params"])
        return StepLayout(runs, self._sharder.executor.device, dtype)

    def _kinds_by_rule(self, groups: Groups) -> dict[int, Any]:
        """Return the kinds of parameters, and their rules where those of one group differ."""
        kinds: dict[int, Any] = dict(self._kinds)
        for group in groups:
            rule = rule_for(self._optimizer, group)
            if not isinstance(rule, ReductionRule):
                continue
            for record in filter(None, map(self._sharder.find, group["params"])):
                kinds[record.index] = kinds.get(record.index), rule.of(record.layout.shape, record.param.dtype)
        return kinds

    def _split_kinds(self, stepped: set[int], state: State) -> None:
        """Give a new kind to parameters whose step counts differ from others of their kind."""
        is_new = not self._kinds

        def counted(record: ShardedParameter) -> Any:
            # Reading the device takes time, but the step count of loaded state is only there.
            values = state.get(record.param, {}).items()
            return [
                (k, float(v) if not isinstance(v, Tensor) or (is_new and v.numel() == 1) else None)
                for k, v in values
                if isinstance(v, int | float | Tensor) and not k.endswith(SCALES)
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
        log.debug("Optimizer step: new layout (optimizer=%s, reason=%s)", type(self._optimizer).__name__, why)


def _values(state: State) -> list[Any]:
    return list(chain.from_iterable(entries.values() for entries in state.values() if isinstance(entries, dict)))


def _identical(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


def _settings(groups: Groups) -> Any:
    """Return all settings that a layout depends on. For a number, only whether it is zero.

    The learning rate is left out: no rule depends on it, and schedules start, turn or end at zero.
    """

    def kind(name: str, value: Any) -> Any:
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return value
        return name == "lr" or value != 0 if isinstance(value, int | float) else type(value)

    return [
        (id(group), list(map(id, group["params"])), [(k, kind(k, v)) for k, v in group.items() if k != "params"])
        for group in groups
    ]
