"""Buffers that forward changes (running statistics, codebooks) are the same on all ranks, as under DDP: rank 0's are
sent to the others before the first forward after each optimizer step.

Protocol: ``before_forward()`` comes before each forward, in training and evaluation, on every rank; ``notice()``
between a forward and its backward; ``stepped()`` when an optimizer steps. The first time everything is sent, later the
buffers of those modules of which some rank has seen one change. Ranks must agree on which these are, or one would wait
for a broadcast that another leaves out: they compare in the first rounds, and again when the agreement at the end of a
backward has carried the word that somebody saw something new. So what changes outside of a forward for the first time,
some steps after the beginning, is sent one step late.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.compat.tensors import preserve_versions
from lightning_zero.compat.tensors import foreach_copy
from lightning_zero.config import EngineConfig
from lightning_zero.errors import RankMismatchError
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.sharding.layout import is_strided

__all__ = ["BufferBroadcast"]

ROUNDS = 3  # in which ranks compare what has changed, whatever they have noticed
PIECE_BYTES = 256 << 20  # sent at once
_ALIGN = 16  # bytes; the widest dtype's

_Seen = tuple[Tensor | None, int, int]


@dataclass(eq=False)
class _Buffer:
    """One buffer; ``home`` is its module's dictionary of buffers, since a module may put another tensor there."""

    name: str
    module: nn.Module
    key: str
    seen: _Seen = (None, 0, 0)
    checksum: int | None = None
    changes: bool = False  # since it was first sent, here

    @property
    def value(self) -> Tensor | None:
        value = self.module._buffers.get(self.key)
        return value if value is not None and _can_be_written(value) else None

    def look(self) -> _Seen:
        value = self.module._buffers.get(self.key)
        return (None, 0, 0) if value is None or value.is_inference() else (value, value._version, value.data_ptr())

    def has_changed(self) -> bool:
        value, *now = self.look()
        before, *then = self.seen
        return value is not before or now != then


