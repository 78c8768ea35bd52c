"""An optimizer's view of the arenas: neighbouring shards of a parameter group, stepped as one flat tensor.

An optimizer that treats elements one by one does the same to a run of neighbouring shards as to each of them, with one
kernel in place of many. Its own parameters, groups and state keep their identity and shapes: every state tensor of a
parameter is a view of its segment's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.errors import UnsupportedError
from lightning_zero.offload.pinned_memory import HostMemory
from lightning_zero.optim.bf16_state import ROUNDING_COUNT, STATE_DTYPE
from lightning_zero.optim.support import INSTEAD, large_tensors
from lightning_zero.sharding.param_record import Role, ShardedParameter

__all__ = ["FlatRun", "State", "make_flat_runs"]

State = defaultdict[Any, dict[str, Any]]


@dataclass
class FlatRun:
    """Shards that are stepped as one.

    Attributes:
        group: number of the parameter group.
        members: the parameters, in the order of memory.
        param: all of them, flat, with as many dimensions as each of them has, or 1-D if those differ; ``.grad`` is set,
            unless that is in another dtype.
        grad: their gradients, in the same shape.
        counts: by name, the members' 0-dim state tensors (such as step counts), as one 1-D tensor.
        state: the optimizer's state for ``param``.
        narrow: names of the state that is kept in bfloat16, in the rule's order.
        on_host: of ``param``, where that lies in the host's memory: as the host sees it.
        copy: compute copies of such members, which are written with them; None where there are none.
        copied: whether the last step has written all of ``copy``.
    """

    group: int
    members: list[ShardedParameter]
    param: nn.Parameter
    grad: Tensor
    counts: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    bf16_state: tuple[str, ...] = ()
    on_host: Tensor | None = None
    copy: Tensor | None = None
    copied: bool = False
    _shown: dict[str, Any] = field(default_factory=dict)

    @property
    def over_copies(self) -> bool:
        """Whether gradients lie over compute copies, in another dtype than ``param``."""
        return self.grad.dtype != self.param.dtype

    def set_param_grad(self) -> None:
        """``param.grad`` is as an optimizer wants it: in the dtype of ``param``, and for that copied if need be."""
        self.param.grad = self.grad.to(self.param.dtype)

    def drop_aliased_gradient(self) -> None:
        """A step has used it: where it lies over copies, it is nobody's any more."""
        if self.over_copies:
            self.param.grad = None
            for record in self.members:
                record.param.grad = None

    @property
    def elementwise(self) -> list[str]:
        """Names of the state with one element for each of the members'."""
        return [name for name, value in self.state.items() if isinstance(value, Tensor) and not self._is_count(value)]

    def join_state(self, state: State, host: HostMemory | None = None) -> bool:
        """Joins the members' state into this segment's; what is not in one piece of memory yet is moved there, and the
        members' state becomes views of it. What has one element for each of the members' lies on their device, or, if
        that is given, on the host, and what is narrow is rounded to that. Returns whether anything was moved."""
        own = [state[record.param] for record in self.members if record.param in state]
        if len(own) != len(self.members):
            return False
        moved = False
        for key in own[0]:
            values = [_rank_part(record, entries[key]) for record, entries in zip(self.members, own, strict=True)]
            first = values[0]
            if not isinstance(first, Tensor):
                self.state[key] = first
                continue
            if key == ROUNDING_COUNT:  # torch makes what it loads as wide as parameters, and bfloat16 counts to 256
                values = [value.float() for value in values]
            joined = _contiguous_view(values)
            if self._is_count(first):
                counts = torch.stack([value.reshape(()) for value in values]) if joined is None else joined
                self.counts[key], self.state[key] = counts, counts[0]
            else:
                self.check(key, first, self.members[0].layout.visible_shape)
                dtype = self.stored_dtype(key, first)
                if joined is not None and not (self._is_in_place(joined, host) and joined.dtype is dtype):
                    joined = None
                flat = self._concatenate(values, dtype, host) if joined is None else joined
                self.state[key] = flat.view(self.param.shape)
            moved = moved or joined is None
            del values
            self._show(key, state)  # one by one, so that no more than one of them exists twice
        return moved

    def move_counts(self, device: torch.device) -> bool:
        """Counts are on this device from now on; :meth:`export_state` shows them. Returns whether they were not before."""
        away = {key: counts for key, counts in self.counts.items() if counts.device != device}
        for key, counts in away.items():
            self.counts[key] = counts.to(device)
            self.state[key] = self.counts[key][0]
        return bool(away)

    def read_non_tensor_state(self, state: State) -> None:
        """What is no tensor, the optimizer may have changed in the members' state since."""
        own = state.get(self.members[0].param, {})
        self.state.update({k: own[k] for k, v in self.state.items() if not isinstance(v, Tensor) and k in own})

    def export_state(self, state: State) -> None:
        """Shows what the optimizer keeps for this segment as the members' state, as far as it is something else than
        last time."""
        for key, value in self.state.items():
            if key in self._shown and self._shown[key] is value:
                continue
            if isinstance(value, Tensor) and self._is_count(value):
                counts = self.counts.get(key)
                if counts is None or counts.data_ptr() != value.data_ptr():
                    self.counts[key] = counts = value.detach().reshape(1).repeat(len(self.members))
                    self.state[key] = counts[0]
            self._show(key, state)

    def _show(self, key: str, state: State) -> None:
        value = self._shown[key] = self.state[key]
        begin = 0
        for position, record in enumerate(self.members):
            end = begin + record.layout.shard_numel
            if key in self.counts:
                state[record.param][key] = self.counts[key][position]
            elif isinstance(value, Tensor):
                self.check(key, value, self.param.shape)
                part = value.view(-1)[begin:end].view(record.layout.visible_shape)
                state[record.param][key] = record.spec.wrap(part)  # users who read it see the full value's norm
            else:
                self._check_number(key, value)
                state[record.param][key] = value
            begin = end

    def _check_number(self, key: str, value: Any) -> None:
        if large := large_tensors(value):
            raise UnsupportedError(
                f"The optimizer keeps a state {key!r} for {self.members[0].name!r} that is a {type(value).__name__} "
                f"with a tensor of shape {tuple(large[0].shape)}. Only tensors themselves can be divided among the "
                f"parameters that are stepped together. {INSTEAD}"
            )

    def broadcast_counts(self) -> None:
        """The optimizer has changed the first member's counts; the others' follow."""
        for counts in self.counts.values():
            if counts.numel() > 1:
                counts[1:] = counts[0]

    def _is_in_place(self, value: Tensor, host: HostMemory | None) -> bool:
        return value.device == self.param.device if host is None else host.holds(value)

    def stored_dtype(self, key: str, value: Tensor) -> torch.dtype:
        """The dtype in which this state, with one element for each of the members', is kept."""
        return STATE_DTYPE if key in self.bf16_state and value.is_floating_point() else value.dtype

    def empty(self, dtype: torch.dtype, host: HostMemory | None) -> Tensor:
        """New memory for such state, 1-D."""
        numel = self.param.numel()
        return torch.empty(numel, dtype=dtype, device=self.param.device) if host is None else host.empty(numel, dtype)

    def _concatenate(self, values: Sequence[Tensor], dtype: torch.dtype, host: HostMemory | None) -> Tensor:
        """In new memory, one behind the other."""
        flat = self.empty(dtype, host)
        for piece, value in zip(flat.split([value.numel() for value in values]), values, strict=True):
            piece.copy_(value.detach().reshape(-1))
        return flat

    def _is_count(self, value: Tensor) -> bool:
        return value.numel() == 1  # a shard has more elements: see ShardLayout

    def check(self, key: str, value: Tensor, shape: torch.Size) -> None:
        """Raise :class:`UnsupportedError` if the state of members, seen in this shape, has another one, or is no plain
        tensor, such as a quantized one."""
        if type(value) not in (Tensor, nn.Parameter) and "_zero_spec" not in value.__dict__:
            raise UnsupportedError(
                f"The optimizer keeps a state {key!r} for {self.members[0].name!r} that is a {type(value).__name__}, "
                f"which cannot be divided among the parameters that are stepped together. {INSTEAD}"
            )
        if value.shape != shape:
            raise UnsupportedError(
                f"The optimizer keeps a state {key!r} of shape {tuple(value.shape)} for {self.members[0].name!r}, "
                f"whose shard it sees as {tuple(shape)}: it does not treat elements one by one, and each rank holds "
                "only a flat piece of every parameter. Use an optimizer that does, such as AdamW, SGD or Lion."
            )


