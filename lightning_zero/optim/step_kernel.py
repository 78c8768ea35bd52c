"""The captured optimizer step: clipping, update and the loss scaler's skipped step, over flat runs.

Settings are 0-dim tensors, which are filled when the floats in ``param_groups`` change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby, islice
from typing import Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_zero.compat.compiler import limit_row_elements, lookup_backend
from lightning_zero.compat.tensors import FakeTensorMode
from lightning_zero.native.capture import GraphedSequence
from lightning_zero.offload.staging_ring import StagingRing
from lightning_zero.optim.bf16_state import (
    ROUNDING_COUNT,
    STATE_DTYPE,
    noise_keys,
    rounding_noise,
    stochastic_round,
)
from lightning_zero.optim.flat_runs import MAX_CHUNK_NUMEL, ChunkedState, FlatRun, LoadedChunk
from lightning_zero.optim.grad_norms import clip_factor
from lightning_zero.optim.matrix_exchange import (
    ExchangeMemory,
    MatrixExchange,
    MatrixGroup,
    even_out,
    make_buckets,
    make_exchanges,
)
from lightning_zero.optim.matrix_rules import MatrixRule, Tensors, at_least_float32
from lightning_zero.optim.parameter_sums import ParameterPart, ParameterSums, of_run
from lightning_zero.optim.quantized_state import (
    block_noise,
    codes_key,
    dequantize,
    is_quantized,
    scales_key,
)
from lightning_zero.optim.reduction_rules import Reduction, ReductionRule
from lightning_zero.optim.side_stream import SideStream
from lightning_zero.optim.state_dtypes import round_state
from lightning_zero.optim.support import is_torch_optimizer
from lightning_zero.optim.update_rules import AnyRule, Rule, needs_ranks, rule_for
from lightning_zero.sharding.aliases import StorageSpan
from lightning_zero.sharding.layout import STATE_BLOCK, as_real

ROW_ELEMENTS = 8  # per thread: 95 registers for AdamW by ptxas, where 32 elements need 255 and spill
MAX_COMPILED_RUNS = 16  # limits compilation, which makes one kernel per run


class _Variant(NamedTuple):
    """Selects what a step does; each variant is captured by itself."""

    clips: bool
    may_skip: bool
    keeps_gradients: bool


class StepKernel:
    """Steps flat runs as ``torch.optim`` would, entirely on the device.

    Args:
        runs: Flat runs with complete state and counts on the device.
        compile: Compile each run's update into one kernel with Inductor.
        ring: Staging ring for state on the host; None if all state is on the device.
        capture: Capture and replay if the device can; otherwise launch kernels at each step.
        matrix_group: The ranks that hold each matrix together; needed for a :class:`MatrixRule`.
        matrix_bucket_bytes: Limit for the full updates that exist at one time.
        matrix_memory: Memory of these updates, shared with other kernels that step before or after this one.
        sum_over_ranks: Adds up a tensor over the ranks that hold each parameter together, in place. None if this rank
            holds all.
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
        matrix_group: MatrixGroup | None = None,
        matrix_bucket_bytes: int = 1 << 28,
        matrix_memory: ExchangeMemory | None = None,
        sum_over_ranks: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._rules = [rule_for(optimizer, group) for group in groups]
        # Runs of matrices are last: elementwise ones are stepped before the first exchange.
        self._runs = runs = sorted(runs, key=lambda run: isinstance(self._rules[run.group], MatrixRule))
        self._device = device
        of_sums = [run for run in runs if isinstance(self._rules[run.group], ReductionRule)]
        kernels = len(runs) - len(of_sums) + sum(len(run.members) for run in of_sums)
        self._compile = compile and kernels <= MAX_COMPILED_RUNS
        memory = {} if matrix_memory is None else matrix_memory
        self._exchanges = _make_exchanges(self._rules, runs, matrix_group, matrix_bucket_bytes, device, memory)
        self._sends = bool(self._exchanges) and matrix_group is not None and matrix_group.size > 1
        # The copies of a staging ring cannot continue from one captured graph to the next.
        can_capture = all(rule.captured for rule in self._rules if isinstance(rule, MatrixRule))
        self._capture = capture and can_capture and not (self._sends and ring is not None)
        # Copies of a staging ring are ordered with the current stream only.
        several = len(self._exchanges) > 1 and not self._sends and ring is None
        self._side = SideStream(device if several and device.type == "cuda" else None)
        self._sum_over_ranks = sum_over_ranks
        # Shared state of all matrices, which their owners send to all ranks after a step.
        shared = sum(exchange.bucket.shared_numel for exchange in self._exchanges) if self._sends else 0
        wide = any(run.param.dtype is torch.float64 for run in runs)
        dtype = torch.float64 if wide else torch.float32
        self._shared_state = torch.zeros(shared, dtype=dtype, device=device) if shared else None
        self._floats: list[dict[str, float]] = [{} for _ in groups]
        self._settings = [
            {name: torch.zeros((), dtype=torch.float64, device=device) for name in rule.settings} if rule else {}
            for rule in self._rules
        ]
        max_numel = None if self._compile else MAX_CHUNK_NUMEL  # each op materializes its result
        rules = self._rules  # do not bind self, see below
        ends: dict[int, list[int]] = {}
        for run in of_sums:  # a sum is of one parameter
            ends[id(run)] = list(accumulate(record.layout.shard_numel for record in run.members))
        for exchange in self._exchanges:
            ends.setdefault(id(exchange.bucket.run), []).append(exchange.bucket.end)
        self._state = ChunkedState(runs, lambda run: run.keys_of(_rule_of(rules, run).state), ring, max_numel, ends)
        own = {id(run) for run in of_sums}
        chunks = [chunk for chunk in self._state.chunks if id(chunk.run) in own]
        self._sums = ParameterSums(chunks, lambda run: _reduction_rule_of(rules, run), device)
        self._sum_chunks = chunks
        self._squared = torch.zeros((), dtype=torch.float32, device=device)
        self._max_norm = torch.ones((), dtype=torch.float32, device=device)
        self._skip = torch.zeros((), dtype=torch.float32, device=device)
        self._last_max: float | None = None
        self._variant: _Variant | None = None
        self._compiled: dict[Any, Callable[..., dict[str, Tensor]]] = {}
        self._sequences: dict[_Variant, list[Callable[[], None]]] = {}
        self._chunks: Iterator[LoadedChunk] = iter(())  # of the step in progress
        self._scalars: dict[int, dict[str, Tensor]] = {}  # of each run in the step in progress, by id

    @staticmethod
    def supports(
        optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], runs: Sequence[FlatRun] = ()
    ) -> bool:
        """Return True if all groups have a known rule, in at most float32, and the runs its state.

        An optimizer of matrices cannot step otherwise, so it may have float64 parameters.
        """
        rules = [rule_for(optimizer, group) for group in groups]
        known = [rule for rule in rules if rule is not None]
        dtypes = {param.dtype for group in groups for param in group["params"]}
        wide = torch.float64 in dtypes or torch.complex128 in dtypes
        wide = wide and not any(map(needs_ranks, known))
        # torch.optim treats real and imaginary parts as elements; a registered rule may not.
        as_pairs = is_torch_optimizer(optimizer) or not any(dtype.is_complex for dtype in dtypes)
        return (
            len(known) == len(rules)
            and not wide
            and as_pairs
            and all(
                all(isinstance(run.state.get(key), Tensor) for key in run.keys_of(_rule_of(known, run).state))
                and all(name in run.counts for name in known[run.group].counts)
                and not (run.rounds and _steps(run.counts) is None)
                and ("step" not in run.state or "step" in run.counts)  # a Python number is the optimizer's to count
                for run in runs
            )
        )

    def run(
        self,
        groups: Sequence[dict[str, Any]],
        squared_norm: Tensor,
        max_norm: float | None = None,
        skip: Tensor | None = None,
        keeps_gradients: bool = False,
    ) -> bool:
        """Make one step; return True if it was a replay.

        Args:
            squared_norm: Squared norm of the gradients, 0-dim; the same tensor at each call.
            max_norm: Clip gradients to this norm; None: do not clip.
            skip: 0-dim; if not zero, nothing changes.
            keeps_gradients: leave gradients in place that use the memory of compute shards, and do not write those.
        """
        variant = _Variant(max_norm is not None, skip is not None, keeps_gradients)
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
            self._sequences[variant] = self._make_sequence()
        sequence = self._sequences[variant]
        with self._state.stream_state():
            for part in sequence:
                part()
        for run in self._runs:
            run.copied = self._writes_copy(run)
        return isinstance(sequence[0], GraphedSequence) and sequence[0].captured

    def _writes_copy(self, run: FlatRun) -> bool:
        """Return True if this variant of the step writes the run's compute shards."""
        assert self._variant is not None
        return run.copy is not None and not (self._variant.keeps_gradients and run.grad_is_copy)

    def _make_sequence(self) -> list[Callable[[], None]]:
        """Return the parts of a step: captured ones, and collectives between them."""
        static_tensors = (t for s in self._runs for t in (s.param, s.grad, s.copy, *s.state.values()))
        used = [tensor for tensor in static_tensors if isinstance(tensor, Tensor)]
        warmups = 1 if self._capture else math.inf
        own = proxy(self)  # a reference cycle would keep moved state alive
        # The parts replay one after the other. With pools of their own, each would keep its temporary updates.
        pool = torch.cuda.graph_pool_handle() if self._capture and self._device.type == "cuda" else None

        def graphed(*functions: Callable[[], None]) -> GraphedSequence:
            return GraphedSequence(lambda: _call_all(functions), self._device, warmups, watch=used, pool=pool)

        parts: list[Callable[[], None]] = []
        begin: list[Callable[[], None]] = [partial(StepKernel._compute_scalars, own)]
        for number in range(self._sums.passes):
            begin.append(partial(StepKernel._add_up, own, number))
            if (sum_over_ranks := self._sum_over_ranks) is not None:
                parts += [graphed(*begin), partial(sum_over_ranks, self._sums.sums(number))]
                begin = []
            begin.append(partial(StepKernel._use_sums, own, number))
        begin.append(partial(StepKernel._begin_update, own))
        end = partial(StepKernel._end_update, own)
        if not self._sends:
            return [*parts, graphed(*begin, partial(StepKernel._step_buckets, own), end)]

        exchanges, last = self._exchanges, len(self._exchanges) - 1

        def prepare(number: int) -> tuple[Callable[[], None], ...]:
            return partial(StepKernel._prepare, own, number), exchanges[number].pack

        def finish(number: int) -> tuple[Callable[[], None], ...]:
            return exchanges[number].unpack, partial(StepKernel._finish, own, number)

        # While a bucket is transformed, the next one is sent, and the one before it returns.
        parts += [graphed(*begin, *prepare(0)), exchanges[0].start_send]
        for number, exchange in enumerate(exchanges):
            parts.append(exchange.finish_send)
            if number < last:
                parts += [graphed(*prepare(number + 1)), exchanges[number + 1].start_send]
            parts.append(graphed(partial(StepKernel._transform, own, number)))
            if number > 0:
                parts += [exchanges[number - 1].finish_return, graphed(*finish(number - 1))]
            parts.append(exchange.start_return)
        parts.append(exchanges[last].finish_return)
        if self._shared_state is None:
            return [*parts, graphed(*finish(last), end)]
        assert self._sum_over_ranks is not None
        parts.append(graphed(*finish(last), partial(StepKernel._publish_state, own)))
        # Each value is not zero on its owner only.
        parts.append(partial(self._sum_over_ranks, self._shared_state))
        return [*parts, graphed(partial(StepKernel._receive_state, own), end)]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of temporary full updates that captured steps keep; 0 if steps are not captured."""
        captured = self._capture and self._device.type == "cuda"
        return max((exchange.workspace_bytes for exchange in self._exchanges), default=0) if captured else 0

    def prefetch_from_host(self) -> None:
        """Start to copy offloaded state to the device for the next step."""
        self._state.prefetch_from_host()

    def _compute_scalars(self) -> None:
        self._scalars = {id(run): self._numbers(self._rule(run), run) for run in self._runs}

    def _add_up(self, number: int) -> None:
        """Add up the terms of this rank's shards in one pass of reductions."""
        self._sums.begin_pass(number)
        for chunk in self._sum_chunks:
            rule, numbers = self._rule(chunk.run), self._scalars[id(chunk.run)]
            assert isinstance(rule, ReductionRule)
            if number >= len(rule.reductions):
                continue
            reduction, part = rule.reductions[number], self._sums.part(chunk)
            param, grad = chunk.view_of(chunk.run.param), chunk.view_of(chunk.run.grad)
            state = chunk.load(rule.state)
            values, sums = self._sums.values(chunk), self._sums.outputs(chunk, number)
            keys = list(state), list(numbers), list(values), list(sums)

            def add(
                param: Tensor,
                grad: Tensor,
                *rest: Tensor,
                keys: Any = keys,
                reduction: Reduction = reduction,
                part: ParameterPart = part,
            ) -> dict[str, Tensor]:
                tensors = iter(rest)
                old, scalar, known, out = (dict(zip(names, tensors, strict=False)) for names in keys)
                wide = at_least_float32(grad) * scalar["factor"] if "factor" in scalar else at_least_float32(grad)
                old = {name: at_least_float32(value) for name, value in old.items()}
                terms = reduction.terms(at_least_float32(param), wide, old, scalar, part.expand_all(known))
                for name, total in out.items():
                    total.add_(part.add_up(terms[name], reduction.over.get(name)))
                return {}

            dtypes = param.dtype, grad.dtype, *(value.dtype for value in state.values())
            key = (reduction, part, tuple(map(tuple, keys)), dtypes)
            arguments = (param, grad, *state.values(), *numbers.values(), *values.values(), *sums.values())
            self._run_compiled(key, add, arguments)

    def _use_sums(self, number: int) -> None:
        """Compute the values of one pass of reductions from the sums of all ranks."""
        self._sums.end_pass(number, lambda run: self._scalars[id(run)])

    def _begin_update(self) -> None:
        """Step all runs but those of matrices."""
        self._chunks = self._state.iter_chunks()
        elementwise = sum(not isinstance(self._rule(chunk.run), MatrixRule) for chunk in self._state.chunks)
        for loaded in islice(self._chunks, elementwise):
            self._apply(loaded)

    def _end_update(self) -> None:
        for _ in self._chunks:
            raise AssertionError("a chunk of the flat runs was not stepped")

    def _step_buckets(self) -> None:
        """Step the buckets of matrices, all of which this rank holds.

        The elementwise parts of neighboring buckets run while a bucket is transformed: products use little of the
        memory's bandwidth.
        """
        side, count = self._side, len(self._exchanges)
        side.follow()
        ready = [side.launch(partial(self._prepare, number)) for number in range(min(1, count))]
        for number in range(count):
            if number + 1 < count:
                ready.append(side.launch(partial(self._prepare, number + 1)))
            ready[number]()
            self._transform(number)
            side.follow()
            side.launch(partial(self._finish, number))
        side.join()

    def _transform(self, number: int) -> None:
        exchange = self._exchanges[number]
        assert exchange.bucket.run is not None
        exchange.transform(self._scalars[id(exchange.bucket.run)])

    def _shared_parts(self) -> Iterator[tuple[MatrixExchange, Tensor]]:
        """Yield the exchanges of matrices with shared state, and their parts of the memory that is sent."""
        assert self._shared_state is not None
        sizes = [exchange.bucket.shared_numel for exchange in self._exchanges]
        for exchange, size, part in zip(self._exchanges, sizes, self._shared_state.split(sizes), strict=True):
            if size:
                yield exchange, part

    def _publish_state(self) -> None:
        for exchange, part in self._shared_parts():
            exchange.publish_state(part)

    def _receive_state(self) -> None:
        for exchange, part in self._shared_parts():
            exchange.receive_state(part)

    def _prepare(self, number: int) -> None:
        """Update the elementwise state of a bucket, and compute its updates."""
        exchange = self._exchanges[number]
        begin, end = exchange.bucket.begin, exchange.bucket.end
        while begin < end:
            loaded = next(self._chunks)
            chunk = loaded.chunk
            assert chunk.run is exchange.bucket.run
            assert chunk.begin == begin
            self._apply(loaded, exchange.update[begin - exchange.bucket.begin : chunk.end - exchange.bucket.begin])
            begin = chunk.end

    def _finish(self, number: int) -> None:
        """Apply the transformed updates of a bucket to the parameters."""
        exchange = self._exchanges[number]
        bucket = exchange.bucket
        run = bucket.run
        assert run is not None
        rule, numbers = self._rule(run), self._scalars[id(run)]
        assert isinstance(rule, MatrixRule)
        place = len(run.stored_dtypes)  # of the weights among the values that share the noise
        flat, keys = run.param.detach().view(-1)[bucket.begin : bucket.end], list(numbers)
        for factor, ranges in groupby(
            zip(bucket.layouts, bucket.ranges, strict=True), key=lambda pair: rule.factor(pair[0].shape)
        ):
            members = [span for _, span in ranges]
            begin, end = members[0][0], members[-1][1]

            copy = run.copy if self._writes_copy(run) else None
            written = () if copy is None else (copy[bucket.begin + begin : bucket.begin + end],)

            def change(
                param: Tensor, update: Tensor, *rest: Tensor, factor: float = factor, copies: bool = copy is not None
            ) -> dict[str, Tensor]:
                scalar = dict(zip(keys, rest, strict=False))
                before = at_least_float32(param)
                after = rule.finish(before, update.to(before.dtype), scalar, factor)
                after = torch.where(scalar["skip"] == 0, after, before) if "skip" in scalar else after
                if run.rounds_param:
                    owners, shifts, first = rest[len(keys) : len(keys) + 3]
                    noise = rounding_noise(owners, shifts, first, scalar["keys"])
                    after = stochastic_round(after, noise, place)
                param.copy_(after)
                if copies:
                    rest[-1].copy_(after)
                return {}

            param, update = flat[begin:end], exchange.result[begin:end]
            where: tuple[Tensor, ...] = ()
            if run.rounds_param:
                at = self._state.positions[id(run)].part(bucket.begin + begin, bucket.begin + end)
                where = at.owners, at.shifts, at.begin
            shape = end - begin, param.dtype, len(written)
            key = (rule, "finish", factor, *shape, tuple(keys), run.rounds_param, len(run.members))
            self._run_compiled(key, change, (param, update, *numbers.values(), *where, *written))

    def _rule(self, run: FlatRun) -> AnyRule:
        return _rule_of(self._rules, run)

    def _numbers(self, rule: AnyRule, run: FlatRun) -> dict[str, Tensor]:
        """Return the scalars that the update of all elements shares, 0-dim and as wide, and count the step."""
        assert self._variant is not None
        clip, skip, _ = self._variant
        settings, dtype = self._settings[run.group], run.param.dtype

        def compute(squared: Tensor, max_norm: Tensor, skipped: Tensor, *rest: Tensor) -> dict[str, Tensor]:
            setting = dict(zip(settings, rest, strict=False))
            counts = dict(zip(run.counts, rest[len(settings) :], strict=False))
            if (steps := _steps(counts)) is not None:
                steps.add_(1 if not skip else (skipped == 0).to(steps.dtype))
            step = steps[0] if steps is not None else torch.full_like(squared, math.nan)
            others = [name for name in rule.counts if name != "step"]
            scalars = rule.scalars({**setting, **{name: counts[name][0].double() for name in others}}, step)
            for name in others:
                value, old = scalars.pop(name), counts[name]
                old.copy_(value if not skip else torch.where(skipped == 0, value.to(old.dtype), old))
            numbers = {k: v.double() if dtype is torch.float64 else v.float() for k, v in scalars.items()}
            if clip:
                numbers["factor"] = clip_factor(squared, max_norm)
            if salts:
                numbers["keys"] = noise_keys(rest[-1], step)
            return numbers

        salts = (self._state.positions[id(run)].salts,) if run.rounds else ()
        arguments = (self._squared, self._max_norm, self._skip, *settings.values(), *run.counts.values(), *salts)
        shapes = tuple((name, tuple(c.shape)) for name, c in run.counts.items())
        key = (rule, self._variant, shapes, dtype, len(run.members) if salts else None)
        return self._run_compiled(key, compute, arguments) | ({"skip": self._skip} if skip else {})

    def _apply(self, loaded: LoadedChunk, update: Tensor | None = None) -> None:
        """Step a chunk. With a :class:`MatrixRule`, write its update into ``update`` and leave the parameter."""
        run = loaded.chunk.run
        rule, numbers = self._rule(run), self._scalars[id(run)]
        # Blocks of 8-bit state are rows: their scale is a reduction in the same kernel.
        width = STATE_BLOCK if run.code_dtypes else None

        def shaped(flat: Tensor) -> Tensor:
            reals = _reals(flat)
            return reals if width is None else reals.view(-1, width if flat.numel() == loaded.param.numel() else 1)

        param, grad = map(shaped, (loaded.param, loaded.chunk.view_of(run.grad)))
        positions, state = loaded.positions, list(map(shaped, loaded.state.values()))
        names, stored, keys = rule.state, list(loaded.state), list(numbers)
        rounded = list(run.stored_dtypes)
        where: tuple[Tensor, ...] = () if positions is None else (positions.owners, positions.shifts, positions.begin)
        copies = () if loaded.copy is None or not self._writes_copy(run) else (loaded.copy,)
        # The weight then replaces its gradient.
        into_grad = update is None and bool(copies) and run.grad_is_copy
        out = tuple(map(shaped, () if into_grad else copies if update is None else (update,)))
        sums = isinstance(rule, ReductionRule)
        values = self._sums.values(loaded.chunk) if sums else {}
        part = self._sums.part(loaded.chunk) if sums else None

        def step(before: tuple[Tensor, Tensors], grad: Tensor, scalar: Tensors, values: Tensors) -> Any:
            if isinstance(rule, ReductionRule):
                assert part is not None
                return rule.apply(before[0], grad, before[1], scalar, part.expand_all(values))
            if isinstance(rule, Rule):
                return rule.apply(before[0], grad, before[1], scalar)
            return _prepared(rule, *rule.prepare(before[0], grad, before[1], scalar), grad.shape)

        def change(param: Tensor, grad: Tensor, *rest: Tensor) -> dict[str, Tensor]:
            old = dict(zip(stored, rest, strict=False))
            scalar = dict(zip(keys, rest[len(stored) :], strict=False))
            wide = at_least_float32(grad)
            if "factor" in scalar:
                wide = wide * scalar["factor"]
                if not into_grad:
                    grad.copy_(wide)
            before = at_least_float32(param), {name: _wide_state(name, old) for name in names}
            known = dict(zip(values, rest[len(stored) + len(keys) :], strict=False))
            after, new = step(before, wide, scalar, known)
            changes_param = not isinstance(rule, MatrixRule)
            keep = scalar["skip"] == 0 if "skip" in scalar else None
            noise = None
            if positions is not None:
                owners, shifts, begin = rest[len(stored) + len(keys) + len(values) :][: len(where)]
                make_noise = rounding_noise if width is None else block_noise
                noise = make_noise(owners, shifts, begin, scalar["keys"])
            if changes_param:
                after = after if keep is None else torch.where(keep, after, before[0])
                param.copy_(after if not run.rounds_param else _rounded(after, noise, len(rounded)))
            if out or into_grad:
                (grad if into_grad else rest[-1]).copy_(after)
            for name in names:
                number = rounded.index(name) if name in rounded else 0
                for key, value in _stored_state(name, new[name], old, noise, number).items():
                    old[key].copy_(value if keep is None else torch.where(keep, value, old[key]))
            return {}

        members = 0 if positions is None else len(positions.shifts)
        dtypes = tuple(tensor.dtype for tensor in (param, grad, *state, *out))
        key = (rule, param.numel(), dtypes, tuple(keys), members, part, tuple(values), into_grad)
        self._run_compiled(key, change, (param, grad, *state, *numbers.values(), *values.values(), *where, *out))

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