class _Piece:
    """Buffers that travel in one tensor."""

    def __init__(self, buffers: Sequence[_Buffer], device: torch.device) -> None:
        values = [cast(Tensor, buffer.value) for buffer in buffers]
        ends = [0]
        for value in values:
            ends.append(ends[-1] + -(-_nbytes(value) // _ALIGN) * _ALIGN)
        self.device = device
        self.memory = torch.empty(ends[-1], dtype=torch.uint8, device=device)
        self.parts: dict[torch.dtype, list[tuple[_Buffer, Tensor]]] = {}
        for buffer, value, begin in zip(buffers, values, ends[:-1], strict=True):
            part = self.memory[begin : begin + _nbytes(value)].view(value.dtype).view(value.shape)
            self.parts.setdefault(value.dtype, []).append((buffer, part))

    def exchange(self, receive: bool) -> bool:
        """Copies between the buffers and the tensor; returns whether all still have the shape they were listed with.
        Others are left out."""
        complete = True
        for dtype, parts in self.parts.items():
            found = [(buffer.value, part) for buffer, part in parts]
            fits = [(v, p) for v, p in found if v is not None and v.shape == p.shape and v.dtype == dtype]
            mine, theirs = [v for v, _ in fits], [p for _, p in fits]
            complete = complete and len(fits) == len(parts)
            copy = _copy_each if any(v.is_conj() or v.is_neg() for v in mine) else foreach_copy
            if not receive:
                copy(theirs, mine)
            else:
                # As DDP: what autograd has saved is not thereby spoilt.
                with preserve_versions(tuple(mine)):
                    copy(mine, theirs)
        return complete


class BufferBroadcast:
    """One engine's.

    Args:
        executor: carries the word between ranks.
        mesh: its ranks compare on the control group, on which buffers on a CPU beside a GPU are sent, too.
        skip: types of modules that count for themselves on each rank: metrics.
    """

    def __init__(
        self,
        executor: Executor,
        mesh: Mesh,
        skip: tuple[type, ...] = (),
    ) -> None:
        self._root: nn.Module | None = None
        self._executor = executor
        self._mesh = mesh
        self._skip = skip
        self._enabled = True
        self._said = False
        self._buffers: list[_Buffer] = []
        self._watched: list[_Buffer] = []
        self._homes: list[dict[str, Tensor | None]] = []
        self._count = 0
        self._pieces: Iterable[_Piece] = []
        self.reset()

    def configure(self, config: EngineConfig) -> None:
        """Whether to, from now on."""
        self._enabled = config.broadcast_buffers

    def watch(self, root: nn.Module) -> None:
        """These buffers, except those that DDP is told to ignore (``_ddp_params_and_buffers_to_ignore``)."""
        self._root = root if self._mesh.world_size > 1 else None

    def reset(self) -> None:
        """All is sent again before the next forward."""
        self._due, self._round, self._misfit = True, 0, False
        self._buffers, self._watched, self._pieces = [], [], []
        self._say(False)
        self._executor.gradients.take_consensus_flag()

    def stepped(self) -> None:
        """An optimizer steps: as under DDP, accumulated micro-batches and the batches of an evaluation share what was
        sent before the first."""
        self._due = True

    @torch.inference_mode(False)  # or what is made here could not be written to in training
    @torch.no_grad()
    def before_forward(self) -> None:
        """Sends rank 0's buffers where that is due. Collective; does not wait for a GPU after the first rounds.

        Raises:
            RankMismatchError: ranks have other buffers.
        """
        if not self._due or not self._enabled or self._root is None:
            return
        self._due = False
        comparing = self._executor.gradients.take_consensus_flag() or self._round < ROUNDS
        if comparing:
            self._compare()
            if not self._buffers:
                self._round = ROUNDS  # on every rank: there is nothing to look at again
        fit = [self._send(piece) for piece in self._pieces]
        self._misfit = not all(fit)
        if comparing:
            # And no later: a change that nobody has been told of yet must go on showing.
            for buffer in self._watched:
                buffer.seen = buffer.look()
        if self._round < ROUNDS:
            self._pieces = self._pieces if self._round else []
            for buffer, number in self._checksums().items():
                buffer.checksum = number
        self._round += 1

    def notice(self) -> None:
        """Looks whether something has changed that is not sent; ranks hear of it when the next backward ends."""
        if self._enabled and self._round > 0:
            new = self._misfit or sum(map(len, self._homes)) != self._count
            self._say(new or any(buffer.has_changed() for buffer in self._watched))

    def _say(self, something_new: bool) -> None:
        if something_new != self._said:
            self._said = something_new
            self._executor.gradients.set_consensus_flag(something_new)

    def _send(self, piece: _Piece) -> bool:
        rank_0 = self._mesh.rank == 0
        fits = piece.exchange(receive=False) if rank_0 else True
        other = piece.device != self._mesh.device
        group = self._mesh.control_group if other else self._mesh.gather_group
        self._executor.collective(
            "rank 0's buffers",
            SequenceId.CONTROL if other else SequenceId.GATHER,
            lambda later: dist.broadcast(piece.memory, group=group, group_src=0, async_op=later),
        )
        return fits if rank_0 else piece.exchange(receive=True)

    def _compare(self) -> None:
        """Ranks agree on which modules' buffers are sent: at first all."""
        assert self._root is not None
        first = self._round == 0
        before = {(id(buffer.module), buffer.key): buffer for buffer in self._buffers}
        self._homes = [module._buffers for module in self._root.modules()]
        self._count = sum(map(len, self._homes))
        self._buffers = [before.get((id(b.module), b.key), b) for b in self._listed()]
        sums = self._checksums() if not first and self._round < ROUNDS else {}
        for buffer in self._buffers:
            edited = buffer in sums and buffer.checksum != sums[buffer]
            buffer.changes |= edited or buffer.has_changed() and not first
        listed = [f"{b.name} {_describe(b.value)}" for b in self._buffers]
        digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()
        mine = digest, {n for n, buffer in enumerate(self._buffers) if buffer.changes or first}
        with self._executor.waiting("the comparison of buffers", SequenceId.CONTROL):
            everyones = self._mesh.all_gather_values(mine)
        if any(other != digest for other, _ in everyones):
            self._refuse(listed)
        changing = {self._buffers[n].module for _, found in everyones for n in found}
        # Where ranks compute the same statistics together, how they begin is all that is sent.
        apart = [b for b in self._buffers if not _is_synchronised(b.module)]
        self._watched = [b for b in apart if first or b.module not in changing]
        pieces = self._packed([b for b in (self._buffers if first else apart) if b.module in changing])
        self._pieces = pieces if first else list(pieces)  # all there is, but one after the other

    def _refuse(self, mine: list[str]) -> None:
        everyones = self._mesh.all_gather_values(mine)
        other = next(rank for rank, listed in enumerate(everyones) if listed != everyones[0])
        pairs = list(zip([*everyones[0], "(nothing)"], [*everyones[other], "(nothing)"], strict=False))
        first = next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])
        raise RankMismatchError(
            "Ranks hold different buffers, so rank 0's cannot be sent to all before a forward. The first difference "
            f"between rank 0 and rank {other}: {first[0]!r} against {first[1]!r} (name, shape, dtype, device). "
            "Register the same buffers on every rank, or pass broadcast_buffers=False to the strategy."
        )

    def _listed(self) -> Iterator[_Buffer]:
        assert self._root is not None
        ignored = getattr(self._root, "_ddp_params_and_buffers_to_ignore", ())
        own = [name for name, module in self._root.named_modules() if isinstance(module, self._skip)]
        seen = set()
        for path, module in self._root.named_modules():
            if any(path == name or path.startswith(f"{name}.") for name in own):
                continue
            for key, value in module._buffers.items():
                name = f"{path}.{key}" if path else key
                if value is not None and id(value) not in seen and name not in ignored and _can_be_written(value):
                    seen.add(id(value))
                    yield _Buffer(name, module, key)

    def _packed(self, buffers: Sequence[_Buffer]) -> Iterator[_Piece]:
        by_device: dict[torch.device, list[_Buffer]] = {}
        for buffer in buffers:
            by_device.setdefault(cast(Tensor, buffer.value).device, []).append(buffer)
        for device, members in by_device.items():
            piece: list[_Buffer] = []
            size = 0
            for buffer in members:
                size += _nbytes(cast(Tensor, buffer.value))
                if piece and size > PIECE_BYTES:
                    yield _Piece(piece, device)
                    piece, size = [], _nbytes(cast(Tensor, buffer.value))
                piece.append(buffer)
            yield _Piece(piece, device)

    def _checksums(self) -> dict[_Buffer, int]:
        """Of what is in the buffers: ``buffer.data.copy_(x)`` leaves no other trace."""
        found: dict[torch.device, list[tuple[_Buffer, Tensor]]] = {}
        for buffer in self._buffers:
            value = buffer.value
            if value is not None:
                found.setdefault(value.device, []).append((buffer, _checksum(value)))
        return {
            buffer: number
            for sums in found.values()
            for (buffer, _), number in zip(sums, torch.stack([s for _, s in sums]).tolist(), strict=True)
        }


def _is_synchronised(module: nn.Module) -> bool:
    return isinstance(module, nn.SyncBatchNorm) and module.process_group is None


def _can_be_written(value: Tensor) -> bool:
    if not is_strided(value) or value.is_meta:
        return False
    shared = any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))
    return not shared and value.numel() > 0 and not value.is_inference()


def _copy_each(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """For conjugated and negated ones, which are not copied together."""
    for target, value in zip(into, values, strict=True):
        target.copy_(value)


def _describe(value: Tensor | None) -> str:
    return "(gone)" if value is None else f"{tuple(value.shape)} {value.dtype} {value.device.type}"


def _nbytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _checksum(value: Tensor) -> Tensor:
    bits = value.detach().resolve_conj().resolve_neg().reshape(-1).view(_BITS.get(value.element_size(), torch.int64))
    if bits.numel() > 2**22:
        return bits.sum()
    # Weighted, so that elements that change places show.
    return (bits * torch.arange(1, bits.numel() + 1, device=value.device)).sum()
