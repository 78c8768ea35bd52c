"""The optimizer steps flat parameters by itself, whose state lies on the host or is narrow: one stretch after the
other, each of which has its state on the device, as wide as the optimizer makes it, while it is stepped.

The optimizer sees a parameter group for each stretch, with the settings of its own one. It steps group after group, and
asks for a parameter's state first: that is when the state comes, and when that of the stretch before leaves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.offload.staging_ring import RingPass, StagedChunk
from lightning_zero.optim.bf16_state import ROUNDING_COUNT
from lightning_zero.optim.chunks import (
    MASTER_SHARD,
    MAX_CHUNK_NUMEL,
    Chunk,
    InPlacePass,
    StateOnHost,
    chunk_itemsizes,
    split_into_chunks,
)
from lightning_zero.optim.flat_runs import FlatRun
from lightning_zero.optim.rounding import ElementPositions, noise_keys, rounding_noise, stochastic_round
from lightning_zero.optim.rules import rule_for
from lightning_zero.step.layout import StepLayout
from lightning_zero.step.layouts import StepLayouts
from lightning_zero.step.substitute import FlatParams, OwnParams

__all__ = ["ChunkedRunner"]


class ChunkedRunner:
    """Shows the optimizer the stretches of a layout's segments.

    Args:
        optimizer: whose update rule is known; others might look at a parameter again when its turn is over.
        layouts: of the optimizer.
        host: where its state lies; None: on the device.
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
        assert skip is None, "only what replays can skip"
        layout.prepare_eager_step(own.state, max_norm)
        parts = [part for run in layout.runs for part in self._cut(run, own)]
        self._sequence = _ChunkSequence(parts, self._host)
        origins = [part.run.group for part in parts]
        groups = [own.groups[n] | {"params": [param]} for n, param in zip(origins, self._sequence.params, strict=True)]
        return FlatParams(groups, _LazyState(self._sequence), origins)

    def _cut(self, run: FlatRun, own: OwnParams) -> list[Chunk]:
        itemsizes = [run.state[name].itemsize for name in run.elementwise]
        rule = rule_for(self._optimizer, own.groups[run.group])
        if not itemsizes and rule is not None:  # they are still to be made
            itemsizes = [max(run.param.itemsize, torch.float32.itemsize)] * len(rule.state)
        itemsizes = chunk_itemsizes(run, itemsizes)
        numel = self._host.ring.elements(itemsizes) if self._host and itemsizes else run.param.numel()
        return split_into_chunks(run, min(numel, MAX_CHUNK_NUMEL) if run.bf16_state else numel)

    def end(self, layout: StepLayout, own: OwnParams) -> None:
        self._sequence.end()
        layout.finish_eager_step(own.state)
        self._layouts.remember_state(own.state)


