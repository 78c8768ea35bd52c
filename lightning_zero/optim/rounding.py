"""Stochastic rounding to bfloat16, with noise that is a function of where and when alone.

A value between two neighbours in bfloat16 becomes the upper one as often as it is near it, so that on average nothing
is lost: an average that moves by less than half of what bfloat16 can hold would stand still if it were rounded to the
nearest. What bfloat16 holds stays as it is.

Noise is a hash of the parameter's name, the element's number in the whole parameter, and the count of steps. So it is
the same on any number of ranks, in a replay as op by op, and after a resume; each replay of a captured step counts, and
has another. Words are of 32 bits and lie in int64, whose products here stay below 63: not every device and compiler has
unsigned arithmetic, and what signed numbers do that overflow is nobody's promise.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.sharding.layout import ALIGNMENT_BYTES
from lightning_zero.sharding.param_record import ShardedParameter

__all__ = ["ElementPositions", "noise_keys", "rounding_noise", "stochastic_round"]

BLOCK = ALIGNMENT_BYTES // 4  # elements: no shard that is stepped in float32 or less ends inside of one
WORD, HALF = 0xFFFFFFFF, 0xFFFF


@dataclass(frozen=True)
class ElementPositions:
    """Where in which parameter each element of a segment, or of a stretch of one, stands.

    Attributes:
        owners: for each block of elements, the number of the parameter.
        shifts: for each parameter, its element's number less that in the segment.
        salts: for each parameter, 32 bits of its name.
        begin: 0-dim, the number in the segment of the first element.
    """

    owners: Tensor
    shifts: Tensor
    salts: Tensor
    begin: Tensor

    @classmethod
    def of(cls, members: Sequence[ShardedParameter], device: torch.device) -> ElementPositions:
        """Of a segment of these."""
        numels = [record.layout.shard_numel for record in members]
        kind = torch.int16 if len(members) <= torch.iinfo(torch.int16).max else torch.int32
        owners = torch.arange(len(members), dtype=kind, device=device)
        shifts, begin = [], 0
        for record, numel in zip(members, numels, strict=True):
            assert numel % BLOCK == 0, f"{record.name}: a shard of {numel} elements"
            shifts.append(record.spec.shard_index * numel - begin)
            begin += numel
        blocks = torch.tensor([numel // BLOCK for numel in numels], device=device)
        return cls(
            owners.repeat_interleave(blocks, output_size=begin // BLOCK),
            torch.tensor(shifts, device=device),
            torch.tensor([zlib.crc32(record.name.encode()) for record in members], device=device),
            torch.zeros((), dtype=torch.int64, device=device),
        )

    def part(self, begin: int, end: int) -> ElementPositions:
        """Of these elements; both are whole blocks."""
        assert begin % BLOCK == end % BLOCK == 0, f"elements {begin} to {end} are no blocks"
        return ElementPositions(self.owners[begin // BLOCK : end // BLOCK], self.shifts, self.salts, self.begin + begin)


def noise_keys(salts: Tensor, step: Tensor) -> Tensor:
    """For each parameter a word, in the step of this count (0-dim)."""
    return _hash_words(salts ^ _hash_words(step.long() & WORD))


def rounding_noise(owners: Tensor, shifts: Tensor, begin: Tensor, keys: Tensor) -> Tensor:
    """For each element a word: of the :class:`ElementPositions` of these, with these keys."""
    # Of one dimension from here on: Inductor must not find another shape in what is to be one kernel with the update.
    whose = owners.long().view(-1, 1).expand(-1, BLOCK).reshape(-1)
    numbers = (torch.arange(len(whose), device=owners.device) + begin + shifts[whose]) & WORD
    return _hash_words(numbers ^ keys[whose])


def stochastic_round(value: Tensor, noise: Tensor, number: int) -> Tensor:
    """Float32 in bfloat16, as the noise has it; ``number``: of the value, among those that have the same noise, each of
    which uses other bits of it."""
    if number >= 2:
        noise = _hash_words((noise + number // 2 * 0x3C6EF372) & WORD)
    low = torch.bitwise_right_shift(noise, 16 * (number % 2)) & HALF
    finite = value.isfinite()
    bits = torch.where(finite, value, 0.0).view(torch.int32)
    up = (bits + low.to(torch.int32)) & ~HALF  # the sign stays: magnitudes of finite numbers are below all its bits
    return torch.where(finite, up.view(torch.float32), value).to(torch.bfloat16)


def _hash_words(word: Tensor) -> Tensor:
    """A permutation of words in which every bit depends on every bit: C. Wellons' lowbias32 (public domain)."""
    word = word ^ torch.bitwise_right_shift(word, 16)
    word = (word * 0x7FEB352D) & WORD
    word = word ^ torch.bitwise_right_shift(word, 15)
    word = (word * (0x846CA68B - 2**32)) & WORD  # as the odd factor that it is modulo 2**32
    return word ^ torch.bitwise_right_shift(word, 16)
