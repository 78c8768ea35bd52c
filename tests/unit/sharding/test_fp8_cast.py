"""The compiled cast of rows to fp8 equals the eager one to the bit, also after the rows have changed."""

import torch

from lightning_zero.sharding.fp8_cast import cast_rows, compile_cast


def test_one_kernel_casts_as_eager_ops_do() -> None:
    rows, scales, numbers = torch.randn(96, 64), torch.tensor([3.0, 0.25, 100.0]), torch.arange(96) % 3
    out, expected = (torch.empty(96, 64, dtype=torch.float8_e4m3fn) for _ in range(2))
    cast = compile_cast(rows, scales, numbers, out)
    for _ in range(2):
        cast(rows, scales, numbers, out)
        cast_rows(rows, scales, numbers, expected)
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
        rounded = (rows * scales[numbers, None]).to(expected.dtype)
        assert torch.equal(expected.view(torch.uint8), rounded.view(torch.uint8))  # NaN where an older torch overflows
        rows.mul_(2)
