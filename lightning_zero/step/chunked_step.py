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

from lightning_zero.offload.staging_ring import Load, Pass
from lightning_zero.optim.bf16_state import ROUNDINGS
from lightning_zero.optim.chunks import MASTER, MOMENTS, InPlace, StateOnHost, Stretch, itemsizes_of, stretches
from lightning_zero.optim.flat_runs import Segment
from lightning_zero.optim.rounding import Places, keys_of, noise_at, rounded
from lightning_zero.optim.rules import rule_for
from lightning_zero.step.layout import StepLayout
from lightning_zero.step.layouts import StepLayouts
from lightning_zero.step.substitute import Own, Shown

__all__ = ["StretchesRunner"]


class StretchesRunner:
    """Shows the optimizer the stretches of a layout's segments.

    Args:
        optimizer: whose update rule is known; others might look at a parameter again when its turn is over.
        layouts: of the optimizer.
        host: where its state lies; None: on the device.
    """

    clips = skips = False

    def __init__(self, optimizer: torch.optim.Optimizer, layouts: StepLayouts, host: StateOnHost | None) -> None:
        self._optimizer = optimizer
        self._layouts = layouts
        self._host = host
        self._turns = _Turns([], host)

    def takes(self, layout: StepLayout, own: Own) -> bool:
        return True

    def begin(self, layout: StepLayout, own: Own, max_norm: float | None, skip: Tensor | None) -> Shown:
        assert skip is None, "only what replays can skip"
        layout.before_own_step(own.state, max_norm)
        parts = [part for segment in layout.segments for part in self._cut(segment, own)]
        self._turns = _Turns(parts, self._host)
        origins = [part.segment.group for part in parts]
        groups = [own.groups[n] | {"params": [param]} for n, param in zip(origins, self._turns.params, strict=True)]
        return Shown(groups, _Asked(self._turns), origins)

    def _cut(self, segment: Segment, own: Own) -> list[Stretch]:
        itemsizes = [segment.state[name].itemsize for name in segment.elementwise]
        rule = rule_for(self._optimizer, own.groups[segment.group])
        if not itemsizes and rule is not None:  # they are still to be made
            itemsizes = [max(segment.param.itemsize, torch.float32.itemsize)] * len(rule.state)
        itemsizes = itemsizes_of(segment, itemsizes)
        numel = self._host.ring.elements(itemsizes) if self._host and itemsizes else segment.param.numel()
        return stretches(segment, min(numel, MOMENTS) if segment.narrow else numel)

    def end(self, layout: StepLayout, own: Own) -> None:
        self._turns.end()
        layout.after_own_step(own.state)
        self._layouts.note(own.state)


