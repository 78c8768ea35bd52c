"""What ``compat/tensors.py`` takes from torch still means the same."""

import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.overrides import TorchFunctionMode

from lightning_zero.compat.tensors import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    FakeTensor,
    FunctionalTensor,
    disabled_torch_function,
    foreach_copy,
    foreach_norm,
    no_python_dispatcher,
    rebuild_parameter,
    tree_leaves,
    tree_map_only,
)


class Loud(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("asked")


class Quiet(Tensor):
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("asked")


def test_without_subclasses_nobody_is_asked() -> None:
    loud = torch.ones(2).as_subclass(Loud)
    with pytest.raises(AssertionError, match="asked"):
        loud + 1
    with DisableTorchFunctionSubclass():
        assert type(loud + 1) is Tensor


def test_without_torch_functions_no_mode_is_asked_either() -> None:
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


def test_both_are_seen_through_by_dynamo() -> None:
    def computed(x: Tensor) -> Tensor:
        with DisableTorchFunction(), DisableTorchFunctionSubclass():
            return x + 1

    compiled = torch.compile(computed, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2, 2]


def test_results_of_a_disabled_subclass_are_plain() -> None:
    quiet = torch.ones(2).as_subclass(Quiet)
    assert type(quiet) is Quiet
    assert type(quiet + 1) is Tensor


def test_a_rebuilt_parameter_is_one_and_is_what_pickle_names() -> None:
    made = rebuild_parameter(torch.ones(2), False, OrderedDict())
    assert type(made) is nn.Parameter
    assert not made.requires_grad
    function, arguments = nn.Parameter(torch.ones(2)).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    assert function is rebuild_parameter
    assert len(arguments) == 3


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


def test_version_counts_writes() -> None:
    x = torch.ones(2)
    before = x._version
    assert before == (x + 1)._version
    x.add_(1)
    assert x._version == before + 1


def test_base_is_what_a_view_is_of() -> None:
    x = torch.ones(2, 2)
    assert x._base is None
    assert x[0].t()._base is x


def test_hooks_of_a_parameter_may_be_taken_away_and_given_back() -> None:
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


def test_later_hooks_of_a_parameter_may_be_replaced() -> None:
    param, called = nn.Parameter(torch.ones(1)), []
    handle = param.register_post_accumulate_grad_hook(lambda p: called.append("user's"))
    hooks: Any = param._post_accumulate_grad_hooks
    [key] = hooks
    hooks[key] = lambda p: called.append("ours")
    param.sum().backward()
    assert called == ["ours"]
    handle.remove()
    assert not hooks


def test_fake_tensors_of_one_storage_show_it() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, y = torch.ones(4), torch.ones(4)
        assert x.untyped_storage()._cdata == x.view(2, 2).t().untyped_storage()._cdata
        assert x.untyped_storage()._cdata != y.untyped_storage()._cdata
