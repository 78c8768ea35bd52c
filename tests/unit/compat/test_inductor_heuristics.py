"""Inductor's choices for a product and for sums of another length stay what they were, and ask nothing of it."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import sympy
import torch
from torch._inductor import scheduler
from torch._inductor.fx_passes import pad_mm
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lightning_zero.compat.inductor_heuristics import choose_by_hints


@pytest.fixture
def rows() -> torch.SymInt:
    """A dynamic size, 2560."""
    env = ShapeEnv()
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = FakeTensorMode(shape_env=env).from_tensor(torch.empty(2560, 4), symbolic_context=context)
    (size, _) = fake.shape
    assert isinstance(size, torch.SymInt)
    return size


def guards(size: torch.SymInt) -> int:
    return len(size.node.shape_env.guards)


def test_padding_a_product_is_chosen_without_a_guard(rows: torch.SymInt) -> None:
    with choose_by_hints():
        chosen = pad_mm.is_mm_compute_bound(rows, 768, 50257, torch.bfloat16)  # type: ignore[arg-type]
    assert guards(rows) == 0
    assert chosen is pad_mm.is_mm_compute_bound(2560, 768, 50257, torch.bfloat16)
    pad_mm.is_mm_compute_bound(rows, 768, 50257, torch.bfloat16)  # type: ignore[arg-type]
    assert guards(rows) > 0, "torch needs no help any more"


def test_sharing_a_kernel_between_sums_is_chosen_without_a_guard(rows: torch.SymInt) -> None:
    sizes = SizeVarAllocator(rows.node.shape_env)
    asked = []

    def can_fuse(one: Any, other: Any) -> bool:
        asked.append((one, other))
        return sizes.evaluate_expr(sympy.Ge(rows.node.expr * 768, 5 * 2**20))

    graph: Any = SimpleNamespace(sizevars=sizes)
    with patch.object(scheduler.MixOrderReduction, "can_fuse", can_fuse), V.set_graph_handler(graph):
        with choose_by_hints():
            assert not scheduler.MixOrderReduction.can_fuse("one", "other")  # type: ignore[arg-type]
            assert not scheduler.MixOrderReduction.are_mix_order_reductions("one", "other")  # type: ignore[arg-type]
        assert asked == [("one", "other")] * 2
        assert guards(rows) == 0
        can_fuse("one", "other")
        assert guards(rows) == 1


def test_torch_has_its_own_choices_back() -> None:
    before = pad_mm.is_mm_compute_bound, scheduler.MixOrderReduction.__dict__["can_fuse"]
    with pytest.raises(ZeroDivisionError), choose_by_hints():
        raise ZeroDivisionError
    assert (pad_mm.is_mm_compute_bound, scheduler.MixOrderReduction.__dict__["can_fuse"]) == before
