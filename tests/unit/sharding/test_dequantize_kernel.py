"""The kernels for packed frozen weights equal the ops that define the values, in Triton's interpreter."""

from __future__ import annotations

from tests.helpers.interpreter import run_interpreted

# One element, words and programs that are not full, rows that end inside a word, blocks on both sides of a scale.
INTERPRETED = """
import torch
from lightning_zero.sharding import dequantize_kernel, weight_format

dequantize_kernel.is_available = lambda device: True
for kind in ("nf4", "int8"):
    for shape in [(1, 1), (1, 7), (25, 19), (3, 64), (2, 513), (7, 2053), (5, 4096), (9, 2048)]:
        for dtype in (torch.float32, torch.float16):
            torch.manual_seed(0)
            weight = torch.randn(shape)
            weight[0] *= 100
            packing = weight_format.WeightFormat(kind, torch.Size(shape), dtype)
            packed = packing.encode(weight)
            expected = weight_format.decode(
                lambda op, *args, **settings: op(*args, **settings), packed, shape, dtype, kind, packed.device
            )
            assert torch.equal(packing.decode(packed), expected), (kind, shape, dtype)
    for shape in [(1, 1), (5, 24), (7, 13), (70, 272), (130, 520)]:
        # Multiplied, and transposed by tiles. The interpreter does not round to fp8 as a GPU does.
        packed = weight_format.WeightFormat(kind, torch.Size(shape), torch.float16).encode(torch.randn(shape))
        for transposed in (False, True):
            arguments = packed, shape, torch.float16, kind
            factor = torch.tensor(1.7)
            expected = weight_format.decode(
                lambda op, *args, **settings: op(*args, **settings), *arguments, packed.device, factor, transposed
            )
            found = weight_format.DEQUANTIZE(*arguments, factor, transposed)
            assert torch.equal(found, expected), (kind, shape, transposed)
print("all equal")
"""


def test_values_are_those_of_the_ops() -> None:
    run_interpreted(INTERPRETED)