def make_flat_runs(
    groups: Sequence[Sequence[ShardedParameter]],
    kinds: Mapping[int, int],
    mix_dimensions: bool,
    bf16_state: Mapping[int, tuple[str, ...]] | None = None,
    one_per_parameter: bool = False,
) -> list[FlatRun]:
    """Segments of the parameters in ``groups``, all of which have a gradient.

    Args:
        groups: by parameter group.
        kinds: by index, a number for parameters with the same history; only those are joined.
        mix_dimensions: join parameters with different numbers of dimensions.
        narrow: by index, the names of the state that is kept in bfloat16.
        apart: make a segment of each parameter.
    """
    names = bf16_state or {}
    runs: list[FlatRun] = []
    for number, records in enumerate(groups):
        members: list[ShardedParameter] = []
        for record in sorted(records, key=lambda record: record.shard.data_ptr()):
            alike = members and names.get(members[-1].index) == names.get(record.index)
            if members and (one_per_parameter or not alike or not _joins(members[-1], record, kinds, mix_dimensions)):
                runs.append(_make_run(number, members, names))
                members = []
            members.append(record)
        if members:
            runs.append(_make_run(number, members, names))
    return runs


def _joins(last: ShardedParameter, record: ShardedParameter, kinds: Mapping[int, int], mix_dimensions: bool) -> bool:
    before, after = last.param.grad, record.param.grad
    assert before is not None
    assert after is not None
    return (
        _adjacent(last.shard, record.shard)
        and _adjacent(before, after)
        and kinds.get(last.index) == kinds.get(record.index)
        and (mix_dimensions or last.param.dim() == record.param.dim())
    )