def _prepared(rule: MatrixRule, update: Tensor, new: Tensors, shape: torch.Size) -> tuple[Tensor, Tensors]:
    """Return update and new state of ``rule.prepare``, whose shapes are checked."""
    if any(value is None or value.shape != shape for value in (update, *map(new.get, rule.state))):
        raise ValueError(
            f"MatrixRule.prepare returned an update of shape {tuple(update.shape)} and the state {sorted(new)} for "
            f"shards of shape {tuple(shape)}. Return (update, new state), each of the shard's shape, with the state "
            f"{list(rule.state)}."
        )
    return update, new


def _reals(flat: Tensor) -> Tensor:
    return as_real(flat).view(-1)


def _wide_state(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    """Return a chunk's state of this name as the rule reads it."""
    if codes_key(name) in stored:
        return dequantize(stored[codes_key(name)], stored[scales_key(name)])
    return at_least_float32(stored[name])


def _rounded(value: Tensor, noise: Tensor | None, number: int) -> Tensor:
    assert noise is not None
    return stochastic_round(value, noise, number)


def _stored_state(
    name: str, value: Tensor, stored: Mapping[str, Tensor], noise: Tensor | None, number: int
) -> dict[str, Tensor]:
    """Return new values of the tensors that store the state of this name, rounded by the noise."""
    dtype = stored[codes_key(name) if codes_key(name) in stored else name].dtype
    if is_quantized(dtype) or (dtype is STATE_DTYPE and noise is not None):
        assert noise is not None
        return round_state(name, value, dtype, noise, number)
    return {name: value}


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _make_exchanges(
    rules: Sequence[AnyRule | None],
    runs: Sequence[FlatRun],
    group: MatrixGroup | None,
    max_bytes: int,
    device: torch.device,
    memory: ExchangeMemory,
) -> list[MatrixExchange]:
    """Return the exchanges of all runs with a :class:`MatrixRule`."""

    def rule_of(run: FlatRun) -> MatrixRule:
        rule = rules[run.group]
        assert isinstance(rule, MatrixRule)
        return rule

    matrices = [run for run in runs if isinstance(rules[run.group], MatrixRule)]
    if not matrices:
        return []
    assert group is not None, "an optimizer of matrices needs to know its ranks"
    loads = [0.0] * group.size
    found = [(bucket, rule_of(run)) for run in matrices for bucket in make_buckets(run, rule_of(run), max_bytes, loads)]
    buckets, of_buckets = [bucket for bucket, _ in found], [rule for _, rule in found]
    return make_exchanges(even_out(buckets, of_buckets, loads), of_buckets, group, device, memory)


def _rule_of(rules: Sequence[AnyRule | None], run: FlatRun) -> AnyRule:
    rule = rules[run.group]
    assert rule is not None
    return of_run(rule, run)


def _reduction_rule_of(rules: Sequence[AnyRule | None], run: FlatRun) -> ReductionRule:
    rule = _rule_of(rules, run)
    assert isinstance(rule, ReductionRule)
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
    options: dict[str, Any] = {"triton.autotune_pointwise": False, "emulate_precision_casts": True}
    # Inductor's caches need a ShapeEnv to find a graph again, although all sizes are static here.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    inputs = _fake_inputs(mode, arguments)
    if any(is_quantized(a.dtype) for a in arguments):
        with limit_row_elements(ROW_ELEMENTS):
            compiled: Any = lookup_backend("inductor")(graph, inputs, config_patches=options | {"compile_threads": 1})
    else:
        compiled = lookup_backend("inductor")(graph, inputs, config_patches=options)
    return lambda *inputs: dict(zip(names, compiled(*inputs), strict=True))


def _fake_inputs(mode: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return fake tensors that share a storage only if the tensors overlap.

    One buffer stages offloaded state of all dtypes. AOTAutograd refuses graphs that mutate two inputs of one storage if
    their dtypes differ. A gradient that aliases a compute copy overlaps it, and the compiler must know that.
    """
    spans = [StorageSpan(tensor) for tensor in tensors]

    def fake(number: int, tensor: Tensor) -> Tensor:
        span = spans[number]
        if any(span.overlaps(other) for place, other in enumerate(spans) if place != number):
            return mode.from_tensor(tensor, static_shapes=True)  # type: ignore[no-any-return]
        with mode:  # the offset tells Inductor how the input is aligned
            base = torch.empty(span.end // tensor.element_size(), dtype=tensor.dtype, device=tensor.device)
            return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    return [fake(number, tensor) for number, tensor in enumerate(tensors)]


def _setting(group: dict[str, Any], name: str) -> Any:
    if name.endswith((".0", ".1")):
        return group[name[:-2]][int(name[-1])]
    return group[name]
