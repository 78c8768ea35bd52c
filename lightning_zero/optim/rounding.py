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
from lightning_zero.sharding.record import ShardedParameter

__all__ = ["ElementPositions", "noise_keys", "rounding_noise", "stochastic_round"]

BLOCK = ALIGNMENT_BYTES // 4  # elements; no shard that is stepped in float32 or less ends inside a block
WORD, HALF = 0xFFFFFFFF, 0xFFFF


@dataclass(frozen=True)
class ElementPositions:
    """The parameter and index of each element of a flat run, or of a chunk of one.

    Attributes:
        owners: Number of the parameter, for each block of elements.
        shifts: For each parameter, its element index minus the index in the run.
        salts: For each parameter, 32 bits of its name.
        begin: Index in the run of the first element, 0-dim.
    """

    owners: Tensor
    shifts: Tensor
    salts: Tensor
    begin: Tensor

    @classmethod
    def of(cls, members: Sequence[ShardedParameter], device: torch.device) -> ElementPositions:
        """Return the positions in a run of these parameters."""
        numels = [record.layout.shard_numel for record in members]
        kind = torch.int16 if len(members) <= torch.iinfo(torch.int16).max else torch.int32
        owners = torch.arange(len(members), dtype=kind, device=device)
        shifts, begin = [], 0
        for record, numel in zip(members, numels, strict=True):
            assert numel % BLOCK == 0, f"{record.name}: a shard of {numel} elements"
            shifts.append(record.sight.number * numel - begin)
            begin += numel
        blocks = torch.tensor([numel // BLOCK for numel in numels], device=device)
        return cls(
            owners.repeat_interleave(blocks, output_size=begin // BLOCK),
            torch.tensor(shifts, device=device),
            torch.tensor([zlib.crc32(record.name.encode()) for record in members], device=device),
            torch.zeros((), dtype=torch.int64, device=device),
        )

    def part(self, begin: int, end: int) -> ElementPositions:
        """Return the positions of these elements; ``begin`` and ``end`` are block boundaries."""
        assert begin % BLOCK == end % BLOCK == 0, f"elements {begin} to {end} are no blocks"
        return ElementPositions(self.owners[begin // BLOCK : end // BLOCK], self.shifts, self.salts, self.begin + begin)


def noise_keys(salts: Tensor, step: Tensor) -> Tensor:
    """Return a hash word for each parameter at this step count (0-dim)."""
    return _hash_words(salts ^ _hash_words(step.long() & WORD))


def rounding_noise(owners: Tensor, shifts: Tensor, begin: Tensor, keys: Tensor) -> Tensor:
    """Return a hash word for each element, from its :class:`ElementPositions` and keys."""
    # 1-D from here on: Inductor must see one shape to fuse this with the update.
    whose = owners.long().view(-1, 1).expand(-1, BLOCK).reshape(-1)
    numbers = (torch.arange(len(whose), device=owners.device) + begin + shifts[whose]) & WORD
    return _hash_words(numbers ^ keys[whose])


def stochastic_round(value: Tensor, noise: Tensor, number: int) -> Tensor:
    """Round float32 to bfloat16 with this noise.

    ``number`` is the index of the value among those that share the noise. Each index uses other bits of it.
    """
    if number >= 2:
        noise = _hash_words((noise + number // 2 * 0x3C6EF372) & WORD)
    low = torch.bitwise_right_shift(noise, 16 * (number % 2)) & HALF
    finite = value.isfinite()
    bits = torch.where(finite, value, 0.0).view(torch.int32)
    up = (bits + low.to(torch.int32)) & ~HALF  # the sign bit stays: finite magnitudes are below it
    return torch.where(finite, up.view(torch.float32), value).to(torch.bfloat16)


def _hash_words(word: Tensor) -> Tensor:
    """Hash words by C. Wellons' lowbias32 (public domain), a permutation."""
    word = word ^ torch.bitwise_right_shift(word, 16)
    word = (word * 0x7FEB352D) & WORD
    word = word ^ torch.bitwise_right_shift(word, 15)
    word = (word * (0x846CA68B - 2**32)) & WORD  # the odd factor modulo 2**32
    return word ^ torch.bitwise_right_shift(word, 16)
