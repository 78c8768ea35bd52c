"""Step flat parameters in chunks if their state is on the host or in bfloat16.

The optimizer steps one chunk after the other. The state of the present chunk is on the device, in the dtype that the
optimizer uses. The optimizer sees a parameter group for each chunk, with the settings of its own group. It reads a
parameter's state first: this read loads the chunk's state and writes the last chunk's state back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.offload.staging_ring import RingPass, StagedChunk
from lightning_zero.optim.bf16_state import (
    ROUNDING_COUNT,
    ElementPositions,
    noise_keys,
    rounding_noise,
    stochastic_round,
)
from lightning_zero.optim.flat_runs import (
    MASTER_SHARD,
    MAX_CHUNK_NUMEL,
    Chunk,
    FlatRun,
    InPlacePass,
    StateOnHost,
    chunk_itemsizes,
    split_into_chunks,
)
from lightning_zero.optim.update_rules import rule_for
from lightning_zero.step.step_layouts import FlatParams, OwnParams, StepLayout, StepLayouts


class ChunkedRunner:
    """Shows the chunks of a layout's flat runs to the optimizer.

    Args:
        optimizer: Optimizer with a known update rule; other optimizers may revisit a parameter.
        host: Host memory of the state; None if state is on the device.
    """

    can_clip = can_skip = False

    def __init__(self, optimizer: torch.optim.Optimizer, layouts: StepLayouts, host: StateOnHost | None) -> None:
        self._optimizer = optimizer
        self._layouts = layouts
        self._host = host
        self._sequence = _ChunkSequence([], host)

    def can_step(self, layout: StepLayout, own: OwnParams) -> bool:
        return True

    def begin(self, layout: StepLayout, own: OwnParams, max_norm: float | None, skip: Tensor | None) -> FlatParams:
        assert skip is None, "only the captured runner can skip"
        layout.prepare_eager_step(own.state, max_norm)
        chunks = [chunk for run in layout.runs for chunk in self._cut(run, own)]
        self._sequence = _ChunkSequence(chunks, self._host)
        origins = [chunk.run.group for chunk in chunks]
        groups = [own.groups[n] | {"params": [param]} for n, param in zip(origins, self._sequence.params, strict=True)]
        return FlatParams(groups, _LazyState(self._sequence), origins)

    def _cut(self, run: FlatRun, own: OwnParams) -> list[Chunk]:
        itemsizes = [run.state[name].itemsize for name in run.elementwise]
        rule = rule_for(self._optimizer, own.groups[run.group])
        if not itemsizes and rule is not None:  # the optimizer has not made them yet
            itemsizes = [max(run.param.itemsize, torch.float32.itemsize)] * len(rule.state)
        itemsizes = chunk_itemsizes(run, itemsizes)
        numel = self._host.ring.elements(itemsizes) if self._host and itemsizes else run.param.numel()
        return split_into_chunks(run, min(numel, MAX_CHUNK_NUMEL) if run.bf16_state else numel)

    def end(self, layout: StepLayout, own: OwnParams) -> None:
        self._sequence.end()
        layout.finish_eager_step(own.state)
        self._layouts.remember_state(own.state)


class _ChunkSequence:
    """Chunks, of which one at a time has its state on the device.

    Attributes:
        params: The elements of each chunk as a parameter, with gradient.
    """

    def __init__(self, chunks: Sequence[Chunk], host: StateOnHost | None) -> None:
        self.params = [_chunk_parameter(chunk) for chunk in chunks]
        self._chunks = chunks
        self._host = host
        self._numbers = {id(param): number for number, param in enumerate(self.params)}
        self._names = {id(chunk.run): chunk.run.elementwise for chunk in chunks}  # names of the state before the step
        self._after: dict[int, tuple[FlatRun, dict[str, Any]]] = {}  # state of the last chunk of each run
        self._copied: set[int] = set()  # numbers of the chunks whose compute shards were written
        self._positions: dict[int, ElementPositions] = {}  # of the runs with bfloat16 state, by id
        self._pass: RingPass | InPlacePass | None = None
        self._first = 0  # first chunk of that pass
        self._current: int | None = None
        self._state: dict[str, Any] = {}  # state of the present chunk

    def state_of(self, param: Any) -> dict[str, Any] | None:
        """Return this parameter's state, on the device until the next one's is read; None if unknown."""
        number = self._numbers.get(id(param))
        if number is None or number == self._current:
            return None if number is None else self._state
        follows = self._pass is not None and self._current is not None and number == self._current + 1
        self._write_back()
        if not follows:
            self._begin_at(number)
        self._state = self._open(number)
        self._current = number
        return self._state

    def replace(self, param: Any, state: dict[str, Any]) -> None:
        """Replace the state that :meth:`state_of` returned, as the optimizer does by assignment."""
        self.state_of(param)
        self._state = state

    def end(self) -> None:
        """Write the last chunk back and update the state of the runs."""
        self._write_back()
        self._close_pass()
        for chunk in self._chunks:
            chunk.run.copied = chunk.run.copy is not None
        for number, chunk in enumerate(self._chunks):
            chunk.run.copied = chunk.run.copied and number in self._copied
        for run, state in self._after.values():
            final = {}
            for key, value in state.items():
                final[key] = run.state[key] if key in run.elementwise else value
                if key in run.counts:
                    final[key] = run.state[key].copy_(value)
            run.state = final

    def _begin_at(self, number: int) -> None:
        self._close_pass()
        self._first = number
        loads = [chunk.load(self._names[id(chunk.run)]) for chunk in self._chunks[number:]]
        self._pass = RingPass(self._host.ring, loads) if self._host else InPlacePass(loads)
        self._pass.prefetch()

    def _close_pass(self) -> None:
        if self._pass is not None:
            self._pass.flush()
            self._pass.rejoin()  # the compute stream may read master shards from here on

    def _open(self, number: int) -> dict[str, Any]:
        assert self._pass is not None
        loaded = self._pass.open(number - self._first)
        run, result = self._chunks[number].run, {}
        if MASTER_SHARD in loaded:
            self.params[number].data = loaded.pop(MASTER_SHARD).view(self.params[number].shape)
        for key, value in run.state.items():
            if key in loaded:
                wide = loaded[key].to(run.param.dtype) if key in run.bf16_state else loaded[key]
                result[key] = wide.view(self.params[number].shape)
            elif key not in run.elementwise:  # made by the chunk before
                # Each chunk counts the step for itself.
                result[key] = value.clone() if isinstance(value, Tensor) else value
        return result

    def _write_back(self) -> None:
        number, self._current = self._current, None
        if number is None or self._pass is None:
            return
        chunk, state, shape = self._chunks[number], self._state, self.params[number].shape
        run = chunk.run
        large = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.numel() > 1}
        for key, value in large.items():
            run.check(key, value, shape)
            if key not in run.state:
                memory = run.empty(run.stored_dtype(key, value), self._host.memory if self._host else None)
                run.state[key] = memory.view(run.param.shape)
        if run.on_host is not None:
            self._write_compute_shard(number)
        self._pass.close(number - self._first, chunk.load(list(large)), large | self._round_state(chunk, large))
        if state:
            self._after[id(run)] = run, state

    def _write_compute_shard(self, number: int) -> None:
        """Write the compute shard from a master shard that was stepped in a buffer."""
        chunk, param = self._chunks[number], self.params[number]
        if chunk.run.copy is not None:
            chunk.view_of(chunk.run.copy).copy_(param.data.view(-1))
            self._copied.add(number)
        param.data = chunk.view_of(chunk.run.param).view(param.shape)

    def _round_state(self, chunk: Chunk, large: StagedChunk) -> dict[str, Tensor]:
        """Return the chunk's bfloat16 state, stochastically rounded."""
        run, device = chunk.run, chunk.run.param.device
        bf16_state = [key for key in run.bf16_state if key in large and large[key].is_floating_point()]
        if not bf16_state:
            return {}
        step = self._state.get("step")
        if not isinstance(step, Tensor):
            step = self._state[ROUNDING_COUNT] = self._state.get(ROUNDING_COUNT, torch.zeros(())) + 1
        if id(run) not in self._positions:
            self._positions[id(run)] = ElementPositions.from_members(run.members, device)
        at = self._positions[id(run)].part(chunk.begin, chunk.end)
        noise = rounding_noise(at.owners, at.shifts, at.begin, noise_keys(at.salts, step.to(device)))
        return {
            key: stochastic_round(large[key].float().view(-1), noise, run.bf16_state.index(key)).view(large[key].shape)
            for key in bf16_state
        }


class _LazyState(defaultdict[Any, dict[str, Any]]):
    """The optimizer's ``state``, loaded on access."""

    def __init__(self, sequence: _ChunkSequence) -> None:
        super().__init__(dict)
        self._sequence = sequence

    def __getitem__(self, param: Any) -> dict[str, Any]:
        state = self._sequence.state_of(param)
        return super().__getitem__(param) if state is None else state

    def __setitem__(self, param: Any, state: dict[str, Any]) -> None:
        self._sequence.replace(param, state)

    def __contains__(self, param: Any) -> bool:
        return bool(self._sequence.state_of(param))

    def get(self, param: Any, default: Any = None) -> Any:
        return self._sequence.state_of(param) or default


def _chunk_parameter(chunk: Chunk) -> nn.Parameter:
    flat = chunk.view_of(chunk.run.param)
    shape = (1,) * (chunk.run.param.dim() - 1) + (flat.numel(),)
    param = nn.Parameter(flat.view(shape))
    param.grad = chunk.view_of(chunk.run.grad).view(shape).to(param.dtype)
    return param
