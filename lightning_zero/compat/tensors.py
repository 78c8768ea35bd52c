"""Tensors, their subclasses, the state of autograd, ops in graphs, and containers of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import DisableTorchFunctionSubclass, SymBool, SymFloat, SymInt, Tensor, nn
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.compat.lookup import private
from lightning_zero.compat.patches import Patch

# While a graph is traced, the derivative of a gather returns a gradient instead of storing it. (torch 2.11+)
FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor")

# Inside, tensors have shapes and no memory: training is planned on them. (torch 2.11+)
FakeTensorMode = private("torch._subclasses.fake_tensor.FakeTensorMode")

# Inside, no dispatch mode is active; modes that count, fake and trace are nested. (torch 2.11+)
no_dispatch_modes = private("torch.utils._python_dispatch._disable_current_modes")

# Wraps fake tensors while AOTAutograd traces. (torch 2.11+)
FunctionalTensor = private("torch._subclasses.functional_tensor.FunctionalTensor")

# Inside, torch does not look up Python kernels of ops, which triples the cost of empty_strided(). (torch 2.11+)
no_python_dispatcher = private("torch._C._DisablePythonDispatcher")

# Copies many small tensors in one kernel. (torch 2.11+)
foreach_copy = private("torch._foreach_copy_")

# Computes many small norms in one kernel. (torch 2.11+)
foreach_norm = private("torch._foreach_norm")

# Returns these and a specification of the containers. (torch 2.11+)
tree_flatten = private("torch.utils._pytree.tree_flatten")

# Builds the containers from both. (torch 2.11+)
tree_unflatten = private("torch.utils._pytree.tree_unflatten")


def tree_leaves(tree: Any) -> list[Any]:
    """Return the values in nested containers, without the containers."""
    return tree_flatten(tree)[0]  # type: ignore[no-any-return]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return equal containers of the function's results."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([function(leaf) for leaf in leaves], spec)


def tree_map_only(kinds: type | tuple[type, ...], function: Callable[[Any], Any], tree: Any) -> Any:
    """Return equal containers in which the function has replaced values of some types."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, kinds) else leaf, tree)


def _class_of(value: Any) -> Any:
    return type(value)


# The type of a node's target, and of an op with all its overloads.
OpOverload, OpOverloadPacket = _class_of(torch.ops.aten.add.Tensor), _class_of(torch.ops.aten.add)


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share storage. Fake tensors have no address."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


SYMBOLIC = (SymInt, SymFloat, SymBool)


def size_key(size: Any) -> Any:
    """Return a size, or a number that follows from sizes, or its formula of symbols; None for others.

    Equal formulas of one graph are equal sizes. To compare symbolic sizes themselves would add a guard.
    """
    if not isinstance(size, SYMBOLIC):
        return size
    # Sizes of nested tensors have other nodes. (torch 2.11+)
    if not isinstance(size.node, SymNode) or free_unbacked_symbols(size):
        return None
    formula = size.node.expr
    # Symbols of floats stand for numbers in the code that have changed.
    if not all(symbol.is_integer for symbol in formula.free_symbols):
        return None
    return int(formula) if isinstance(size, SymInt) and formula.is_number else formula


def size_of(formula: Any, like: Any) -> int | SymInt:
    """Return the symbolic size of a formula in the graph of a fake tensor."""
    return like.fake_mode.shape_env.create_symintnode(formula, hint=None)  # type: ignore[no-any-return]


def layout_key(value: Tensor) -> tuple[Any, ...]:
    """Return dtype, device, and the keys of sizes and strides, which are compared without a guard."""
    return value.dtype, value.device, *map(size_key, value.shape), *map(size_key, value.stride())


# Makes a tensor with a shape and a dtype that asks its class for all else: a checkpoint's values before they are read.
# Torch's notes on extending it name it. (torch 2.11+)
make_wrapper_subclass = private("torch.Tensor._make_wrapper_subclass")

# Receives every op that runs eagerly inside, in backward too. Torch's notes on extending it name it. (torch 2.11+)
TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")

# The id of the backward on this thread, or -1: a checkpointed module is called again inside backward. (torch 2.11+)
graph_task_id = private("torch._C._current_graph_task_id")

# True if the backward retains its graph (retain_graph=True), so compiled code has to keep saved tensors. (torch 2.11+)
retains_graph = private("torch._C._autograd._get_current_graph_task_keep_graph")

# The innermost hooks for saved tensors: if a user's are inside ours, ours must stay in place. (torch 2.11+)
top_saved_tensors_hooks = private("torch._C._autograd._top_saved_tensors_default_hooks")

# True inside torch.func (grad, vmap, ...), where compiled code cannot run. (torch 2.11+)
inside_functorch = private("torch._C._are_functorch_transforms_active")

# Tensor.to() in graphs. (torch 2.11+)
to_copy = private("torch.ops.aten._to_copy.default")

# Tensor.view() in graphs, next to matrix products of more than two dimensions. (torch 2.11+)
unsafe_view = private("torch.ops.aten._unsafe_view.default")

