"""The kernel for symmetric products equals torch's products, also when it is replayed."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.native.capture import GraphedSequence
from lightning_zero.optim import symmetric_products
from lightning_zero.optim.newton_schulz import newton_schulz
from lightning_zero.optim.symmetric_products import has_kernel, symmetric_product

pytestmark = pytest.mark.gpu
SHAPES = [(27, 512, 512), (30, 512, 2048), (10, 777, 1001), (9, 1024, 640), (2, 2048, 5632)]


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    if not symmetric_products.can_launch(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("the kernel is for Hopper and Blackwell with Triton")


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_torchs(shape: tuple[int, int, int], tall: bool) -> None:
    torch.manual_seed(0)
    number, rows, columns = shape
    x = torch.randn(number, columns, rows, device="cuda").mT if tall else torch.randn(*shape, device="cuda")
    x = (x / columns**0.5).bfloat16()
    assert has_kernel(x)
    base = symmetric_product(x)
    assert torch.equal(base, base.mT)
    torch.testing.assert_close(base, x @ x.mT, rtol=0.02, atol=0.02)
    found = symmetric_product(x, base=base, alpha=0.5, beta=-2.0, shift=3.0)
    product = 0.5 * x.double() @ x.double().mT - 2 * base.double()
    expected = product + 3 * torch.eye(rows, device="cuda")
    torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("shape", [(8, 1024, 2048), (8, 2048, 1024)])
def test_newton_schulz_is_that_without_the_kernel_and_is_captured(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    updates = torch.randn(*shape, device="cuda").bfloat16()
    out = torch.empty_like(updates)
    settings = (3.4445, -4.7750, 2.0315), 5, 1e-7
    sequence = GraphedSequence(lambda: out.copy_(newton_schulz(updates, *settings)), updates.device)
    for _ in range(3):
        out.zero_()
        sequence()
    assert sequence.replays
    monkeypatch.setattr(symmetric_products, "has_kernel", lambda x: False)
    expected = newton_schulz(updates, *settings)
    assert (out - expected).float().norm() < 0.03 * expected.float().norm()
