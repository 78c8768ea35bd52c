"""What ``compat/fakes.py`` takes from torch still means the same."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import meta_utils
from torch.fx import GraphModule

from lightning_zero.compat.compiler import aot_autograd
from lightning_zero.compat.fakes import without_gradients
from lightning_zero.compat.tensors import FakeTensorMode


def with_gradient() -> Tensor:
    x = torch.ones(3, requires_grad=True)
    x.grad = torch.full((3,), 5.0)
    return x


def test_fakes_have_gradients_but_inside() -> None:
    assert FakeTensorMode().from_tensor(with_gradient()).grad is not None
    with without_gradients():
        fake = FakeTensorMode().from_tensor(with_gradient())
    assert fake.grad is None
    assert fake.requires_grad
    assert FakeTensorMode().from_tensor(with_gradient()).grad is not None


def test_a_graph_still_reads_a_gradient() -> None:
    def compiler(module: GraphModule, inputs: Any) -> Any:
        def run(inputs: list[Tensor]) -> Any:
            return module.forward(*inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(module: GraphModule, inputs: Any) -> Any:
        with without_gradients():
            return aot_autograd(fw_compiler=compiler)(module, inputs)

    torch._dynamo.reset()
    x = with_gradient()
    result = torch.compile(lambda x: (x * x.grad).sum(), backend=backend)(x)
    (grad,) = torch.autograd.grad(result, x)
    torch._dynamo.reset()
    assert torch.equal(grad, torch.full((3,), 5.0))


def test_torch_has_its_own_function_back() -> None:
    before = meta_utils.safe_grad
    with pytest.raises(ZeroDivisionError), without_gradients():
        raise ZeroDivisionError
    assert meta_utils.safe_grad is before
