"""Broadcast rank 0's buffers that forward changes (running statistics, codebooks), as DDP does.

``before_forward()`` runs before each forward, in training and evaluation, and sends what is due; ``notice()`` runs
between forward and backward; ``stepped()`` when an optimizer steps. The first round sends all buffers, later rounds
those of modules in which some rank has seen a change.

Ranks must agree on the buffers, or a broadcast would hang. They compare in the first rounds, and after a backward's
consensus has reported a new change. So a buffer that first changes outside of forward is sent one step late. DDP's
``_broadcast_coalesced`` is not used, because it sends all buffers in each forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.compat.tensors import foreach_copy, preserve_versions
from lightning_zero.config import EngineConfig
from lightning_zero.errors import RankMismatchError
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.sharding.layout import is_strided

COMPARED_ROUNDS = 3  # first rounds, in which ranks always compare their changed buffers
BUCKET_BYTES = 256 << 20  # of one broadcast; bounds its temporary memory
_ALIGN = 16  # bytes, of the widest dtype

_Snapshot = tuple[Tensor | None, int, int]


@dataclass(eq=False)
class _Buffer:
    """Hold one buffer, with its module, which may replace the tensor."""

    name: str
    module: nn.Module
    key: str
    last_seen: _Snapshot = (None, 0, 0)
    checksum: int | None = None
    changes: bool = False  # on this rank, since it was first sent

    @property
    def value(self) -> Tensor | None:
        value = self.module._buffers.get(self.key)
        return value if value is not None and _can_be_written(value) else None

    def snapshot(self) -> _Snapshot:
        value = self.module._buffers.get(self.key)
        return (None, 0, 0) if value is None or value.is_inference() else (value, value._version, value.data_ptr())

    def has_changed(self) -> bool:
        value, *now = self.snapshot()
        before, *then = self.last_seen
        return value is not before or now != then


class _BufferBucket:
    """Hold buffers that are broadcast in one tensor."""

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
        """Copy between the buffers and the tensor.

        Return False if a buffer has changed its shape. Such a buffer is skipped.
        """
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
                # Keep version counters, as DDP does: autograd may have saved the buffers.
                with preserve_versions(tuple(mine)):
                    copy(mine, theirs)
        return complete


class BufferBroadcast:
    """Broadcast the buffers of one engine, except those of modules of the types ``skip``, such as metrics.

    The executor reports new changes to other ranks. Ranks compare over the control group, which also sends CPU buffers.
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
        self._reported = False
        self._buffers: list[_Buffer] = []
        self._watched: list[_Buffer] = []
        self._buffer_dicts: list[dict[str, Tensor | None]] = []
        self._count = 0
        self._buckets: Iterable[_BufferBucket] = []
        self.reset()

    def configure(self, config: EngineConfig) -> None:
        """Enable or disable broadcasts."""
        self._enabled = config.broadcast_buffers

    def watch(self, root: nn.Module) -> None:
        """Set the module. Buffers in ``_ddp_params_and_buffers_to_ignore`` are left out."""
        self._root = root if self._mesh.world_size > 1 else None

    def reset(self) -> None:
        """Send all buffers again before the next forward."""
        self._is_due, self._round, self._has_mismatch = True, 0, False
        self._buffers, self._watched, self._buckets = [], [], []
        self._report(False)
        self._executor.gradients.take_consensus_flag()

    def stepped(self) -> None:
        """Make a broadcast due.

        As in DDP, micro-batches and evaluation batches share the buffers that were sent before the first one.
        """
        self._is_due = True

    @torch.inference_mode(False)  # tensors made here must be writable in training
    @torch.no_grad()
    def before_forward(self) -> None:
        """Send rank 0's buffers if that is due. Collective; does not wait for the GPU after the first rounds."""
        if not self._is_due or not self._enabled or self._root is None:
            return
        self._is_due = False
        comparing = self._executor.gradients.take_consensus_flag() or self._round < COMPARED_ROUNDS
        if comparing:
            self._compare()
            if not self._buffers:
                self._round = COMPARED_ROUNDS  # on every rank: there are no buffers to compare
        fit = [self._send(bucket) for bucket in self._buckets]
        self._has_mismatch = not all(fit)
        if comparing:
            # Only after a comparison: a change that was not reported yet must stay visible.
            for buffer in self._watched:
                buffer.last_seen = buffer.snapshot()
        if self._round < COMPARED_ROUNDS:
            self._buckets = self._buckets if self._round else []
            for buffer, number in self._checksums().items():
                buffer.checksum = number
        self._round += 1

    def notice(self) -> None:
        """Check for changes of buffers that are not sent; ranks learn of them when the next backward ends."""
        if self._enabled and self._round > 0:
            new = self._has_mismatch or sum(map(len, self._buffer_dicts)) != self._count
            self._report(new or any(buffer.has_changed() for buffer in self._watched))

    def _report(self, something_new: bool) -> None:
        if something_new != self._reported:
            self._reported = something_new
            self._executor.gradients.set_consensus_flag(something_new)

    def _send(self, bucket: _BufferBucket) -> bool:
        rank_0 = self._mesh.rank == 0
        fits = bucket.exchange(receive=False) if rank_0 else True
        other = bucket.device != self._mesh.device
        group = self._mesh.control_group if other else self._mesh.gather_group
        self._executor.collective(
            "rank 0's buffers",
            SequenceId.CONTROL if other else SequenceId.GATHER,
            lambda later: dist.broadcast(bucket.memory, group=group, group_src=0, async_op=later),
        )
        return fits if rank_0 else bucket.exchange(receive=True)

    def _compare(self) -> None:
        """Agree with all ranks on the modules whose buffers are sent: all of them in the first round."""
        assert self._root is not None
        first = self._round == 0
        before = {(id(buffer.module), buffer.key): buffer for buffer in self._buffers}
        self._buffer_dicts = [module._buffers for module in self._root.modules()]
        self._count = sum(map(len, self._buffer_dicts))
        self._buffers = [before.get((id(b.module), b.key), b) for b in self._list_buffers()]
        sums = self._checksums() if not first and self._round < COMPARED_ROUNDS else {}
        for buffer in self._buffers:
            edited = buffer in sums and buffer.checksum != sums[buffer]
            buffer.changes |= edited or buffer.has_changed() and not first
        listed = [f"{b.name} {_describe(b.value)}" for b in self._buffers]
        digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()
        mine = digest, {n for n, buffer in enumerate(self._buffers) if buffer.changes or first}
        with self._executor.waiting("the comparison of buffers", SequenceId.CONTROL):
            everyones = self._mesh.all_gather_values(mine)
        if any(other != digest for other, _ in everyones):
            self._raise_mismatch(listed)
        changing = {self._buffers[n].module for _, found in everyones for n in found}
        # SyncBatchNorm computes the same statistics on all ranks, so only initial values are sent.
        apart = [b for b in self._buffers if not _is_synchronised(b.module)]
        self._watched = [b for b in apart if first or b.module not in changing]
        buckets = self._make_buckets([b for b in (self._buffers if first else apart) if b.module in changing])
        self._buckets = (
            buckets if first else list(buckets)
        )  # the first round sends all buffers, so its buckets are created one by one

    def _raise_mismatch(self, mine: list[str]) -> None:
        everyones = self._mesh.all_gather_values(mine)
        other = next(rank for rank, listed in enumerate(everyones) if listed != everyones[0])
        pairs = list(zip([*everyones[0], "(nothing)"], [*everyones[other], "(nothing)"], strict=False))
        first = next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])
        raise RankMismatchError(
            "Ranks hold different buffers, so rank 0's cannot be sent to all before a forward. The first difference "
            f"between rank 0 and rank {other}: {first[0]!r} against {first[1]!r} (name, shape, dtype, device). "
            "Register the same buffers on every rank, or pass broadcast_buffers=False to the strategy."
        )

    def _list_buffers(self) -> Iterator[_Buffer]:
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

    def _make_buckets(self, buffers: Sequence[_Buffer]) -> Iterator[_BufferBucket]:
        by_device: dict[torch.device, list[_Buffer]] = {}
        for buffer in buffers:
            by_device.setdefault(cast(Tensor, buffer.value).device, []).append(buffer)
        for device, members in by_device.items():
            bucket: list[_Buffer] = []
            size = 0
            for buffer in members:
                size += _nbytes(cast(Tensor, buffer.value))
                if bucket and size > BUCKET_BYTES:
                    yield _BufferBucket(bucket, device)
                    bucket, size = [], _nbytes(cast(Tensor, buffer.value))
                bucket.append(buffer)
            yield _BufferBucket(bucket, device)

    def _checksums(self) -> dict[_Buffer, int]:
        """Return checksums of the values: ``buffer.data.copy_(x)`` changes no version counter."""
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
    # Weighted, so that exchanged elements change the sum.
    return (bits * torch.arange(1, bits.numel() + 1, device=value.device)).sum()
