"""Steps one optimizer over the arenas, and captures that as CUDA graphs.

Protocol, for each step: ``clip_norm()`` if gradients are to be clipped; ``begin()`` when they are final; the
optimizer's own ``step``; ``end()``. Between begin and end the optimizer sees a few flat parameters in place of its own,
so that whatever it does, it does in a few kernels. Where its update rule is known and the device has graphs,
``begin()`` replays the whole step and the optimizer sees no parameters at all. Its hooks, counters and schedulers
notice nothing.

A change of what is stepped (groups, parameters with gradients, settings that are no numbers, state that was loaded)
makes a new plan; a captured graph belongs to one plan.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.native.watchdog import Lane
from lightning_zero.optim.clip import clip_factor, norm_dtype
from lightning_zero.optim.graphed import GraphedSequence
from lightning_zero.optim.kernel import StepKernel
from lightning_zero.optim.segments import Segment, State, cut
from lightning_zero.optim.support import check_members
from lightning_zero.sharding.refusals import on_plain_tensors, plainly
from lightning_zero.sharding.shard import ShardedParameter, Sharder

__all__ = ["OptimizerStepper"]

log = logging.getLogger(__name__)

_PLANS = 8  # kept at a time: which parameters have gradients may alternate


class _Plan:
    """What is stepped together, for one pattern of parameters with gradients."""

    def __init__(self, segments: list[Segment], device: torch.device, dtype: torch.dtype) -> None:
        self.segments = segments
        self.squared = torch.zeros((), dtype=dtype, device=device)
        self.state: State = defaultdict(dict, {s.param: s.state for s in segments if s.state})
        self.kernel: StepKernel | None = None
        self.norm = GraphedSequence(self.sum_squares, device)
        self.runs = 0

    def sum_squares(self) -> None:
        parts = [torch.linalg.vector_norm(s.grad, dtype=self.squared.dtype) for s in self.segments]
        self.squared.copy_(torch.stack(parts).square().sum() if parts else torch.zeros_like(self.squared))


class OptimizerStepper:
    """Steps one optimizer.

    Args:
        optimizer: of shards.
        sharder: knows them.
        group: process group over which norms are summed.
        capture: ``"auto"`` or True: where possible; False: never.
        emulate: debugging: do on any device what a captured step does, without a graph.
        compile_kernels: compile the update with inductor; otherwise it runs op by op.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sharder: Sharder,
        group: dist.ProcessGroup,
        capture: bool | str = "auto",
        emulate: bool = False,
        compile_kernels: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self._sharder = sharder
        self._group = group
        self._device = sharder.executor.device
        self.why_eager = self._why_eager(bool(capture), emulate)
        self._graphs = bool(capture) and (emulate or self._device.type == "cuda")
        if self.why_eager is not None:
            log.info("%s steps without a captured graph: %s.", type(optimizer).__name__, self.why_eager)
        self._compile = compile_kernels and self._device.type == "cuda"
        self._plans: dict[Any, _Plan] = {}
        self._known: Any = None  # what the plans were made for
        self._last: _Plan | None = None
        self._hook: Any = None
        self._key = 0
        self._values: list[Any] = []
        self._kinds: dict[int, int] = {}
        self._clip: tuple[_Plan, float] | None = None  # to be done by the step
        self._seen: tuple[list[dict[str, Any]], State, Any, _Plan | None] | None = None
        self.replays = 0  # steps that were one launch

    def _why_eager(self, capture: bool, emulate: bool) -> str | None:
        """Why the optimizer's step cannot be captured, as it is now; None if it can."""
        if not capture:
            return "capture_step is off"
        if self._device.type != "cuda" and not emulate:
            return f"there are no CUDA graphs on device {str(self._device)!r}"
        if any(p.dtype is torch.float64 for group in self.optimizer.param_groups for p in group["params"]):
            return "replays compute in float32, and it steps parameters of float64"
        if not StepKernel.covers(self.optimizer, self.optimizer.param_groups):
            return "its update rule is not one that is known here (elementwise ones of torch.optim, no subclasses)"
        return None

    # -- gradients

    @on_plain_tensors
    def clip_norm(self, max_norm: float, later: bool = False) -> Tensor:
        """Scales gradients to a global 2-norm of at most ``max_norm``; returns the norm before. Collective.

        The factor is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``. Nothing is read on
        the host.

        later: gradients may be scaled while they are used, which saves reading and writing them once more
        """
        plan = self._plan()
        (plan.norm if self._graphs else plan.sum_squares)()
        self._sharder.executor.collective(
            "norms of gradients",
            Lane.REDUCE,
            lambda asynchronously: dist.all_reduce(plan.squared, group=self._group, async_op=asynchronously),
        )
        norm = plan.squared.sqrt()
        self._clip = plan, max_norm
        if not later or self._kernel(plan) is None:
            self._scale()
        return norm

    def _scale(self) -> None:
        if self._clip is None:
            return
        (plan, max_norm), self._clip = self._clip, None
        factor = clip_factor(plan.squared, max_norm)
        for segment in plan.segments:
            segment.grad.mul_(factor.to(segment.grad.dtype))

    @on_plain_tensors
    def clip_value(self, most: float) -> None:
        """Clamps gradients to [-most, most]."""
        for segment in self._plan().segments:
            segment.grad.clamp_(-most, most)

    # -- stepping

    @contextmanager
    def flat(self) -> Iterator[None]:
        """Inside, the optimizer's parameters are the flat ones, with their gradients; nothing may be stepped."""
        with plainly():
            plan = self._plan()
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = self._flat_groups(plan, groups)
        try:
            yield
        finally:
            self.optimizer.param_groups = groups

    @staticmethod
    def _flat_groups(plan: _Plan, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        flat: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
        for segment in plan.segments:
            segment.param.grad = segment.grad
            flat[segment.group]["params"].append(segment.param)
        return flat

    @on_plain_tensors
    def begin(self, skip: Tensor | None = None) -> None:
        """The gradients are final: the optimizer's ``step`` comes next.

        skip: 0-dim float32 on the device; where it is not zero, nothing changes. Only for optimizers that
            ``may_skip``.
        """
        self.end()
        # Between a clipping that is left to the step and the step, nobody has touched anything.
        plan = self._clip[0] if self._clip is not None else self._plan()
        kernel = self._kernel(plan)
        groups, state = self.optimizer.param_groups, self.optimizer.state
        if kernel is not None:
            max_norm = self._clip[1] if self._clip is not None else None
            self._clip = None
            with torch.no_grad():
                self.replays += kernel.run(groups, plan.squared, max_norm, skip)
            flat: list[dict[str, Any]] = []
        else:
            assert skip is None, "only what replays can skip"
            self._scale()
            flat = self._flat_groups(plan, groups)
            for segment in plan.segments:
                segment.read_numbers(state)
        self._seen = groups, state, flat, None if kernel is not None else plan
        self._before = [dict(group) for group in flat]
        self.optimizer.param_groups = flat
        self.optimizer.state = plan.state
        # The user's own hooks come after this one.
        self._hook = self.optimizer.register_step_post_hook(lambda *_: self._restore())
        hooks: Any = self.optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._hook.id, last=False)

    @on_plain_tensors
    def end(self) -> bool:
        """The optimizer has its own parameters again. Harmless when repeated; returns whether there was a step to
        end."""
        self._restore()
        if self._hook is None:
            return False
        self._hook.remove()
        self._hook = None
        return True

    def _restore(self) -> None:
        if self._seen is None:
            return
        groups, state, flat, plan = self._seen
        self._seen = None
        self.optimizer.param_groups, self.optimizer.state = groups, state
        for group, now, before in zip(groups, flat, self._before, strict=False):
            # Some optimizers keep counters and averages in their groups.
            group.update({k: v for k, v in now.items() if k != "params" and before.get(k, self) is not v})
        if plan is not None:
            plan.runs += 1
            for segment in plan.segments:
                segment.state = plan.state[segment.param]
                segment.spread_counts()
                segment.give_out(state)
            self._values = _values(state)

    @on_plain_tensors
    def may_skip(self) -> bool:
        """Whether ``begin`` can skip the step by what the device knows."""
        return self._kernel(self._plan()) is not None

    # -- plans

    def _plan(self) -> _Plan:
        groups, state = self._seen[:2] if self._seen else (self.optimizer.param_groups, self.optimizer.state)
        settings = _settings(groups)
        why = None
        if self._known is None or settings != self._known[0]:
            why = "its parameter groups or their settings changed"
        elif state is not self._known[1] or not _same(_values(state), self._values):
            why = "its state was loaded or replaced"
        key = self._sharder.executor.gradients_key()
        if why is None and self._last is not None and key == self._key:
            return self._last
        if why is not None:
            check_members(groups, type(self.optimizer).__name__, self._sharder.find)
            if self._plans:
                self._say(why)
            self._plans.clear()
            self._kinds.clear()
            self._known = settings, state, list(groups)  # held, so that their ids stay theirs
        pattern = tuple(self._home(param) for group in groups for param in group["params"])
        plan = self._plans.get(pattern)
        if plan is None:
            if why is None and self._plans:
                self._say("other parameters have gradients")
            plan = self._make_plan(groups, state)
            self._plans[pattern] = plan
            if len(self._plans) > _PLANS:
                del self._plans[next(iter(self._plans))]
        self._last, self._key = plan, self._sharder.executor.gradients_key()
        self._values = _values(state)
        return plan

    def _home(self, param: Tensor) -> bool | int:
        """Whether there is a gradient; one that somebody put in place of ours is copied to where ours lies. Its address
        where we have no place for it."""
        grad = param.grad
        if grad is None:
            return False
        record = self._sharder.find(param)
        assert record is not None
        home = self._sharder.gradients.get(record.index)
        if home is None:
            return grad.data_ptr()
        if grad.data_ptr() != home.data_ptr():
            home.copy_(grad.reshape(-1))
            param.grad = self._sharder.shown.get(record.index, home.view(record.layout.visible_shape))
        return True

    def _make_plan(self, groups: list[dict[str, Any]], state: State) -> _Plan:
        records = [[self._sharder.find(p) for p in group["params"] if p.grad is not None] for group in groups]
        present = [[r for r in group if r is not None] for group in records]
        self._split_kinds({r.index for group in present for r in group}, state)
        segments = cut(present, self._kinds, mix_dimensions=StepKernel.covers(self.optimizer, groups))
        moved = [segment.take_in(state) for segment in segments]
        if any(moved):
            self._plans.clear()  # other plans look at memory that is the optimizer's no more
        return _Plan(segments, self._device, norm_dtype(p for group in groups for p in group["params"]))

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
            self._plans.clear()
        self._kinds = numbers

    # -- capture

    def _kernel(self, plan: _Plan) -> StepKernel | None:
        """What replays the plan's step; None while the optimizer has to do it."""
        if plan.kernel is not None or not self._graphs or plan.runs == 0 or not plan.segments:
            return plan.kernel
        groups, state = self._seen[:2] if self._seen else (self.optimizer.param_groups, self.optimizer.state)
        if not StepKernel.covers(self.optimizer, groups, plan.segments):
            return None
        moved = [segment.move_counts(self._device) for segment in plan.segments]
        if any(moved):
            # Other plans look at the counts where they were, and would step with what they were.
            self._plans = {pattern: other for pattern, other in self._plans.items() if other is plan}
        plan.kernel = StepKernel(self.optimizer, groups, plan.segments, self._device, self._compile)
        for segment in plan.segments:
            segment.give_out(state)
        self._values = _values(state)
        return plan.kernel

    def _say(self, why: str) -> None:
        log.info("The captured step of %s is made anew: %s.", type(self.optimizer).__name__, why)


def _values(state: State) -> list[Any]:
    """All that the optimizer keeps, parameter by parameter."""
    return list(chain.from_iterable(map(dict.values, state.values())))


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


def _settings(groups: list[dict[str, Any]]) -> Any:
    """All of the groups that a plan depends on: of a number only whether it is zero, and of the learning rate not even
    that, as no rule asks and schedules start, turn or end at zero."""

    def kind(name: str, value: Any) -> Any:
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return value
        return name == "lr" or value != 0 if isinstance(value, int | float) else type(value)

    return [
        (id(group), list(map(id, group["params"])), [(k, kind(k, v)) for k, v in group.items() if k != "params"])
        for group in groups
    ]
