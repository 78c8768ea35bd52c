"""Names in ``compat/tensors.py`` have the expected meaning in this torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # registers ops
from torch import DisableTorchFunction, DisableTorchFunctionSubclass, Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import fake_tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from lightning_zero.compat import tensors as ops
from lightning_zero.compat.tensors import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    fake_like,
    fake_weights_from_sizes,
    foreach_copy,
    foreach_norm,
    graph_task_id,
    inside_functorch,
    no_dispatch_modes,
    no_python_dispatcher,
    retains_graph,
    storage_key,
    top_saved_tensors_hooks,
    tree_leaves,
    tree_map,
    tree_map_only,
)


class Loud(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("asked")


class Quiet(Tensor):
    __torch_function__ = nn.Parameter.__torch_function__  # type: ignore[assignment]


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("asked")


def test_disabled_subclasses_are_not_called() -> None:
    loud = torch.ones(2).as_subclass(Loud)
    with pytest.raises(AssertionError, match="asked"):
        loud + 1
    with DisableTorchFunctionSubclass():
        assert type(loud + 1) is Tensor


def test_disabled_torch_functions_call_no_mode() -> None:
    loud = torch.ones(2).as_subclass(Loud)
    with Mode():
        with pytest.raises(AssertionError, match="asked"), DisableTorchFunctionSubclass():
            loud + 1
        with DisableTorchFunction():
            assert type(loud + 1) is Tensor


def test_ops_are_not_looked_up_in_python() -> None:
    def looked_up() -> bool:
        return torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)

    with enable_python_dispatcher():
        assert looked_up()
        with no_python_dispatcher():
            assert not looked_up()
        assert looked_up()


def test_dynamo_traces_both() -> None:
    def computed(x: Tensor) -> Tensor:
        with DisableTorchFunction(), DisableTorchFunctionSubclass():
            return x + 1

    compiled = torch.compile(computed, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2, 2]


def test_results_of_a_disabled_subclass_are_plain() -> None:
    quiet = torch.ones(2).as_subclass(Quiet)
    assert type(quiet) is Quiet
    assert type(quiet + 1) is Tensor


def test_traced_tensors_are_fake_and_functional_ones() -> None:
    from torch._functorch.aot_autograd import aot_export_joint_simple

    seen = []

    def look(x: Tensor) -> tuple[Tensor]:
        seen.append(isinstance(x, FakeTensor | FunctionalTensor))
        return (x * 2,)

    aot_export_joint_simple(look, [torch.ones(2)], trace_joint=False)
    assert seen
    assert all(seen)
    assert not isinstance(torch.ones(2), FakeTensor | FunctionalTensor)


def test_functions_of_lists() -> None:
    into, source = [torch.zeros(2), torch.zeros(1)], [torch.tensor([3.0, 4.0]), torch.ones(1)]
    foreach_copy(into, source)
    assert [x.tolist() for x in into] == [[3, 4], [1]]
    assert [x.item() for x in foreach_norm(into, 2, dtype=torch.float64)] == [5, 1]
    assert foreach_norm.__name__ == "_foreach_norm"
    functions = [name for name in dir(torch) if name.startswith(("_foreach_", "_fused_"))]
    assert {"_foreach_mul_", "_fused_adam_"} <= set(functions)


def test_trees() -> None:
    a, b = torch.ones(1), torch.ones(2)
    assert [id(x) for x in tree_leaves({"a": [a], "b": (b, None)}) if isinstance(x, Tensor)] == [id(a), id(b)]
    assert tree_map_only(int, lambda n: n + 1, (1, ["x", 2])) == (2, ["x", 3])
    assert tree_map(str, {"a": [1], "b": (2, None)}) == {"a": ["1"], "b": ("2", "None")}


def test_version_counts_writes() -> None:
    x = torch.ones(2)
    before = x._version
    assert before == (x + 1)._version
    x.add_(1)
    assert x._version == before + 1


def test_a_view_has_its_base() -> None:
    x = torch.ones(2, 2)
    assert x._base is None
    assert x[0].t()._base is x


def test_hooks_of_a_parameter_can_be_removed_and_restored() -> None:
    param, called = nn.Parameter(torch.ones(1)), []
    assert not param._backward_hooks
    param.register_hook(lambda grad: called.append("first"))
    hooks = param._backward_hooks
    assert isinstance(hooks, dict)
    param._backward_hooks = None
    param.sum().backward()
    assert called == []
    param._backward_hooks = hooks
    param.sum().backward()
    assert called == ["first"]


def test_post_accumulate_hooks_of_a_parameter_can_be_replaced() -> None:
    param, called = nn.Parameter(torch.ones(1)), []
    handle = param.register_post_accumulate_grad_hook(lambda p: called.append("user's"))
    hooks: Any = param._post_accumulate_grad_hooks
    [key] = hooks
    hooks[key] = lambda p: called.append("ours")
    param.sum().backward()
    assert called == ["ours"]
    handle.remove()
    assert not hooks


def test_fake_tensors_of_one_storage_have_one_key() -> None:
    with FakeTensorMode():
        x, y = torch.ones(4), torch.ones(4)
        assert storage_key(x) == storage_key(x.view(2, 2).t())
        assert storage_key(x) != storage_key(y)


def in_backward(look: Any, **kwargs: Any) -> list[Any]:
    """Return the results of ``look()`` in a hook of a backward."""
    said = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: said.append(look()))
    y.sum().backward(**kwargs)
    return said


def test_graph_task_id_is_minus_one_outside_of_a_backward() -> None:
    assert graph_task_id() == -1
    [inside] = in_backward(graph_task_id)
    assert inside != -1
    assert graph_task_id() == -1


@pytest.mark.parametrize("keeps", [False, True])
def test_retains_graph_is_the_argument_of_backward(keeps: bool) -> None:
    assert in_backward(retains_graph, retain_graph=keeps) == [keeps]


def test_top_saved_tensors_hooks_are_the_innermost_pair() -> None:
    def pack(x: Tensor) -> Tensor:
        return x

    def unpack(x: Tensor) -> Tensor:
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks
    assert top_saved_tensors_hooks(True) is None
    with hooks(pack, unpack):
        assert top_saved_tensors_hooks(True)[0] is pack
        with hooks(unpack, pack):
            assert top_saved_tensors_hooks(True)[0] is unpack
    assert top_saved_tensors_hooks(True) is None


def test_functorch_state_and_wrapped_tensors_are_visible() -> None:
    given = torch.ones(2)
    seen = []

    def look(x: Tensor) -> Tensor:
        inner = torch.func.debug_unwrap(x)
        seen.append((inside_functorch(), inner is not x, inner.data_ptr()))
        return x.sum()

    assert not inside_functorch()
    assert torch.func.debug_unwrap(given) is given
    torch.func.grad(look)(given)
    torch.func.grad(lambda x: torch.func.grad(look)(x).sum())(given)
    assert seen == [(True, True, given.data_ptr())] * 2


def test_writes_to_data_keep_saved_tensors_valid() -> None:
    weight, buffer = torch.ones(2, requires_grad=True), torch.ones(2)
    loss = (weight * buffer).sum()
    foreach_copy([buffer.data], [torch.full((2,), 3.0)])
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3]


def test_ops_are_overloads_of_packets() -> None:
    add = torch.ops.aten.add
    assert isinstance(add, ops.OpOverloadPacket)
    assert isinstance(add.Tensor, ops.OpOverload)
    assert not isinstance(add, ops.OpOverload)
    assert add.Tensor.overloadpacket is add
    assert add.Tensor.overloadpacket.__name__ == "add"


def test_graphs_cast_and_reshape_with_them() -> None:
    graph = make_fx(lambda x, w: x.to(torch.float64) @ w)(torch.ones(2, 3, 4), torch.ones(4, 5).double()).graph
    called = {node.target for node in graph.nodes}
    assert {ops.to_copy, ops.unsafe_view} <= called


def test_a_wait_takes_one_tensor() -> None:
    assert isinstance(ops.wait_tensor, ops.OpOverload)
    assert len(ops.wait_tensor._schema.arguments) == 1
    assert ops.wait_tensor.namespace == "_c10d_functional"


@pytest.mark.parametrize("backward", [False, True])
def test_attention_on_the_cpu_has_the_arguments_of_the_other(backward: bool) -> None:
    """Its formula of FLOPs is then the other's, which torch up to 2.14 has alone."""

    def first(packet: ops.OpOverloadPacket) -> list[str]:
        return [argument.name for argument in packet.default._schema.arguments][: 4 if backward else 3]

    name = "_scaled_dot_product_flash_attention" + ("_backward" if backward else "")
    on_cpu = getattr(torch.ops.aten, name.replace("attention", "attention_for_cpu"))
    other = getattr(torch.ops.aten, name)
    assert first(on_cpu) == first(other)
    assert other in flop_registry


def test_schemas_distinguish_writes_from_views() -> None:
    written = torch.ops.aten.add_.Tensor._schema.arguments[0].alias_info
    viewed = torch.ops.aten.view.default._schema.arguments[0].alias_info
    assert written is not None
    assert written.is_write
    assert viewed is not None
    assert not viewed.is_write
    assert torch.ops.aten.add.Tensor._schema.arguments[0].alias_info is None


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


def test_other_tensors_and_symbolic_sizes_are_left_to_torch() -> None:
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


def test_torch_has_its_own_converter_back() -> None:
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
    """For a constant, and for a tensor with a memoized data-dependent result."""
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
