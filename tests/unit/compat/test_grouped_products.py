"""Autocast's rule for grouped products, which experts with float32 weights need."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs

from lightning_zero.compat import grouped_products
from lightning_zero.compat.grouped_products import cast_grouped_products

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _rules() -> None:
    pytest.importorskip("transformers.integrations.moe")
    cast_grouped_products()


def transformers_op(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)


def torch_op(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, weights, offs=ends)


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Rows of three groups, the second empty, and stored matrices whose transposes are multiplied."""
    torch.manual_seed(0)
    rows, weights = torch.randn(24, 16, requires_grad=True), torch.randn(3, 32, 16, requires_grad=True)
    return rows, weights, torch.tensor([8, 8, 24], dtype=torch.int32)


def by_loop(rows: Tensor, weights: Tensor) -> Tensor:
    low, stored = rows.to(BF16), weights.to(BF16)
    return torch.cat([low[:8] @ stored[0].T, low[8:] @ stored[2].T])


def trained(product: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    rows, weights, ends = operands()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        result = product(rows, weights.transpose(-2, -1), ends)
    result.float().square().sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    return result.detach(), rows.grad, weights.grad


def expected() -> tuple[Tensor, ...]:
    rows, weights, _ = operands()
    result = by_loop(rows, weights)
    result.float().square().sum().backward()
    assert rows.grad is not None
    assert weights.grad is not None
    return result.detach(), rows.grad, weights.grad


@pytest.mark.parametrize("product", [torch_op, transformers_op])
@pytest.mark.parametrize("compiled", [False, True])
def test_under_autocast_float32_experts_compute_in_bfloat16(product: Any, compiled: bool) -> None:
    graphs = AotEagerAndRecordGraphs()
    called = torch.compile(product, backend=graphs, fullgraph=True) if compiled else product
    found = trained(called, BF16)
    assert [value.dtype for value in found] == [BF16, torch.float32, torch.float32]
    for value, wanted in zip(found, expected(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=2e-2, atol=2e-2)
    assert not found[2][1].any()
    if compiled:  # sizes of groups stay on the device
        targets = [node.target for graph in (*graphs.fw_graphs, *graphs.bw_graphs) for node in graph.graph.nodes]
        assert targets.count(torch.ops.aten._grouped_mm.default) == 3
        assert torch.ops.aten._local_scalar_dense.default not in targets


@pytest.mark.parametrize("product", [torch_op, transformers_op])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_without_autocast_or_in_float16_nothing_changes(product: Any, dtype: torch.dtype | None) -> None:
    found = trained(product, dtype)
    assert found[0].dtype is torch.float32
    rows, weights, _ = operands()
    torch.testing.assert_close(found[0], torch.cat([rows[:8] @ weights[0].T, rows[8:] @ weights[2].T]).detach())


def test_a_rule_of_torchs_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_products, "has_kernel", lambda op, key: True)
    assert grouped_products._cast_in.__wrapped__("aten", "_grouped_mm", grouped_products._grouped_mm) == []


def test_torch_says_which_ops_have_a_rule() -> None:
    assert grouped_products.has_kernel("aten::bmm", "AutocastCPU")
    assert grouped_products.has_kernel("aten::_grouped_mm", "AutocastCPU")  # ours
    assert not grouped_products.has_kernel("aten::abs", "AutocastCPU")