def _adjacent(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.data_ptr() + a.nbytes == b.data_ptr()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )


def _rank_part(record: ShardedParameter, value: Any) -> Any:
    """Return this rank's part of a full value that a user has put into the state; anything else as it is."""
    if isinstance(value, Tensor) and value.numel() > 1 and value.shape != record.layout.visible_shape:
        return record.local_part(value) if value.shape == record.layout.shape else value
    return value


def _contiguous_view(pieces: Sequence[Tensor]) -> Tensor | None:
    """One 1-D view of pieces that lie one behind the other; None if they do not."""
    first = pieces[0]
    if not all(p.is_contiguous() for p in pieces) or not all(map(_adjacent, pieces, pieces[1:])):
        return None
    return first.detach().as_strided((sum(p.numel() for p in pieces),), (1,), first.storage_offset())


def _make_run(group: int, members: list[ShardedParameter], bf16_state: Mapping[int, tuple[str, ...]]) -> FlatRun:
    flat = _contiguous_view([record.shard for record in members])
    grad = _contiguous_view([record.param.grad for record in members if record.param.grad is not None])
    assert flat is not None
    assert grad is not None
    dims = {record.param.dim() for record in members}
    shape = (1,) * (dims.pop() - 1) + (flat.numel(),) if len(dims) == 1 else (flat.numel(),)
    param = nn.Parameter(flat.view(shape))
    found = FlatRun(group, members, param, grad.view(shape), bf16_state=bf16_state.get(members[0].index, ()))
    if not found.over_copies:
        found.set_param_grad()
    on_host = [record.on_host for record in members if record.on_host is not None]
    if len(on_host) == len(members):
        found.on_host = _contiguous_view(on_host)
        assert found.on_host is not None
        copies = [record.memory[Role.COMPUTE_SHARD] for record in members if Role.COMPUTE_SHARD in record.memory]
        found.copy = _contiguous_view(copies) if len(copies) == len(members) else None
    return found