class _ChunkSequence:
    """Stretches, of which one at a time has its state on the device.

    Attributes:
        params: of each, the elements as a parameter, with their gradient.
    """

    def __init__(self, parts: Sequence[Chunk], host: StateOnHost | None) -> None:
        self.params = [_chunk_parameter(part) for part in parts]
        self._parts = parts
        self._host = host
        self._numbers = {id(param): number for number, param in enumerate(self.params)}
        self._names = {id(part.run): part.run.elementwise for part in parts}  # of what there was before
        self._after: dict[int, tuple[FlatRun, dict[str, Any]]] = {}  # the state that the last stretch of each had
        self._copied: set[int] = set()  # numbers of stretches whose compute copies were written
        self._positions: dict[int, ElementPositions] = {}  # of the segments with narrow state, by their ids
        self._pass: RingPass | InPlacePass | None = None
        self._first = 0  # stretch of that pass
        self._now: int | None = None
        self._state: dict[str, Any] = {}  # of that stretch

    def state_of(self, param: Any) -> dict[str, Any] | None:
        """The state of this parameter, on the device until that of another one comes; None: it is not one of ours."""
        number = self._numbers.get(id(param))
        if number is None or number == self._now:
            return None if number is None else self._state
        follows = self._pass is not None and self._now is not None and number == self._now + 1
        self._write_back()
        if not follows:
            self._begin_at(number)
        self._state = self._open(number)
        self._now = number
        return self._state

    def replace(self, param: Any, state: dict[str, Any]) -> None:
        """The optimizer has put this in the place of what :meth:`state_of` gave."""
        self.state_of(param)
        self._state = state

    def end(self) -> None:
        """All that has come leaves; segments have the state that the optimizer keeps."""
        self._write_back()
        self._close_pass()
        for part in self._parts:
            part.run.copied = part.run.copy is not None
        for number, part in enumerate(self._parts):
            part.run.copied = part.run.copied and number in self._copied
        for run, state in self._after.values():
            kept = {}
            for key, value in state.items():
                kept[key] = run.state[key] if key in run.elementwise else value
                if key in run.counts:
                    kept[key] = run.state[key].copy_(value)
            run.state = kept

    def _begin_at(self, number: int) -> None:
        self._close_pass()
        self._first = number
        loads = [part.load(self._names[id(part.run)]) for part in self._parts[number:]]
        self._pass = RingPass(self._host.ring, loads) if self._host else InPlacePass(loads)
        self._pass.prefetch()

    def _close_pass(self) -> None:
        if self._pass is not None:
            self._pass.flush()
            self._pass.rejoin()  # master shards may be read from here on, as tensors of the device

    def _open(self, number: int) -> dict[str, Any]:
        assert self._pass is not None
        here = self._pass.open(number - self._first)
        run, found = self._parts[number].run, {}
        if MASTER_SHARD in here:
            self.params[number].data = here.pop(MASTER_SHARD).view(self.params[number].shape)
        for key, value in run.state.items():
            if key in here:
                wide = here[key].to(run.param.dtype) if key in run.bf16_state else here[key]
                found[key] = wide.view(self.params[number].shape)
            elif key not in run.elementwise:  # which the stretch before has made, and this one has not
                # Each stretch counts the step for itself.
                found[key] = value.clone() if isinstance(value, Tensor) else value
        return found

    def _write_back(self) -> None:
        number, self._now = self._now, None
        if number is None or self._pass is None:
            return
        part, state, shape = self._parts[number], self._state, self.params[number].shape
        run = part.run
        large = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.numel() > 1}
        for key, value in large.items():
            run.check(key, value, shape)
            if key not in run.state:
                memory = run.empty(run.stored_dtype(key, value), self._host.memory if self._host else None)
                run.state[key] = memory.view(run.param.shape)
        if run.on_host is not None:
            self._write_compute_copy(number)
        self._pass.close(number - self._first, part.load(list(large)), large | self._round_state(part, large))
        if state:
            self._after[id(run)] = run, state

    def _write_compute_copy(self, number: int) -> None:
        """Of the master shards that were stepped in a buffer."""
        part, param = self._parts[number], self.params[number]
        if part.run.copy is not None:
            part.of(part.run.copy).copy_(param.data.view(-1))
            self._copied.add(number)
        param.data = part.of(part.run.param).view(param.shape)

    def _round_state(self, part: Chunk, large: StagedChunk) -> dict[str, Tensor]:
        """The narrow state of a stretch, as it is kept."""
        run, device = part.run, part.run.param.device
        bf16_state = [key for key in run.bf16_state if key in large and large[key].is_floating_point()]
        if not bf16_state:
            return {}
        step = self._state.get("step")
        if not isinstance(step, Tensor):
            step = self._state[ROUNDING_COUNT] = self._state.get(ROUNDING_COUNT, torch.zeros(())) + 1
        if id(run) not in self._positions:
            self._positions[id(run)] = ElementPositions.of(run.members, device)
        at = self._positions[id(run)].part(part.begin, part.end)
        noise = rounding_noise(at.owners, at.shifts, at.begin, noise_keys(at.salts, step.to(device)))
        return {
            key: stochastic_round(large[key].float().view(-1), noise, run.bf16_state.index(key)).view(large[key].shape)
            for key in bf16_state
        }


class _LazyState(defaultdict[Any, dict[str, Any]]):
    """An optimizer's ``state``, which comes when it is asked for."""

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


def _chunk_parameter(part: Chunk) -> nn.Parameter:
    flat = part.of(part.run.param)
    shape = (1,) * (part.run.param.dim() - 1) + (flat.numel(),)
    param = nn.Parameter(flat.view(shape))
    param.grad = part.of(part.run.grad).view(shape).to(param.dtype)
    return param
