"""What ``compat/fakes.py`` takes from torch still means the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses import fake_tensor, meta_utils
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lightning_zero.compat.compiler import aot_autograd
from lightning_zero.compat.fakes import fake_like, fake_weights_from_sizes, skip_gradient_fakes
from lightning_zero.compat.tensors import FakeTensor, FakeTensorMode, no_python_dispatcher, no_dispatch_modes


def with_gradient() -> Tensor:
    x = torch.ones(3, requires_grad=True)
    x.grad = torch.full((3,), 5.0)
    return x


def test_fakes_have_gradients_but_inside() -> None:
    assert FakeTensorMode().from_tensor(with_gradient()).grad is not None
    with skip_gradient_fakes():
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
        with skip_gradient_fakes():
            return aot_autograd(fw_compiler=compiler)(module, inputs)

    torch._dynamo.reset()
    x = with_gradient()
    result = torch.compile(lambda x: (x * x.grad).sum(), backend=backend)(x)
    (grad,) = torch.autograd.grad(result, x)
    torch._dynamo.reset()
    assert torch.equal(grad, torch.full((3,), 5.0))


def test_torch_has_its_own_function_back() -> None:
    before = meta_utils.safe_grad
    with pytest.raises(ZeroDivisionError), skip_gradient_fakes():
        raise ZeroDivisionError
    assert meta_utils.safe_grad is before


class Weight(nn.Parameter):
    pass


def weight(part: slice = slice(2, 6), requires_grad: bool = True) -> Weight:
    return Weight(torch.arange(8.0)[part], requires_grad)


def form(fake: Any) -> Any:
    return type(fake), fake.shape, fake.stride(), fake.dtype, fake.device, fake.requires_grad, fake.is_leaf


@pytest.mark.parametrize(
    "made", [weight, lambda: weight(slice(None, None, 2)), lambda: weight(requires_grad=False)], ids="012"
)
def test_weights_have_the_fakes_that_torch_makes(made: Callable[[], Weight]) -> None:
    tensor, mode, plain = made(), FakeTensorMode(), FakeTensorMode()
    with fake_weights_from_sizes(Weight):
        fake = mode.from_tensor(tensor)
        assert mode.from_tensor(tensor) is fake
    assert mode.from_tensor(tensor) is fake, "torch goes by the same memory"
    assert form(fake) == form(plain.from_tensor(tensor))
    assert fake.fake_mode is mode


def test_memory_is_their_own() -> None:
    whole = torch.arange(8.0)
    one, other = Weight(whole[:4]), Weight(whole[4:])
    mode = FakeTensorMode()
    with fake_weights_from_sizes(Weight):
        fakes = [mode.from_tensor(part) for part in (one, other)]
    assert fakes[0].untyped_storage()._cdata != fakes[1].untyped_storage()._cdata


def test_what_sizes_do_not_say_is_left_to_torch() -> None:
    with fake_weights_from_sizes(Weight):
        assert isinstance(FakeTensorMode().from_tensor(nn.Parameter(torch.ones(3))), nn.Parameter)  # of its own alone
        shapes = FakeTensorMode(shape_env=ShapeEnv())
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        symbolic = shapes.from_tensor(weight(), symbolic_context=context, source=ConstantSource("x"))
    assert isinstance(symbolic.shape[0], torch.SymInt)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_code_still_finds_the_gradient_of_a_weight(backend: str) -> None:
    def scaled(x: Tensor, scale: Weight) -> Tensor:
        return (x * scale * (1 if scale.grad is None else scale.grad + 1)).sum()

    torch._dynamo.reset()
    x, scale = torch.ones(4), weight()
    run = torch.compile(scaled, backend=backend)
    with fake_weights_from_sizes(Weight):
        assert run(x, scale) == scaled(x, scale)
        scale.grad = torch.arange(4.0)
        assert run(x, scale) == scaled(x, scale) == (scale * torch.arange(1.0, 5.0)).sum()
        scale.grad.add_(1)
        assert run(x, scale) == scaled(x, scale)
    torch._dynamo.reset()


def test_inside_a_transform_they_are_left_to_torch() -> None:
    class Mapped(nn.Module):
        def __init__(self, weight: Weight) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(lambda row: (row * self.weight).sum())(x)

    torch._dynamo.reset()
    with fake_weights_from_sizes(Weight):
        for module in (Mapped(weight()), Mapped(weight(requires_grad=False))):
            found = torch.compile(module, backend="aot_eager", fullgraph=True)(torch.ones(3, 4))
            assert torch.equal(found, module(torch.ones(3, 4)))
    torch._dynamo.reset()


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch knows no dtype of a gradient")
def test_gradients_of_another_dtype_are_left_to_torch() -> None:
    other = weight()
    other.grad_dtype = None  # any
    expected = FakeTensorMode().from_tensor(other).grad_dtype
    with fake_weights_from_sizes(Weight):
        assert FakeTensorMode().from_tensor(other).grad_dtype is expected


def test_torch_makes_them_again_behind() -> None:
    before = fake_tensor.FakeTensorConverter.from_real_tensor
    with pytest.raises(ZeroDivisionError), fake_weights_from_sizes(Weight):
        raise ZeroDivisionError
    assert fake_tensor.FakeTensorConverter.from_real_tensor is before


def test_graphs_of_dynamo_and_its_guards_are_the_same() -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Weight(torch.arange(12.0)[4:8])

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sum()

    def seen() -> tuple[list[str], int]:
        graphs: list[str] = []

        def backend(module: GraphModule, inputs: Any) -> Any:
            graphs.append(module.print_readable(print_output=False))
            return module.forward

        torch._dynamo.reset()
        line = Line()
        run = torch.compile(line, backend=backend)
        run(torch.ones(4))
        run(torch.ones(4))
        line.weight.requires_grad_(False)
        run(torch.ones(4))  # guarded
        torch._dynamo.reset()
        return graphs, len(graphs)

    # As compiled modules are called: or torch 2.11 would not look at the weight again.
    with torch.compiler.config.patch(skip_tensor_guards_with_matching_dict_tags=False):
        plain = seen()
        with fake_weights_from_sizes(Weight):
            assert seen() == plain
    assert plain[1] == 2


@pytest.mark.parametrize("unsafe", [False, True], ids=["", "whose memory may be asked for"])
def test_a_fake_like_another_is_what_torch_makes(unsafe: bool) -> None:
    mode = FakeTensorMode()
    mode._allow_unsafe_data_ptr_access = unsafe
    with mode:
        value = torch.empty(3, 4, device="cpu")
    memory = torch.empty(24, dtype=torch.bfloat16, device="meta")
    for part in (memory.as_strided((2, 3), (6, 1), 4), memory.requires_grad_().as_strided((5,), (0,), 1)):
        made, expected = fake_like(value, part), FakeTensor(mode, part, value.device)
        assert vars(made) == vars(expected)
        assert type(made) is FakeTensor
        for ask in (
            Tensor.size, Tensor.stride, Tensor.storage_offset, lambda x: x.dtype, lambda x: x.device,
            lambda x: x.requires_grad, lambda x: x.untyped_storage()._cdata, torch._C._dispatch_keys,
        ):  # fmt: skip
            assert ask(made) == ask(expected)
        with mode:
            assert (made + 1).shape == part.shape
        if not unsafe:
            for fake in (made, expected):
                with pytest.raises(RuntimeError, match="data pointer"):
                    fake.data_ptr()


def test_a_number_in_a_fake_stays_its_own() -> None:
    """One that is a constant, or has been asked what depends on its values."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        fixed, asked = torch.tensor(3), torch.ones(4)
        torch.nonzero(asked)
    fixed.constant = torch.tensor(3)
    for value in (fixed, asked):
        with no_dispatch_modes(), no_python_dispatcher():
            made = fake_like(value, torch.empty(4, device="meta"))
        assert made.constant is None
        assert made.nonzero_memo is None
        assert made.fake_mode is mode