class _Turns:
    """Stretches, of which one at a time has its state on the device.

    Attributes:
        params: of each, the elements as a parameter, with their gradient.
    """

    def __init__(self, parts: Sequence[Stretch], host: StateOnHost | None) -> None:
        self.params = [_parameter(part) for part in parts]
        self._parts = parts
        self._host = host
        self._numbers = {id(param): number for number, param in enumerate(self.params)}
        self._names = {id(part.segment): part.segment.elementwise for part in parts}  # of what there was before
        self._after: dict[int, tuple[Segment, dict[str, Any]]] = {}  # the state that the last stretch of each had
        self._copied: set[int] = set()  # numbers of stretches whose compute copies were written
        self._places: dict[int, Places] = {}  # of the segments with narrow state, by their ids
        self._through: Pass | InPlace | None = None
        self._first = 0  # stretch of that pass
        self._now: int | None = None
        self._state: dict[str, Any] = {}  # of that stretch

    def come(self, param: Any) -> dict[str, Any] | None:
        """The state of this parameter, on the device until that of another one comes; None: it is not one of ours."""
        number = self._numbers.get(id(param))
        if number is None or number == self._now:
            return None if number is None else self._state
        follows = self._through is not None and self._now is not None and number == self._now + 1
        self._leave()
        if not follows:
            self._begin_at(number)
        self._state = self._open(number)
        self._now = number
        return self._state

    def replace(self, param: Any, state: dict[str, Any]) -> None:
        """The optimizer has put this in the place of what :meth:`come` gave."""
        self.come(param)
        self._state = state

    def end(self) -> None:
        """All that has come leaves; segments have the state that the optimizer keeps."""
        self._leave()
        self._all_leaves()
        for part in self._parts:
            part.segment.copied = part.segment.copy is not None
        for number, part in enumerate(self._parts):
            part.segment.copied = part.segment.copied and number in self._copied
        for segment, state in self._after.values():
            kept = {}
            for key, value in state.items():
                kept[key] = segment.state[key] if key in segment.elementwise else value
                if key in segment.counts:
                    kept[key] = segment.state[key].copy_(value)
            segment.state = kept

    def _begin_at(self, number: int) -> None:
        self._all_leaves()
        self._first = number
        loads = [part.load(self._names[id(part.segment)]) for part in self._parts[number:]]
        self._through = Pass(self._host.ring, loads) if self._host else InPlace(loads)
        self._through.ahead()

    def _all_leaves(self) -> None:
        if self._through is not None:
            self._through.leave()
            self._through.rejoin()  # master shards may be read from here on, as tensors of the device

    def _open(self, number: int) -> dict[str, Any]:
        assert self._through is not None
        here = self._through.open(number - self._first)
        segment, found = self._parts[number].segment, {}
        if MASTER in here:
            self.params[number].data = here.pop(MASTER).view(self.params[number].shape)
        for key, value in segment.state.items():
            if key in here:
                wide = here[key].to(segment.param.dtype) if key in segment.narrow else here[key]
                found[key] = wide.view(self.params[number].shape)
            elif key not in segment.elementwise:  # which the stretch before has made, and this one has not
                # Each stretch counts the step for itself.
                found[key] = value.clone() if isinstance(value, Tensor) else value
        return found

    def _leave(self) -> None:
        number, self._now = self._now, None
        if number is None or self._through is None:
            return
        part, state, shape = self._parts[number], self._state, self.params[number].shape
        segment = part.segment
        large = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.numel() > 1}
        for key, value in large.items():
            segment.check(key, value, shape)
            if key not in segment.state:
                memory = segment.empty(segment.kept_in(key, value), self._host.memory if self._host else None)
                segment.state[key] = memory.view(segment.param.shape)
        if segment.on_host is not None:
            self._write_copy(number)
        self._through.close(number - self._first, part.load(list(large)), large | self._rounded(part, large))
        if state:
            self._after[id(segment)] = segment, state

    def _write_copy(self, number: int) -> None:
        """Of the master shards that were stepped in a buffer."""
        part, param = self._parts[number], self.params[number]
        if part.segment.copy is not None:
            part.of(part.segment.copy).copy_(param.data.view(-1))
            self._copied.add(number)
        param.data = part.of(part.segment.param).view(param.shape)

    def _rounded(self, part: Stretch, large: Load) -> dict[str, Tensor]:
        """The narrow state of a stretch, as it is kept."""
        segment, device = part.segment, part.segment.param.device
        narrow = [key for key in segment.narrow if key in large and large[key].is_floating_point()]
        if not narrow:
            return {}
        step = self._state.get("step")
        if not isinstance(step, Tensor):
            step = self._state[ROUNDINGS] = self._state.get(ROUNDINGS, torch.zeros(())) + 1
        if id(segment) not in self._places:
            self._places[id(segment)] = Places.of(segment.members, device)
        at = self._places[id(segment)].part(part.begin, part.end)
        noise = noise_at(at.owners, at.shifts, at.begin, keys_of(at.salts, step.to(device)))
        return {
            key: rounded(large[key].float().view(-1), noise, segment.narrow.index(key)).view(large[key].shape)
            for key in narrow
        }


class _Asked(defaultdict[Any, dict[str, Any]]):
    """An optimizer's ``state``, which comes when it is asked for."""

    def __init__(self, turns: _Turns) -> None:
        super().__init__(dict)
        self._turns = turns

    def __getitem__(self, param: Any) -> dict[str, Any]:
        state = self._turns.come(param)
        return super().__getitem__(param) if state is None else state

    def __setitem__(self, param: Any, state: dict[str, Any]) -> None:
        self._turns.replace(param, state)

    def __contains__(self, param: Any) -> bool:
        return bool(self._turns.come(param))

    def get(self, param: Any, default: Any = None) -> Any:
        return self._turns.come(param) or default


def _parameter(part: Stretch) -> nn.Parameter:
    flat = part.of(part.segment.param)
    shape = (1,) * (part.segment.param.dim() - 1) + (flat.numel(),)
    param = nn.Parameter(flat.view(shape))
    param.grad = part.of(part.segment.grad).view(shape).to(param.dtype)
    return param
