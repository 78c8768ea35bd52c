"""The ops of layer calls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_zero.compat.tensors import FakeTensor, FakeTensorMode
from lightning_zero.compile.layer_dedup import layer_call


def test_fakes_of_what_standins_return_are_those_that_torch_makes() -> None:
    values = [torch.empty(2, 3).t(), None, torch.empty(4, dtype=torch.bfloat16)]
    ops = {layer_call.forward(): ("layer", 3, layer_call.describe(values), "[]"),
           layer_call.backward(): ("layer", 3, layer_call.describe(values))}  # fmt: skip

    def made(inside: AbstractContextManager[None]) -> list[Any]:
        with inside, FakeTensorMode() as mode:
            given = [torch.empty(5)]
            found = [value for op, arguments in ops.items() for value in op(*arguments, given)]
            assert all(type(value) is FakeTensor and value.fake_mode is mode for value in found)
        apart = {value.untyped_storage()._cdata for value in found}
        assert len(apart) == 4, "none shares memory with another"
        return [(v.dtype, v.shape, v.stride(), v.device, v.requires_grad, v.is_leaf) for v in found]

    before = FakeTensorMode.cache_info().size
    at_once = made(layer_call.fast_layer_call_fakes())
    assert FakeTensorMode.cache_info().size - before <= 1, "nothing is remembered of them, for which all would be read"
    assert at_once == made(nullcontext())
