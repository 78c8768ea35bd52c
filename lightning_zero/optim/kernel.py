"""The captured optimizer step: clip factor, update and, with a loss scaler, the skipped step, over segments.

Settings reach the graph as 0-dim tensors which are filled when the floats in ``param_groups`` change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_zero.optim.clip import clip_factor
from lightning_zero.optim.formulas import Rule, rule_for
from lightning_zero.optim.graphed import GraphedSequence
from lightning_zero.optim.segments import Segment

__all__ = ["StepKernel"]

MOST_SEGMENTS = 16  # compiled: a kernel each


class StepKernel:
    """Steps segments as ``torch.optim`` would, all of it on the device.

    Args:
        optimizer: whose rule; must be covered.
        groups: its parameter groups.
        segments: what is stepped; their state must exist, and their counts be on the device.
        device: of all tensors.
        compile: turn each segment's update into one kernel with inductor.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[dict[str, Any]],
        segments: Sequence[Segment],
        device: torch.device,
        compile: bool,
    ) -> None:
        self._segments = segments
        self._device = device
        self._compile = compile and len(segments) <= MOST_SEGMENTS
        self._rules = [rule_for(optimizer, group) for group in groups]
        self._floats: list[dict[str, float]] = [{} for _ in groups]
        self._settings = [
            {name: torch.zeros((), dtype=torch.float64, device=device) for name in rule.settings} if rule else {}
            for rule in self._rules
        ]
        self._squared = torch.zeros((), device=device)
        self._max_norm = torch.ones((), device=device)
        self._skip = torch.zeros((), device=device)
        self._last_max: float | None = None
        self._variant: tuple[bool, bool] | None = None
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._sequences: dict[tuple[bool, bool], GraphedSequence] = {}  # with or without clipping and skipping

    @staticmethod
    def covers(
        optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], segments: Sequence[Segment] = ()
    ) -> bool:
        """Whether we know the optimizer's rule for all of its groups, and these segments have the state it needs."""
        rules = [rule_for(optimizer, group) for group in groups]
        known = [rule for rule in rules if rule is not None]
        return len(known) == len(rules) and all(
            all(isinstance(segment.state.get(name), Tensor) for name in known[segment.group].state)
            and all(name in segment.counts for name in known[segment.group].counts)
            for segment in segments
        )

    def run(
        self,
        groups: Sequence[dict[str, Any]],
        squared_norm: Tensor,
        max_norm: float | None = None,
        skip: Tensor | None = None,
    ) -> bool:
        """One step; returns whether it was a replay.

        Args:
            groups: with the settings of this step.
            squared_norm: of the gradients, 0-dim; the same tensor each time.
            max_norm: to which gradients are clipped; None: they are not.
            skip: 0-dim; where it is not zero, nothing changes.
        """
        variant = max_norm is not None, skip is not None
        self._variant = variant
        self._squared = squared_norm
        if max_norm is not None and max_norm != self._last_max:
            self._max_norm.fill_(max_norm)
            self._last_max = max_norm
        if skip is not None:
            self._skip.copy_(skip)
        for floats, tensors, group in zip(self._floats, self._settings, groups, strict=True):
            for name, tensor in tensors.items():
                value = _setting(group, name)
                if isinstance(value, Tensor):
                    tensor.copy_(value)
                elif floats.get(name) != value:
                    tensor.fill_(value)
                    floats[name] = value
        if variant not in self._sequences:
            used = [t for s in self._segments for t in (s.param, s.grad, *s.state.values()) if isinstance(t, Tensor)]
            self._sequences[variant] = GraphedSequence(self._update, self._device, watch=used)
        self._sequences[variant]()
        return self._sequences[variant].captured

    def _update(self) -> None:
        assert self._variant is not None
        clip, skip = self._variant
        common: dict[str, Tensor] = {}
        if clip:
            common["factor"] = clip_factor(self._squared, self._max_norm)
        if skip:
            common["skip"] = self._skip
        for segment in self._segments:
            rule = self._rules[segment.group]
            assert rule is not None
            steps = segment.counts.get("step")
            if steps is not None:
                steps.add_(1 if not skip else (self._skip == 0).to(steps.dtype))
            step = segment.state["step"] if steps is not None else self._squared
            counts = {name: segment.state[name].double() for name in rule.counts}
            scalars = rule.scalars({**self._settings[segment.group], **counts}, step)
            new = {name: scalars.pop(name) for name in rule.counts}
            numbers = {k: v.float() for k, v in scalars.items()}
            for name, value in new.items():
                old = segment.counts[name]
                old.copy_(value if not skip else torch.where(self._skip == 0, value.to(old.dtype), old))
            state = {name: segment.state[name].view(-1) for name in rule.state}
            self._apply(rule, segment.param.detach().view(-1), segment.grad.view(-1), state, {**numbers, **common})

    def _apply(
        self, rule: Rule, param: Tensor, grad: Tensor, state: dict[str, Tensor], numbers: dict[str, Tensor]
    ) -> None:
        names, keys = list(state), list(numbers)

        def change(param: Tensor, grad: Tensor, *rest: Tensor) -> None:
            old = dict(zip(names, rest, strict=False))
            scalar = dict(zip(keys, rest[len(names) :], strict=True))
            wide = grad.float()
            if "factor" in scalar:
                wide = wide * scalar["factor"]
                grad.copy_(wide)
            before = param.float(), {k: v.float() for k, v in old.items()}
            after, new = rule.apply(before[0], wide, before[1], scalar)
            if "skip" in scalar:
                keep = scalar["skip"] == 0
                after = torch.where(keep, after, before[0])
                new = {k: torch.where(keep, v, before[1][k]) for k, v in new.items()}
            param.copy_(after)
            for k, v in new.items():
                old[k].copy_(v)

        arguments = (param, grad, *state.values(), *numbers.values())
        if not self._compile:
            change(*arguments)
            return
        # Without Dynamo: the graph depends on nothing but these tensors' sizes, and its caches are for users' code.
        key = (rule, param.numel(), param.dtype, tuple(keys))
        if key not in self._compiled:
            self._compiled[key] = _compile(change, arguments)
        self._compiled[key](*arguments)


def _compile(fn: Callable[..., None], arguments: tuple[Tensor, ...]) -> Callable[..., Any]:
    def traced(*inputs: Tensor) -> tuple[()]:
        fn(*inputs)
        return ()

    graph = make_fx(traced, tracing_mode="fake")(*arguments)
    # Inductor would time two ways to launch the kernel, on clones of everything that it writes: of all this rank's
    # weights and moments, or, where there is no room, by way of the host, which takes minutes.
    return torch._inductor.compile(graph, list(arguments), options={"triton.autotune_pointwise": False})


def _setting(group: dict[str, Any], name: str) -> Any:
    if name.endswith((".0", ".1")):
        return group[name[:-2]][int(name[-1])]
    return group[name]
