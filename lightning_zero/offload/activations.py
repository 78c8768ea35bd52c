"""Activations that lie in the host's memory between forward and backward.

Compiled graphs call four steps, by ops that ``compile/passes/activation_offload.py`` puts into them:

    ``leave``   a copy to the host starts, behind whatever compute was given before
    ``left``    compute waits for it: from here on the device's memory may be used for something else
    ``come``    in backward, a copy back starts, likewise behind what compute was given
    ``came``    compute waits for it: it may be read, and the host's memory used for something else

Every copy is waited for by compute, on the side where it was started, before either of its ends can be let go of: a
graph holds both tensors up to that step. So all other orders follow, without an event that outlives a graph, and a CUDA
graph may hold all of it: a copy in comes behind the copy out of the same value, and a copy into memory of the host
behind the copies that had it before, since each begins behind compute, which waited for those.

Memory of the host is pinned once and used from step to step, see ``blocks.py``. Where no backward comes, it is free
when nobody holds the graph of the forward any more, as all that is saved for backward is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lightning_zero.offload.amount import OffloadQuota
from lightning_zero.offload.blocks import ReservedBlocks, HostBlocks
from lightning_zero.offload.copy_streams import Event, CopyStreams, copy_streams_of
from lightning_zero.sharding.tensor_extent import extent

__all__ = ["HostActivations"]

UnderWay = tuple[Event, Tensor, Tensor]  # a copy, and both of its ends, which live until it is waited for


class HostActivations:
    """Of one engine.

    Args:
        device: where compute is.
        blocks: of the host's memory.
        lanes: for copies; by default the device's, made with the first copy.

    Attributes:
        amount: counts what leaves.
    """

    def __init__(self, device: torch.device, blocks: HostBlocks | None = None, lanes: CopyStreams | None = None) -> None:
        self._device = device
        self._lanes = lanes
        self.amount = OffloadQuota()
        self.blocks = blocks or HostBlocks(device)
        # By where the end lies that a graph lets go of first: on the device, on the host.
        self._leaving: dict[int, UnderWay] = {}
        self._coming: dict[int, UnderWay] = {}

    @property
    def nbytes(self) -> int:
        """Of memory of the host, in use or free for the next step."""
        return self.blocks.nbytes

    @property
    def lanes(self) -> CopyStreams:
        if self._lanes is None:
            self._lanes = copy_streams_of(self._device)
        return self._lanes

    def leave(self, value: Tensor) -> Tensor:
        """Of the same sizes, strides and dtype."""
        flat = _flat(value)
        taken = self.blocks.take(flat.nbytes).view(value.dtype)
        host = taken.as_strided(value.size(), value.stride())
        if flat.numel():
            event = self.lanes.take([(taken, flat)], [self.lanes.now()])
            self.amount.send(flat.nbytes)
            self._leaving[host.data_ptr()] = event, value, host
        return host

    def left(self, value: Tensor, host: Tensor) -> None:
        if value.numel():
            event, mine, _ = _ended(self._leaving, host)
            self.lanes.wait(event)
            if mine.data_ptr() != value.data_ptr():
                raise RuntimeError(_OTHER)

    def come(self, host: Tensor) -> Tensor:
        value = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self._device)
        if value.numel():
            event = self.lanes.bring([(_flat(value), _flat(host))], [self.lanes.now()])
            self._coming[value.data_ptr()] = event, value, host
        return value

    def came(self, value: Tensor, host: Tensor) -> None:
        if value.numel():
            event, _, mine = _ended(self._coming, value)
            self.lanes.wait(event)
            if mine.data_ptr() != host.data_ptr():
                raise RuntimeError(_OTHER)

    def settle(self) -> None:
        """What an exception has left half done: compute waits for it, and then it is let go of. Nothing happens
        otherwise."""
        for under_way in (self._leaving, self._coming):
            while under_way:
                event, _, _ = under_way.popitem()[1]
                self.lanes.wait(event)

    def reset(self) -> None:
        """The same, and memory that nobody uses is the host's again."""
        self.settle()
        self.blocks.give_back()

    @contextmanager
    def holding(self, held: ReservedBlocks) -> Iterator[None]:
        """Surrounds a forward that is captured: see :class:`ReservedBlocks`."""
        with self.blocks.holding(held):
            yield

    @contextmanager
    def recording(self, sent: list[int]) -> Iterator[None]:
        """Surrounds one that does not run: what leaves is not counted, but noted, for each replay to count."""
        before = replace(self.amount)
        yield
        sent.append(self.amount.sent - before.sent)
        self.amount.sent, self.amount.beyond = before.sent, before.beyond


_OTHER = (
    "lightning_zero: a graph waits for the copy of an activation with another tensor than it was started with: the "
    "compiler has made a copy in between. Please report this. Until then, leave 'activations' out of offload=."
)


def _ended(under_way: dict[int, UnderWay], tensor: Tensor) -> UnderWay:
    found = under_way.pop(tensor.data_ptr(), None)
    if found is None:
        raise RuntimeError(_OTHER)
    return found


def _flat(tensor: Tensor) -> Tensor:
    """All memory from its first to its last element, which is itself where there are no gaps."""
    return tensor.as_strided((extent(tensor.size(), tensor.stride()),), (1,))
