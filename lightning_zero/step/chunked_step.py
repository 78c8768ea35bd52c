"""Step flat parameters in chunks if their state is on the host or in fewer bytes.

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

from lightning_zero.offload.staging_ring import RingPass
from lightning_zero.optim.bf16_state import (
    ROUNDING_COUNT,
    ElementPositions,
    noise_keys,
    rounding_noise,
)
from lightning_zero.optim.flat_runs import (
    MASTER_SHARD,
    MAX_CHUNK_NUMEL,
    Chunk,
    FlatRun,
    InPlacePass,
    StateOnHost,
    chunk_numel,
    split_into_chunks,
)
from lightning_zero.optim.quantized_state import (
    block_noise,
    codes_key,
    is_quantized,
    quantized_names,
    unpack_entries,
)
from lightning_zero.optim.state_dtypes import round_state
from lightning_zero.optim.update_rules import rule_for
from lightning_zero.sharding.layout import STATE_BLOCK
from lightning_zero.step.step_layouts import FlatParams, OwnParams, StepDemands, StepLayout, StepLayouts


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

    def begin(self, layout: StepLayout, own: OwnParams, demands: StepDemands) -> FlatParams:
        assert demands.skip is None, "only the captured runner can skip"
        layout.prepare_eager_step(own.state, demands.max_norm)
        chunks = [chunk for run in layout.runs for chunk in self._cut(run, own)]
        self._sequence = _ChunkSequence(chunks, self._host)
        origins = [chunk.run.group for chunk in chunks]
        groups = [own.groups[n] | {"params": [param]} for n, param in zip(origins, self._sequence.params, strict=True)]
        return FlatParams(groups, _LazyState(self._sequence), origins)

    def _cut(self, run: FlatRun, own: OwnParams) -> list[Chunk]:
        rule, itemsizes = rule_for(self._optimizer, own.groups[run.group]), []
        if not run.elementwise and rule is not None:  # the optimizer has not made them yet
            itemsizes = [max(run.param.itemsize, torch.float32.itemsize)] * len(rule.state)
        numel = chunk_numel(run, run.elementwise, self._host.ring if self._host else None, itemsizes)
        return split_into_chunks(run, min(numel, MAX_CHUNK_NUMEL) if run.rounds else numel)

    def end(self, layout: StepLayout, own: OwnParams) -> None:
        self._sequence.end()
        self._sequence = _ChunkSequence([], self._host)  # frees the last chunk's state, and gradients that were cast
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
        self._names = {id(chunk.run): chunk.run.elementwise for chunk in chunks}  # keys of the state before the step
        self._after: dict[int, tuple[FlatRun, dict[str, Any]]] = {}  # state of the last chunk of each run
        self._copied: set[int] = set()  # numbers of the chunks whose compute shards were written
        self._positions: dict[int, ElementPositions] = {}  # of the runs whose state is rounded, by id
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
            for name, value in state.items():
                for key in run.keys_of([name]):
                    final[key] = run.state[key] if key in run.elementwise else value
                if name in run.counts:
                    final[name] = run.state[name].copy_(value)
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
        names = {codes_key(name): name for name in quantized_names(loaded)}
        unpack_entries(loaded)
        for key, value in run.state.items():
            name = names.get(key, key)
            if name in loaded:
                wide = loaded[name].to(run.param.dtype) if name in run.stored_dtypes else loaded[name]
                result[name] = wide.view(self.params[number].shape)
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
        memory = self._host.memory if self._host else None
        for name, value in large.items():
            run.check(name, value, shape)
            run.allocate_state(name, run.stored_dtype(name, value), memory)
        stored = self._round_state(chunk, large)
        if run.on_host is not None:
            self._write_compute_shard(number)
        self._pass.close(number - self._first, chunk.load(list(stored)), stored)
        if state:
            self._after[id(run)] = run, state

    def _write_compute_shard(self, number: int) -> None:
        """Write the compute shard from a master shard that was stepped in a buffer."""
        chunk, param = self._chunks[number], self.params[number]
        if chunk.run.copy is not None:
            chunk.view_of(chunk.run.copy).copy_(param.data.view(-1))
            self._copied.add(number)
        param.data = chunk.view_of(chunk.run.param).view(param.shape)

    def _round_state(self, chunk: Chunk, large: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the chunk's state by the keys under which it is stored, stochastically rounded."""
        run, device, stored = chunk.run, chunk.run.param.device, dict(large)
        rounded = [name for name in run.stored_dtypes if name in large and large[name].is_floating_point()]
        if not rounded:
            return stored
        step = self._state.get("step")
        if not isinstance(step, Tensor):
            before = self._state.get(ROUNDING_COUNT, torch.zeros((), dtype=torch.float32))
            step = self._state[ROUNDING_COUNT] = before + 1
        if id(run) not in self._positions:
            self._positions[id(run)] = ElementPositions.from_members(run.members, device)
        at = self._positions[id(run)].part(chunk.begin, chunk.end)
        make_noise = block_noise if run.code_dtypes else rounding_noise
        noise = make_noise(at.owners, at.shifts, at.begin, noise_keys(at.salts, step.to(device)))
        for number, (name, dtype) in enumerate(run.stored_dtypes.items()):
            if name not in rounded:
                continue
            value = stored.pop(name).float()
            rows = value.view(-1, STATE_BLOCK) if is_quantized(dtype) else value.view(-1)
            stored |= round_state(name, rows, dtype, noise, number)
        return stored


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
