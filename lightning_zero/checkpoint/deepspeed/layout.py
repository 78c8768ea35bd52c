"""Where each parameter lies in ranks' partitions. Pure arithmetic.

DeepSpeed puts the parameters of an optimizer's group one behind the other, flattened. ZeRO-1 and ZeRO-2 cut that row
into equal parts, one for each rank, wherever the borders fall; in which order parameters lie in it, and with what
padding, depends on options and versions, so each rank's file says what it has of which. ZeRO-3 cuts each parameter by
itself, pads it, and puts a rank's parts one behind the other; its groups are parts of the optimizer's ("sub groups").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Span", "spans_of_parameter", "spans_of_parameters", "spans_of_pieces"]

Shapes = Sequence[Mapping[str, Sequence[int]]]  # of the parameters of each group
Pieces = Mapping[str, tuple[int, int]]  # by parameter: first element, and how many
Spans = dict[str, list["Span"]]  # by parameter


@dataclass(frozen=True)
class Span:
    """Some elements of a parameter, and where they lie.

    Attributes:
        rank: which has them.
        start: position of the first in that rank's partition of the group.
        begin: position of the first in the flattened parameter.
        end: one past that of the last.
    """

    rank: int
    start: int
    begin: int
    end: int


def spans_of_pieces(shapes: Shapes, pieces: Sequence[Sequence[Pieces]], lengths: Sequence[Sequence[int]]) -> Spans:
    """Of ZeRO-1 and ZeRO-2.

    Args:
        shapes: all groups'.
        pieces: by rank and group, of each parameter that has elements in its partition: where these begin there, and
            how many they are.
        lengths: by rank and group: elements of a partition, which may be padded at its end.

    Raises:
        ValueError: pieces do not add up to a parameter, share elements, or do not lie in the partition.
    """
    found: Spans = {}
    for rank, groups in enumerate(pieces):
        if len(groups) != len(shapes):
            raise ValueError(f"rank {rank} speaks of {len(groups)} groups of parameters, and there are {len(shapes)}")
        for group, held in enumerate(groups):
            _refuse_shared(held, f"of group {group} on rank {rank}")
    for group, named in enumerate(shapes):
        for name, shape in named.items():
            spans, begin = [], 0
            for rank, groups in enumerate(pieces):
                start, count = groups[group].get(name, (0, 0))
                if min(start, count) < 0 or start + count > lengths[rank][group]:
                    raise ValueError(
                        f"{name!r} has {count:,} elements from {start:,} on, of {lengths[rank][group]:,}, on "
                        f"rank {rank}"
                    )
                if count:
                    spans.append(Span(rank, start, begin, begin + count))
                begin += count
            if begin != prod(shape):
                raise ValueError(f"ranks have {begin:,} elements of {name!r}, which has {prod(shape):,}")
            found[name] = spans
    return found


def _refuse_shared(pieces: Pieces, where: str) -> None:
    """Raise if two parameters have the same elements of a partition."""
    end, before = 0, ""
    for name, (start, count) in sorted(pieces.items(), key=lambda piece: piece[1]):
        if count and start < end:
            raise ValueError(f"{before!r} and {name!r} have the same elements {where}")
        end, before = (start + count, name) if count else (end, before)


def spans_of_parameters(shapes: Shapes, lengths: Sequence[Sequence[int]]) -> Spans:
    """Of ZeRO-3; parameters lie in the order of ``shapes``.

    Raises:
        ValueError: partitions do not add up to the parameters.
    """
    ranks = len(lengths)
    found: Spans = {}
    for group, named in enumerate(shapes):
        offset = 0
        for name, shape in named.items():
            found[name] = spans_of_parameter(shape, ranks, offset)
            offset += -(-prod(shape) // ranks)
        wrong = next((rank[group] for rank in lengths if rank[group] != offset), None)
        if wrong is not None:
            raise ValueError(f"a rank has {wrong:,} elements of group {group}, and its share of that is {offset:,}")
    return found


def spans_of_parameter(shape: Sequence[int], ranks: int, offset: int = 0) -> list[Span]:
    """Of one that ZeRO-3 has cut, whose parts lie at ``offset``."""
    count = prod(shape)
    part = -(-count // ranks)
    return [
        Span(rank, offset, rank * part, min(count, (rank + 1) * part)) for rank in range(ranks) if rank * part < count
    ]
