"""Symmetric products: the formula on any device, and the kernel in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.optim.symmetric_products import symmetric_product
from tests.helpers.interpreter import run_interpreted


@pytest.mark.parametrize("tall", [False, True])
def test_the_result_is_that_of_the_formula(tall: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 5).mT if tall else torch.randn(2, 5, 7)
    base = torch.randn(2, 5, 5)
    base = base + base.mT
    torch.testing.assert_close(symmetric_product(x), x @ x.mT)
    out = torch.zeros(3, 5, 5)
    assert symmetric_product(x, out=out[1:]).data_ptr() == out[1:].data_ptr()
    torch.testing.assert_close(out, torch.cat([torch.zeros(1, 5, 5), x @ x.mT]))
    other = torch.randn(2, 5, 5)
    other = other + other.mT
    square = other @ other
    torch.testing.assert_close(symmetric_product(other, square), other @ square)
    expected = 0.5 * x @ x.mT - 2 * base + 3 * torch.eye(5)
    torch.testing.assert_close(symmetric_product(x, base=base, alpha=0.5, beta=-2.0, shift=3.0), expected)


INTERPRETED = """
import torch
from lightning_zero.optim import descriptor_kernel, scale_kernel, symmetric_kernel
from lightning_zero.optim.symmetric_kernel import Blocks

torch.manual_seed(0)

def check(symmetric_product, number, rows, columns, ratio=1):
    for tall in (False, True):
        x = torch.randn(number, columns, rows).half().mT if tall else torch.randn(number, rows, columns).half()
        base = torch.randn(number, rows, rows).half()
        base = base + base.mT.clone()
        blocks = Blocks(rows=16, inner=16, warps=4, stages=2, ratio=ratio)
        product = x.float() @ x.float().mT
        found = symmetric_product(x, None, None, 1.0, 0.0, 0.0, None, blocks)
        assert torch.equal(found, found.mT)
        torch.testing.assert_close(found, product.half())
        found = symmetric_product(x, None, base, 0.5, -2.0, 3.0, None, blocks)
        assert torch.equal(found, found.mT)
        torch.testing.assert_close(found, (0.5 * product - 2 * base.float() + 3 * torch.eye(rows)).half())
    # Polynomials of one matrix commute.
    base = base / rows
    square = (base.float() @ base.float()).half()
    found = torch.empty_like(base)
    symmetric_product(base, square, None, 1.0, 0.0, 0.0, found, blocks)
    assert torch.equal(found, found.mT)
    torch.testing.assert_close(found, (base.float() @ square.float()).half(), rtol=2e-3, atol=2e-3)

# Even and odd numbers of block columns, sizes that no block divides, one block alone.
for shape in [(2, 33, 17), (1, 70, 40), (1, 64, 32), (1, 5, 3)]:
    check(symmetric_kernel.symmetric_product, *shape)
for shape in [(2, 40, 24), (1, 72, 40), (1, 64, 32), (1, 8, 8)]:
    check(descriptor_kernel.symmetric_product, *shape)
    check(descriptor_kernel.symmetric_product, *shape, ratio=2)
assert descriptor_kernel.can_describe(torch.zeros(2, 16, 24).half())
assert descriptor_kernel.can_describe(torch.zeros(2, 24, 16).half().mT)
assert not descriptor_kernel.can_describe(torch.zeros(2, 20, 24).half())  # rows of the product
assert not descriptor_kernel.can_describe(torch.zeros(2, 16, 20).half())

x, factors = torch.randn(3, 70, 90).bfloat16(), torch.rand(3, 1, 1)
out = torch.empty(x.shape, dtype=torch.float16)
scale_kernel.scale(x, factors, out)
assert torch.equal(out, (x.float() * factors).half())
print("all equal")
"""


def test_kernels_compute_each_block_once_and_mirror_it() -> None:
    run_interpreted(INTERPRETED)
