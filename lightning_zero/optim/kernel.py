"""The captured optimizer step: clip factor, update and, with a loss scaler, the skipped step, over segments.

Settings reach the graph as 0-dim tensors which are filled when the floats in ``param_groups`` change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import proxy

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_zero.compat.compiler import inductor_compile
from lightning_zero.compat.tensors import FakeTensorMode
from lightning_zero.offload.staging_ring import StagingRing
from lightning_zero.optim.bf16_state import STATE_DTYPE, ROUNDING_COUNT
from lightning_zero.optim.chunks import MAX_CHUNK_NUMEL, LoadedChunk, ChunkedState
from lightning_zero.optim.clip import clip_factor
from lightning_zero.optim.flat_runs import FlatRun
from lightning_zero.optim.graphed import GraphedSequence
from lightning_zero.optim.rounding import noise_keys, rounding_noise, stochastic_round
from lightning_zero.optim.rules import Rule, rule_for
from lightning_zero.optim.support import is_torch_optimizer
from lightning_zero.sharding.layout import as_real

__all__ = ["StepKernel"]

MAX_COMPILED_RUNS = 16  # compiled: a kernel each


class StepKernel:
    """Steps segments as ``torch.optim`` would, all of it on the device.

    Args:
        optimizer: whose rule; must be covered.
        groups: its parameter groups.
        segments: what is stepped; their state must exist, and their counts be on the device.
        device: of all tensors.
        compile: turn each segment's update into one kernel with inductor.
        ring: through which passes what lies on the host; None: all lies on the device.
        capture: replay, on devices that can; otherwise kernels are launched one by one, each time.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[dict[str, Any]],
        runs: Sequence[FlatRun],
        device: torch.device,
        compile: bool,
        ring: StagingRing | None = None,
        capture: bool = True,
    ) -> None:
        self._runs = runs
        self._device = device
        self._compile = compile and len(runs) <= MAX_COMPILED_RUNS
        self._capture = capture
        self._rules = [rule_for(optimizer, group) for group in groups]
        self._floats: list[dict[str, float]] = [{} for _ in groups]
        self._settings = [
            {name: torch.zeros((), dtype=torch.float64, device=device) for name in rule.settings} if rule else {}
            for rule in self._rules
        ]
        most = None if self._compile else MAX_CHUNK_NUMEL  # op by op, each op has a result
        rules = self._rules  # and not this, for the same reason as below
        self._parts = ChunkedState(runs, lambda run: _rule_of(rules, run).state, ring, most)
        self._squared = torch.zeros((), device=device)
        self._max_norm = torch.ones((), device=device)
        self._skip = torch.zeros((), device=device)
        self._last_max: float | None = None
        self._variant: tuple[bool, bool] | None = None
        self._compiled: dict[Any, Callable[..., dict[str, Tensor]]] = {}
        self._sequences: dict[tuple[bool, bool], GraphedSequence] = {}  # with or without clipping and skipping

    @staticmethod
    def supports(
        optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], runs: Sequence[FlatRun] = ()
    ) -> bool:
        """Whether we know the optimizer's rule for all of its groups, in at most float32, and these segments have the
        state it needs."""
        rules = [rule_for(optimizer, group) for group in groups]
        known = [rule for rule in rules if rule is not None]
        dtypes = {param.dtype for group in groups for param in group["params"]}
        wide = torch.float64 in dtypes or torch.complex128 in dtypes
        # torch.optim treats real and imaginary parts as elements; a rule of the user's may not.
        as_pairs = is_torch_optimizer(optimizer) or not any(dtype.is_complex for dtype in dtypes)
        return (
            len(known) == len(rules)
            and not wide
            and as_pairs
            and all(
                all(isinstance(run.state.get(name), Tensor) for name in known[run.group].state)
                and all(name in run.counts for name in known[run.group].counts)
                and not (run.bf16_state and _steps(run.counts) is None)
                for run in runs
            )
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
            lasting = (t for s in self._runs for t in (s.param, s.grad, s.copy, *s.state.values()))
            used = [tensor for tensor in lasting if isinstance(tensor, Tensor)]
            warmups = 1 if self._capture else math.inf
            update = partial(StepKernel._update, proxy(self))  # a cycle would hold state that has moved
            self._sequences[variant] = GraphedSequence(update, self._device, warmups, watch=used)
        with self._parts.stream_state():
            self._sequences[variant]()
        for run in self._runs:
            run.copied = run.copy is not None
        return self._sequences[variant].captured

    def prefetch_from_host(self) -> None:
        """State that lies on the host begins to come for the next step."""
        self._parts.prefetch_from_host()

    def _update(self) -> None:
        numbers = {id(run): self._numbers(self._rule(run), run) for run in self._runs}
        for part in self._parts.iter_chunks():
            run = part.chunk.run
            self._apply(self._rule(run), part, numbers[id(run)])

    def _rule(self, run: FlatRun) -> Rule:
        return _rule_of(self._rules, run)

    def _numbers(self, rule: Rule, run: FlatRun) -> dict[str, Tensor]:
        """What the update of all elements has in common, 0-dim float32; counts the step."""
        assert self._variant is not None
        clip, skip = self._variant
        settings = self._settings[run.group]

        def compute(squared: Tensor, max_norm: Tensor, skipped: Tensor, *rest: Tensor) -> dict[str, Tensor]:
            setting = dict(zip(settings, rest, strict=False))
            counts = dict(zip(run.counts, rest[len(settings) :], strict=False))
            if (steps := _steps(counts)) is not None:
                steps.add_(1 if not skip else (skipped == 0).to(steps.dtype))
            step = steps[0] if steps is not None else squared
            scalars = rule.scalars({**setting, **{name: counts[name][0].double() for name in rule.counts}}, step)
            for name in rule.counts:
                value, old = scalars.pop(name), counts[name]
                old.copy_(value if not skip else torch.where(skipped == 0, value.to(old.dtype), old))
            numbers = {name: value.float() for name, value in scalars.items()}
            if clip:
                numbers["factor"] = clip_factor(squared, max_norm)
            if salts:
                numbers["keys"] = noise_keys(rest[-1], step)
            return numbers

        salts = (self._parts.positions[id(run)].salts,) if run.bf16_state else ()
        arguments = (self._squared, self._max_norm, self._skip, *settings.values(), *run.counts.values(), *salts)
        shapes = tuple((name, tuple(c.shape)) for name, c in run.counts.items())
        key = (rule, self._variant, shapes, len(run.members) if salts else None)
        return self._run_compiled(key, compute, arguments) | ({"skip": self._skip} if skip else {})

    def _apply(self, rule: Rule, part: LoadedChunk, numbers: dict[str, Tensor]) -> None:
        param, grad = map(_reals, (part.param, part.chunk.of(part.chunk.run.grad)))
        positions, state = part.positions, map(_reals, part.state.values())
        names, keys = list(part.state), list(numbers)
        where: tuple[Tensor, ...] = () if positions is None else (positions.owners, positions.shifts, positions.begin)
        copies = () if part.copy is None else (part.copy,)

        def change(param: Tensor, grad: Tensor, *rest: Tensor) -> dict[str, Tensor]:
            old = dict(zip(names, rest, strict=False))
            scalar = dict(zip(keys, rest[len(names) :], strict=False))
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
            if copies:
                rest[-1].copy_(after)
            if positions is not None:
                owners, shifts, begin = rest[len(names) + len(keys) :][: len(where)]
                noise = rounding_noise(owners, shifts, begin, scalar["keys"])
                new = {k: stochastic_round(v, noise, names.index(k)) if old[k].dtype is STATE_DTYPE else v for k, v in new.items()}
            for k, v in new.items():
                old[k].copy_(v)
            return {}

        members = 0 if positions is None else len(positions.shifts)
        key = (rule, param.numel(), param.dtype, grad.dtype, tuple(keys), members, *(copy.dtype for copy in copies))
        self._run_compiled(key, change, (param, grad, *state, *numbers.values(), *where, *copies))

    def _run_compiled(
        self, key: Any, fn: Callable[..., dict[str, Tensor]], arguments: tuple[Tensor, ...]
    ) -> dict[str, Tensor]:
        """What ``fn`` returns for these arguments; it is compiled once for each key."""
        if not self._compile:
            return fn(*arguments)
        # Without Dynamo: the graph depends on nothing but these tensors' sizes, and its caches are for users' code.
        if key not in self._compiled:
            self._compiled[key] = _compile(fn, arguments)
        return self._compiled[key](*arguments)


def _reals(flat: Tensor) -> Tensor:
    return as_real(flat).view(-1)


def _rule_of(rules: Sequence[Rule | None], run: FlatRun) -> Rule:
    rule = rules[run.group]
    assert rule is not None
    return rule


def _steps(counts: Mapping[str, Tensor]) -> Tensor | None:
    """That which counts steps, of what an optimizer counts."""
    return next((counts[name] for name in ("step", ROUNDING_COUNT) if name in counts), None)


def _compile(fn: Callable[..., dict[str, Tensor]], arguments: tuple[Tensor, ...]) -> Callable[..., dict[str, Tensor]]:
    names: list[str] = []  # of the results, which a graph returns without

    def traced(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = fn(*inputs)
        names[:] = results
        return tuple(results.values())

    graph = make_fx(traced, tracing_mode="fake")(*arguments)
    # Inductor would time two ways to launch the kernel, on clones of everything that it writes: of all this rank's
    # weights and moments, or, where there is no room, by way of the host, which takes minutes.
    # By the second option no multiplication is fused with an addition: which ones are would depend on the kernel, and
    # stretches of other sizes, or of other members, would round otherwise than the whole segment.
    options = {"triton.autotune_pointwise": False, "emulate_precision_casts": True}
    # Inductor's caches know a graph again where sizes might be symbols; here they are numbers.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    compiled: Any = inductor_compile(
        graph, [mode.from_tensor(a, static_shapes=True) for a in arguments], options=options
    )
    return lambda *inputs: dict(zip(names, compiled(*inputs), strict=True))


def _setting(group: dict[str, Any], name: str) -> Any:
    if name.endswith((".0", ".1")):
        return group[name[:-2]][int(name[-1])]
    return group[name]
