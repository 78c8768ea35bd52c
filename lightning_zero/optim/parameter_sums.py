"""Add up terms of sharded parameters over elements, rows or columns, and expand the results."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_zero.optim.flat_runs import Chunk, FlatRun
from lightning_zero.optim.matrix_rules import Tensors
from lightning_zero.optim.reduction_rules import COLUMNS, ROWS, ReductionRule, column_shape, row_shape
from lightning_zero.sharding.layout import ShardLayout


@dataclass(frozen=True)
class ParameterPart:
    """A range of a flattened parameter, followed by padding.

    Attributes:
        shape: The full parameter's shape.
        begin, end: The range of its elements.
        numel: Number of elements with padding.
    """

    shape: torch.Size
    begin: int
    end: int
    numel: int

    @classmethod
    def from_layout(cls, layout: ShardLayout, shard: int, begin: int, end: int) -> ParameterPart:
        """Return the part at elements ``begin`` to ``end`` of a shard."""
        first, last = layout.shard_range(shard)
        # A permuted weight has its elements in another order, which matters only for rows and columns.
        return cls(layout.shape, min(first + begin, last), min(first + end, last), end - begin)

    @property
    def _columns(self) -> int:
        return self.shape[-1]

    @property
    def _rows(self) -> tuple[int, int]:
        """The rows of all matrices that the part touches, as a half-open range."""
        if self.begin == self.end:
            return 0, 0
        return self.begin // self._columns, -(-self.end // self._columns)

    def add_up(self, terms: Tensor, over: str | None) -> Tensor:
        """Return the sums of this part's terms; zeros for rows and columns that it does not touch."""
        terms = terms[: self.end - self.begin]
        if over is None:
            return terms.sum()
        shape = sum_shape(self.shape, over)
        if self.begin == self.end:
            return terms.new_zeros(shape)
        first, last = self._rows
        padding = self.begin - first * self._columns, last * self._columns - self.end
        block = F.pad(terms, padding).view(last - first, self._columns)
        if over == ROWS:
            return F.pad(block.sum(1), (first, prod(shape) - last)).view(shape)
        height = self.shape[-2]
        matrices = range(first // height, -(-last // height))
        sums = [block[max(m * height - first, 0) : (m + 1) * height - first].sum(0) for m in matrices]
        return F.pad(torch.stack(sums), (0, 0, matrices.start, prod(self.shape[:-2]) - matrices.stop)).view(shape)

    def expand(self, value: Tensor) -> Tensor:
        """Return the value of each element; zero for padding. A 0-dim value is returned as it is."""
        if value.dim() == 0:
            return value
        numel = self.end - self.begin
        if numel == 0:
            return value.new_zeros(self.numel)
        first, last = self._rows
        if value.shape == row_shape(self.shape):
            block = value.reshape(-1)[first:last, None].expand(last - first, self._columns)
        elif value.shape == column_shape(self.shape):
            matrices = torch.arange(first, last, device=value.device) // self.shape[-2]
            block = value.reshape(-1, self._columns)[matrices]
        else:
            raise ValueError(
                f"A reduction returned a value of shape {tuple(value.shape)} for a parameter of shape "
                f"{tuple(self.shape)}. Return a 0-dim value, one per row of shape {tuple(row_shape(self.shape))}, or "
                f"one per column of shape {tuple(column_shape(self.shape))}."
            )
        skipped = self.begin - first * self._columns
        return F.pad(block.reshape(-1)[skipped : skipped + numel], (0, self.numel - numel))

    def expand_all(self, values: Mapping[str, Tensor]) -> Tensors:
        return {name: self.expand(value) for name, value in values.items()}


def of_run(rule: Any, run: FlatRun) -> Any:
    """Return the rule of a run's parameters, which are alike."""
    return rule.of(run.members[0].layout.shape, run.param.dtype) if isinstance(rule, ReductionRule) else rule


def sum_shape(shape: torch.Size, over: str | None) -> torch.Size:
    """Return the shape of the sums over a parameter of this shape."""
    if over is None:
        return torch.Size()
    if over not in (ROWS, COLUMNS):
        raise ValueError(f"A reduction adds up over {over!r}. Use {ROWS!r} or {COLUMNS!r}, or leave the name out.")
    return row_shape(shape) if over == ROWS else column_shape(shape)


@dataclass
class _Member:
    """One parameter of a flat run.

    Attributes:
        shared: Its state that every rank stores in full.
        parts: Its parts by the begin of their chunks.
        values: Values of the reductions so far in this step.
    """

    run: FlatRun
    layout: ShardLayout
    shared: Tensors
    parts: dict[int, ParameterPart]
    values: Tensors = field(default_factory=dict)


class ParameterSums:
    """Sums over the parameters of flat runs, and the values that rules compute from them.

    Args:
        chunks: The chunks of runs with a :class:`ReductionRule`, each within one parameter.
        rule_of: Returns the rule of a run.

    Attributes:
        passes: Number of reductions, one after the other, of the rule with most.
    """

    def __init__(
        self, chunks: Sequence[Chunk], rule_of: Callable[[FlatRun], ReductionRule], device: torch.device
    ) -> None:
        self._rule_of = rule_of
        self._by_chunk: dict[tuple[int, int], _Member] = {}
        members: list[_Member] = []
        for run in dict.fromkeys(chunk.run for chunk in chunks):
            begins = list(accumulate([0, *(record.layout.shard_numel for record in run.members)]))
            own = [_Member(run, r.layout, s, {}) for r, s in zip(run.members, run.shared, strict=True)]
            members += own
            for chunk in (chunk for chunk in chunks if chunk.run is run):
                place = bisect_right(begins, chunk.begin) - 1
                member, shard = own[place], run.members[place].spec.shard_index
                begin, end = chunk.begin - begins[place], chunk.end - begins[place]
                member.parts[chunk.begin] = ParameterPart.from_layout(member.layout, shard, begin, end)
                self._by_chunk[id(run), chunk.begin] = member
        self._members = members
        self.passes = max((len(rule_of(member.run).reductions) for member in members), default=0)
        wide = any(member.run.param.dtype is torch.float64 for member in members)
        dtype = torch.float64 if wide else torch.float32
        self._sums: list[Tensor] = []
        self._views: list[dict[int, Tensors]] = []  # for each pass: views of its sums by member id and name
        for number in range(self.passes):
            shapes = [
                (id(member), name, sum_shape(member.layout.shape, rule.reductions[number].over.get(name)))
                for member in members
                if number < len((rule := rule_of(member.run)).reductions)
                for name in rule.reductions[number].names
            ]
            flat = torch.zeros(sum(shape.numel() for *_, shape in shapes), dtype=dtype, device=device)
            views: dict[int, Tensors] = {}
            for (key, name, shape), view in zip(shapes, flat.split([s.numel() for *_, s in shapes]), strict=True):
                views.setdefault(key, {})[name] = view.view(shape)
            self._sums.append(flat)
            self._views.append(views)

    def sums(self, number: int) -> Tensor:
        """Return all sums of a pass as one 1-D tensor, which ranks add up."""
        return self._sums[number]

    def part(self, chunk: Chunk) -> ParameterPart:
        return self._by_chunk[id(chunk.run), chunk.begin].parts[chunk.begin]

    def values(self, chunk: Chunk) -> Tensors:
        """Return the values of a chunk's parameter that are known so far in this step."""
        return self._by_chunk[id(chunk.run), chunk.begin].values

    def outputs(self, chunk: Chunk, number: int) -> Tensors:
        """Return the sums of a pass to which a chunk adds its terms."""
        return self._views[number][id(self._by_chunk[id(chunk.run), chunk.begin])]

    def begin_pass(self, number: int) -> None:
        """Start to add up."""
        if number == 0:
            for member in self._members:
                member.values = {}
        self._sums[number].zero_()

    def end_pass(self, number: int, scalars: Callable[[FlatRun], Tensors]) -> None:
        """Compute values from the sums of all ranks, and store new shared state."""
        for member in self._members:
            rule = self._rule_of(member.run)
            if number >= len(rule.reductions):
                continue
            scalar = scalars(member.run)
            dtype = torch.float64 if member.run.param.dtype is torch.float64 else torch.float32
            sums = {name: view.to(dtype) for name, view in self._views[number][id(member)].items()}
            shared = {name: value.to(dtype) for name, value in member.shared.items()}
            values, new = rule.reductions[number].values(sums, shared, scalar, member.layout.shape)
            member.values = member.values | values
            for name, value in new.items():
                kept = value if "skip" not in scalar else torch.where(scalar["skip"] == 0, value, shared[name])
                member.shared[name].copy_(kept)
