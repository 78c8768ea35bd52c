"""The captured optimizer step: clipping, update and the loss scaler's skipped step, over flat runs.

Settings are 0-dim tensors, which are filled when the floats in ``param_groups`` change.
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
from lightning_zero.native.capture import GraphedSequence
from lightning_zero.offload.staging_ring import StagingRing
from lightning_zero.optim.bf16_state import ROUNDING_COUNT, STATE_DTYPE, noise_keys, rounding_noise, stochastic_round
from lightning_zero.optim.flat_runs import MAX_CHUNK_NUMEL, ChunkedState, FlatRun, LoadedChunk
from lightning_zero.optim.grad_norms import clip_factor
from lightning_zero.optim.support import is_torch_optimizer
from lightning_zero.optim.update_rules import Rule, rule_for
from lightning_zero.sharding.layout import as_real

MAX_COMPILED_RUNS = 16  # limits compilation, which makes one kernel per run


class StepKernel:
    """Steps flat runs as ``torch.optim`` would, entirely on the device.

    Args:
        runs: Flat runs with complete state and counts on the device.
        compile: Compile each run's update into one kernel with Inductor.
        ring: Staging ring for state on the host; None if all state is on the device.
        capture: Capture and replay if the device can; otherwise launch kernels at each step.
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
        max_numel = None if self._compile else MAX_CHUNK_NUMEL  # each op materializes its result
        rules = self._rules  # do not bind self, see below
        self._state = ChunkedState(runs, lambda run: _rule_of(rules, run).state, ring, max_numel)
        self._squared = torch.zeros((), device=device)
        self._max_norm = torch.ones((), device=device)
        self._skip = torch.zeros((), device=device)
        self._last_max: float | None = None
        self._variant: tuple[bool, bool] | None = None
        self._compiled: dict[Any, Callable[..., dict[str, Tensor]]] = {}
        self._sequences: dict[tuple[bool, bool], GraphedSequence] = {}  # keys: (clips, may skip)

    @staticmethod
    def supports(
        optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], runs: Sequence[FlatRun] = ()
    ) -> bool:
        """Return True if all groups have a known rule, in at most float32, and the runs its state."""
        rules = [rule_for(optimizer, group) for group in groups]
        known = [rule for rule in rules if rule is not None]
        dtypes = {param.dtype for group in groups for param in group["params"]}
        wide = torch.float64 in dtypes or torch.complex128 in dtypes
        # torch.optim treats real and imaginary parts as elements; a registered rule may not.
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
        """Make one step; return True if it was a replay.

        Args:
            squared_norm: Squared norm of the gradients, 0-dim; the same tensor at each call.
            max_norm: Clip gradients to this norm; None: do not clip.
            skip: 0-dim; if not zero, nothing changes.
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
            static_tensors = (t for s in self._runs for t in (s.param, s.grad, s.copy, *s.state.values()))
            used = [tensor for tensor in static_tensors if isinstance(tensor, Tensor)]
            warmups = 1 if self._capture else math.inf
            update = partial(StepKernel._update, proxy(self))  # a reference cycle would keep moved state alive
            self._sequences[variant] = GraphedSequence(update, self._device, warmups, watch=used)
        with self._state.stream_state():
            self._sequences[variant]()
        for run in self._runs:
            run.copied = run.copy is not None
        return self._sequences[variant].captured

    def prefetch_from_host(self) -> None:
        """Start to copy offloaded state to the device for the next step."""
        self._state.prefetch_from_host()

    def _update(self) -> None:
        numbers = {id(run): self._numbers(self._rule(run), run) for run in self._runs}
        for loaded in self._state.iter_chunks():
            run = loaded.chunk.run
            self._apply(self._rule(run), loaded, numbers[id(run)])

    def _rule(self, run: FlatRun) -> Rule:
        return _rule_of(self._rules, run)

    def _numbers(self, rule: Rule, run: FlatRun) -> dict[str, Tensor]:
        """Return the scalars that the update of all elements shares, 0-dim float32, and count the step."""
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

        salts = (self._state.positions[id(run)].salts,) if run.bf16_state else ()
        arguments = (self._squared, self._max_norm, self._skip, *settings.values(), *run.counts.values(), *salts)
        shapes = tuple((name, tuple(c.shape)) for name, c in run.counts.items())
        key = (rule, self._variant, shapes, len(run.members) if salts else None)
        return self._run_compiled(key, compute, arguments) | ({"skip": self._skip} if skip else {})

    def _apply(self, rule: Rule, loaded: LoadedChunk, numbers: dict[str, Tensor]) -> None:
        param, grad = map(_reals, (loaded.param, loaded.chunk.view_of(loaded.chunk.run.grad)))
        positions, state = loaded.positions, map(_reals, loaded.state.values())
        names, keys = list(loaded.state), list(numbers)
        where: tuple[Tensor, ...] = () if positions is None else (positions.owners, positions.shifts, positions.begin)
        copies = () if loaded.copy is None else (loaded.copy,)

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
                new = {
                    k: stochastic_round(v, noise, names.index(k)) if old[k].dtype is STATE_DTYPE else v
                    for k, v in new.items()
                }
            for k, v in new.items():
                old[k].copy_(v)
            return {}

        members = 0 if positions is None else len(positions.shifts)
        key = (rule, param.numel(), param.dtype, grad.dtype, tuple(keys), members, *(copy.dtype for copy in copies))
        self._run_compiled(key, change, (param, grad, *state, *numbers.values(), *where, *copies))

    def _run_compiled(
        self, key: Any, fn: Callable[..., dict[str, Tensor]], arguments: tuple[Tensor, ...]
    ) -> dict[str, Tensor]:
        """Return ``fn(*arguments)``, compiled once per key."""
        if not self._compile:
            return fn(*arguments)
        # Without Dynamo: the graph depends only on the tensors' sizes, and Dynamo's cache limits are for user code.
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
    return next((counts[name] for name in ("step", ROUNDING_COUNT) if name in counts), None)


def _compile(fn: Callable[..., dict[str, Tensor]], arguments: tuple[Tensor, ...]) -> Callable[..., dict[str, Tensor]]:
    names: list[str] = []  # names of the results, which the graph returns as a tuple

    def traced(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = fn(*inputs)
        names[:] = results
        return tuple(results.values())

    graph = make_fx(traced, tracing_mode="fake")(*arguments)
    # autotune_pointwise would benchmark on clones of all weights and state of this rank; without free memory these
    # clones pass through the host, which takes minutes. emulate_precision_casts prevents fused multiply-adds: which
    # ones are fused depends on the kernel, so chunks of other sizes would round differently from the full run.
    options = {"triton.autotune_pointwise": False, "emulate_precision_casts": True}
    # Inductor's caches need a ShapeEnv to find a graph again, although all sizes are static here.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    compiled: Any = inductor_compile(
        graph, [mode.from_tensor(a, static_shapes=True) for a in arguments], options=options
    )
    return lambda *inputs: dict(zip(names, compiled(*inputs), strict=True))


def _setting(group: dict[str, Any], name: str) -> Any:
    if name.endswith((".0", ".1")):
        return group[name[:-2]][int(name[-1])]
    return group[name]
