"""Fake tensors that Dynamo and AOTAutograd make of a graph's inputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import DimDynamic

from lightning_zero.compat.autograd import inside_functorch
from lightning_zero.compat.lookup import module
from lightning_zero.compat.ops import OpOverload
from lightning_zero.compat.patches import Patch, swap_attribute
from lightning_zero.compat.tensors import (
    DisableTorchFunctionSubclass,
    FakeTensor,
    no_python_dispatcher,
    no_dispatch_modes,
)

fake_tensor = module("torch._subclasses.fake_tensor")
meta_utils = module("torch._subclasses.meta_utils")

_GRADIENTS = Patch(
    "no fake tensors are made of gradients",
    {
        # A tensor's gradient, of which a fake is made with that of the tensor. (torch 2.11+)
        "torch._subclasses.meta_utils.safe_grad": "t",
    },
)
_WEIGHTS = Patch(
    "fake tensors of weights are made of their sizes alone",
    {
        # Makes fake tensors of others, and remembers them. (torch 2.11+)
        "torch._subclasses.fake_tensor.FakeTensorConverter.from_real_tensor": (
            "self, fake_mode, t, make_constant, shape_env, source, symbolic_context, trace"
        ),
    },
)
_RESULTS = Patch(
    "fake results of whole layers are made of their sizes alone",
    {
        # Makes the results of an op, or finds those of an equal call. (torch 2.11+)
        "torch._subclasses.fake_tensor.FakeTensorMode._cached_dispatch_impl": "self, func, types, args, kwargs",
    },
)


@_GRADIENTS
@contextmanager
def skip_gradient_fakes() -> Iterator[None]:
    """Inside, fakes have no gradients. In a forward parameters still have those of the step before; Dynamo gives those
    that code reads to a graph as inputs of their own, so for AOTAutograd each would be made in vain."""
    with swap_attribute(meta_utils, "safe_grad", lambda tensor: None):
        yield


@_WEIGHTS
@contextmanager
def fake_weights_from_sizes(*kinds: type[nn.Parameter]) -> Iterator[None]:
    """Inside, the fake of a parameter of one of these classes, whose sizes are numbers, is made of these alone, and has
    memory of its own, and no gradient: Dynamo looks for that at the parameter itself. Torch makes fakes of the gradient
    and of what both are views of, too, and asks for each size whether it is a symbol; for each weight of a model once
    for Dynamo and once for AOTAutograd."""
    converter: Any = fake_tensor.FakeTensorConverter
    plain = converter.from_real_tensor

    def from_real_tensor(
        self: Any, mode: Any, tensor: Tensor, make_constant: bool = False, shape_env: Any = None, **how: Any
    ) -> Any:
        with DisableTorchFunctionSubclass():
            known = type(tensor) in kinds and not make_constant
            if known and _is_plain(tensor) and (shape_env is None or _is_static(how.get("symbolic_context"))):
                fake = self._get_memo(tensor)
                if fake is None:
                    fake = _of_sizes(mode, tensor)
                    self.set_tensor_memo(tensor, fake)
                return fake
        return plain(self, mode, tensor, make_constant, shape_env, **how)

    with swap_attribute(converter, "from_real_tensor", from_real_tensor):
        yield


class Form(NamedTuple):
    """Of a tensor that shares no memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@_RESULTS
@contextmanager
def fake_from_specs(ops: Mapping[OpOverload, Callable[[Sequence[Any]], Sequence[Form]]]) -> Iterator[None]:
    """Inside, fakes of what these ops return are made of the forms that their arguments say."""
    plain = fake_tensor.FakeTensorMode._cached_dispatch_impl

    def made(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in ops:
            return plain(self, func, types, args, kwargs)
        with no_python_dispatcher():
            return [FakeTensor(self, _on_meta(form), form.device) for form in ops[func](args)]

    with swap_attribute(fake_tensor.FakeTensorMode, "_cached_dispatch_impl", made):
        yield


def _on_meta(form: Form) -> Tensor:
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")


def fake_like(value: FakeTensor, memory: Tensor) -> Any:
    """A fake tensor of the same mode and device with the sizes of ``memory``, a meta tensor, of which it is a view:
    what torch makes of these three in four times the time, which is asked for 400 times for each layer."""
    # Where it is and its mode; more where it has a constant in it, or numbers that depend on values. (torch 2.11+)
    known = [was for was in vars(value).values() if was is not None]
    if type(value) is not FakeTensor or memory.device.type != "meta" or len(known) > 2:
        return FakeTensor(value.fake_mode, memory, value.device)
    # As its own constructor does. (torch 2.11+)
    made = Tensor._make_subclass(
        FakeTensor, memory, memory.requires_grad, dispatch_device=True, device_for_backend_keys=value.fake_device
    )
    if value.fake_mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(vars(value))
    return made


def _is_static(context: Any) -> bool:
    sizes = getattr(context, "dynamic_sizes", None)
    return sizes is not None and all(size is DimDynamic.STATIC for size in sizes)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its sizes and its dtype say what ops make of it, and of its gradient."""
    if not tensor.is_leaf or inside_functorch():  # where a tensor that is made belongs to the transform
        return False
    plain = tensor.layout is torch.strided and not (tensor.is_neg() or tensor.is_conj() or tensor.is_quantized)
    return plain and getattr(tensor, "grad_dtype", tensor.dtype) is tensor.dtype


def _of_sizes(mode: Any, tensor: Tensor) -> Any:
    with no_dispatch_modes(), no_python_dispatcher():
        memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, memory, tensor.device).requires_grad_(tensor.requires_grad)
