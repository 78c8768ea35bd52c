"""Numbers about casts: shares of elements that underflow or overflow, computed in a graph, equal plain torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from lightning_zero.compile.fp8 import health_numbers
from lightning_zero.compile.fp8.health_numbers import insert_shares
from tests.unit.compile.fp8.linear_graphs import BF16
from tests.unit.compile.graphs import Builder

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def shares(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    b = Builder()
    inputs = [b.input(name, *value.shape, dtype=value.dtype) for name, value in (("x", matrix), ("scale", scale))]
    graph = b.done(*insert_shares(b.call, inputs[0], inputs[1], dtype))
    underflow, overflow = GraphModule({}, graph)(matrix, scale)
    return underflow.item(), overflow.item()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scaled", ["matrix", "rows", "columns"])
@pytest.mark.parametrize("every", [1, 3])
def test_shares_are_those_of_the_cast(
    dtype: torch.dtype, scaled: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    # Powers of two, some of which are exactly between zero and the smallest number.
    matrix = (torch.randn(30, 8).sign() * torch.randint(-40, 3, (30, 8)).float().exp2()).to(BF16)
    matrix[::4, 0], matrix[5, 5], matrix[6, 1], matrix[3, 2] = 0.0, float("inf"), float("nan"), -float("inf")
    scale = torch.tensor(16.0)
    if scaled != "matrix":
        scale = torch.randint(0, 9, (30, 1) if scaled == "rows" else (1, 8)).float().exp2()
    monkeypatch.setattr(health_numbers, "SAMPLE_NUMEL", 30 * 8 // every)
    cast = (matrix.float() * scale).to(dtype)[::every]
    sample = matrix[::every]
    underflow = ((sample != 0) & (cast.float() == 0)).float().mean().item()
    assert 0.2 < underflow < 0.8
    assert shares(matrix, scale, dtype) == (underflow, (~sample.isfinite()).float().mean().item())
