"""The op that dequantizes a weight: its dtype, and the ops that replace it where there is no kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_zero.compile.passes import dequantize
from lightning_zero.sharding.weight_format import DEQUANTIZE, WeightFormat

PACKING = WeightFormat("nf4", torch.Size((12, 33)), torch.float32)


def product(packed: Tensor, x: Tensor) -> Tensor:
    weight = DEQUANTIZE(packed, [12, 33], torch.float32, "nf4")
    return x @ weight.t().to(torch.bfloat16)


@pytest.mark.parametrize("has_kernel", [False, True])
def test_the_op_returns_the_casts_dtype_and_stays_for_a_kernel(
    has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    packed, x = PACKING.encode(torch.randn(12, 33)), torch.randn(4, 33).bfloat16()
    module: GraphModule = make_fx(product)(packed, x)
    monkeypatch.setattr(dequantize, "is_available", lambda device: has_kernel)
    dequantize.narrow_dequantized(module.graph)
    [op] = module.graph.find_nodes(op="call_function", target=DEQUANTIZE)
    assert op.args[2] is torch.bfloat16
    assert op.meta["val"].dtype is torch.bfloat16
    dequantize.expand_dequantized(module.graph)
    assert bool(module.graph.find_nodes(op="call_function", target=DEQUANTIZE)) == has_kernel
    module.recompile()
    assert torch.equal(module(packed, x), product(packed, x))


@pytest.mark.parametrize("transposed", [False, True])
def test_ops_multiply_and_transpose(transposed: bool) -> None:
    def scaled(packed: Tensor, factor: Tensor) -> Tensor:
        return DEQUANTIZE(packed, [12, 33], torch.float8_e4m3fn, "nf4", factor, transposed)

    packed, factor = PACKING.encode(torch.randn(12, 33)), torch.tensor(100.0)
    module: GraphModule = make_fx(scaled, tracing_mode="fake")(packed, factor)
    dequantize.expand_dequantized(module.graph)
    assert not module.graph.find_nodes(op="call_function", target=DEQUANTIZE)
    module.recompile()
    found = module(packed, factor)
    assert found.is_contiguous()
    assert torch.equal(found.float(), scaled(packed, factor).float())