# Indexing without a check of bounds, which Inductor would write into the kernel that dequantizes. (torch 2.11+)
unsafe_index = private("torch.ops.aten._unsafe_index.Tensor")

# A product of fp8 matrices, each with a scale. (torch 2.11+)
scaled_mm = private("torch.ops.aten._scaled_mm.default")

# Ends a functional collective in a user's graph. (torch 2.11+)
wait_tensor = private("torch.ops._c10d_functional.wait_tensor.default")

# Calls of torch.utils.checkpoint in Dynamo's graphs; arguments are the graph and its inputs. (torch 2.11+)
CHECKPOINTS = {
    private(f"torch.ops.higher_order.{name}") for name in ("tag_activation_checkpoint", "wrap_activation_checkpoint")
}

ATTRIBUTES = {
    # Counts in-place writes to a tensor: checked for saved weights and inputs of captured graphs. (torch 2.11+)
    "torch.Tensor._version",
    # The base of a view, from which a saved view of a weight is rebuilt. (torch 2.11+)
    "torch.Tensor._base",
    # Hooks of register_hook; assigning None also removes those of C++. (torch 2.11+)
    "torch.Tensor._backward_hooks",
    # Hooks of register_post_accumulate_grad_hook. (torch 2.11+)
    "torch.Tensor._post_accumulate_grad_hooks",
    # Prefix of functions on lists of tensors. (torch 2.11+)
    "torch._foreach_",
    # Prefix of fused functions of optimizers. (torch 2.11+)
    "torch._fused_",
    # The arguments that an op mutates, or returns views of. (torch 2.11+)
    "torch._ops.OpOverload._schema",
    # The namespace of functional collectives. (torch 2.11+)
    "torch.ops._c10d_functional",
}

_WEIGHTS = Patch(
    "fake tensors of weights are made from their sizes only",
    {
        # Makes fake tensors from real ones, and memoizes them. (torch 2.11+)
        "torch._subclasses.fake_tensor.FakeTensorConverter.from_real_tensor": (
            "self, fake_mode, t, make_constant, shape_env, source, symbolic_context, trace"
        ),
    },
)


@_WEIGHTS
@contextmanager
def fake_weights_from_sizes(*kinds: type[nn.Parameter]) -> Iterator[None]:
    """Make fake tensors of parameters of these classes from their sizes, without a gradient.

    They have memory of their own. Torch also makes fake tensors of the gradient and of the bases of both, and checks
    each size for symbols: 1.2 CPU seconds for 48 layers. Dynamo reads the gradient from the parameter.
    """

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def from_real_tensor(
            self: Any, mode: Any, tensor: Tensor, make_constant: bool = False, shape_env: Any = None, **how: Any
        ) -> Any:
            with DisableTorchFunctionSubclass():
                known = type(tensor) in kinds and not make_constant
                if known and _is_plain(tensor) and (shape_env is None or _is_static(how.get("symbolic_context"))):
                    fake = self._get_memo(tensor)
                    if fake is None:
                        fake = _fake_from_sizes(mode, tensor)
                        self.set_tensor_memo(tensor, fake)
                    return fake
            return plain(self, mode, tensor, make_constant, shape_env, **how)

        return from_real_tensor

    with _WEIGHTS.replace({"from_real_tensor": make}):
        yield


def _is_static(context: Any) -> bool:
    sizes = getattr(context, "dynamic_sizes", None)
    return sizes is not None and all(size is DimDynamic.STATIC for size in sizes)


def _is_plain(tensor: Tensor) -> bool:
    """Return True if sizes and dtype determine the results of ops on the tensor, and on its gradient."""
    if not tensor.is_leaf or inside_functorch():  # a transform wraps tensors that are made inside
        return False
    plain = tensor.layout is torch.strided and not (tensor.is_neg() or tensor.is_conj() or tensor.is_quantized)
    return plain and getattr(tensor, "grad_dtype", tensor.dtype) is tensor.dtype


def _fake_from_sizes(mode: Any, tensor: Tensor) -> Any:
    with no_dispatch_modes(), no_python_dispatcher():
        memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, memory, tensor.device).requires_grad_(tensor.requires_grad)


def fake_like(value: Any, memory: Tensor) -> Any:
    """Return a fake tensor like ``value`` with the sizes of ``memory``, a view of a meta tensor.

    Four times as fast as torch's constructor, which is called 400 times for each layer.
    """
    # The device and the mode; more if it has a constant, or sizes that depend on values. (torch 2.11+)
    known = [was for was in vars(value).values() if was is not None]
    if type(value) is not FakeTensor or memory.device.type != "meta" or len(known) > 2:
        return FakeTensor(value.fake_mode, memory, value.device)
    # The steps of its constructor. (torch 2.11+)
    made = Tensor._make_subclass(
        FakeTensor, memory, memory.requires_grad, dispatch_device=True, device_for_backend_keys=value.fake_device
    )
    if value.fake_mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(vars(value))
    return made
