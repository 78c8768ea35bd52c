"""Stochastic rounding to bfloat16, of optimizer state (``state_dtype="bf16"``) and weights.

A value between two bfloat16 neighbors is rounded up with the probability that keeps its mean. Round-to-nearest would
stop an average that moves by less than half of bfloat16's resolution. Values that bfloat16 can represent do not change.

The noise is a hash of the parameter's name, the element's index in the full parameter and the step count. So it does
not depend on the number of ranks, on replay or eager execution, or on a resume. Words of 32 bits are stored in int64
and products stay below 2**63, because not every device has unsigned arithmetic and signed overflow is undefined.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.sharding.layout import ALIGNMENT_BYTES
from lightning_zero.sharding.param_record import ShardedParameter

STATE_DTYPE = torch.bfloat16
MIN_NUMEL = 4096  # elements of a parameter; smaller ones (norms, biases) would save almost no memory
ROUNDING_COUNT = "roundings"  # state key that counts steps for optimizers without a step count: the noise depends on it


def keeps_bf16_state(numel: int, dtype: torch.dtype) -> bool:
    """Return True if a parameter of this dtype and full size has bfloat16 state, on any number of ranks."""
    return numel >= MIN_NUMEL and dtype in (torch.float32, torch.float16, torch.bfloat16)


BLOCK = ALIGNMENT_BYTES // 4  # elements; no shard that is stepped in float32 or less ends inside a block
WORD, HALF = 0xFFFFFFFF, 0xFFFF
LANE = 0x9E37  # golden ratio of 16 bits: multiples of it, modulo 2**16, are evenly spread


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
    def from_members(cls, members: Sequence[ShardedParameter], device: torch.device) -> ElementPositions:
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
        """Return the positions of these elements; ``begin`` and ``end`` are block boundaries."""
        assert begin % BLOCK == end % BLOCK == 0, f"elements {begin} to {end} are no blocks"
        return ElementPositions(self.owners[begin // BLOCK : end // BLOCK], self.shifts, self.salts, self.begin + begin)


def noise_keys(salts: Tensor, step: Tensor) -> Tensor:
    """Return a hash word for each parameter at this step count (0-dim)."""
    return hash_words(salts ^ hash_words(step.long() & WORD))


def rounding_noise(owners: Tensor, shifts: Tensor, begin: Tensor, keys: Tensor) -> Tensor:
    """Return a hash word for each element, from its :class:`ElementPositions` and keys."""
    # 1-D from here on: Inductor must see one shape to fuse this with the update.
    owner = owners.long().view(-1, 1).expand(-1, BLOCK).reshape(-1)
    numbers = (torch.arange(len(owner), device=owners.device) + begin + shifts[owner]) & WORD
    return hash_words(numbers ^ keys[owner])


def noise_bits(words: Tensor, number: int) -> Tensor:
    """Return 16 bits of each word of noise, other ones for each ``number``."""
    if number >= 2:
        words = hash_words((words + number // 2 * 0x3C6EF372) & WORD)
    return torch.bitwise_right_shift(words, 16 * (number % 2)) & HALF


def stochastic_round(value: Tensor, noise: Tensor, number: int) -> Tensor:
    """Round float32 to bfloat16.

    Args:
        noise: A word for each element, or for each row of ``value``; neighbors in a row then get evenly spread noise.
        number: Index of the value among those that share the noise. Each index uses other bits of it.
    """
    low = noise_bits(noise, number).to(torch.int32)
    if low.shape != value.shape:
        low = (low + torch.arange(value.shape[-1], dtype=torch.int32, device=value.device) * LANE) & HALF
    finite = value.isfinite()
    bits = torch.where(finite, value, 0.0).view(torch.int32)
    up = (bits + low) & ~HALF  # the sign bit stays: finite magnitudes are below it
    return torch.where(finite, up.view(torch.float32), value).to(torch.bfloat16)


def hash_words(word: Tensor) -> Tensor:
    """Hash words by C. Wellons' lowbias32 (public domain), a permutation."""
    word = word ^ torch.bitwise_right_shift(word, 16)
    word = (word * 0x7FEB352D) & WORD
    word = word ^ torch.bitwise_right_shift(word, 15)
    word = (word * (0x846CA68B - 2**32)) & WORD  # the odd factor modulo 2**32
    return word ^ torch.bitwise_right_shift(word, 16)
