"""Make ops on the CPU behave as on a GPU where that changes the memory of a training step.

Plans use fake CPU tensors, because fake CUDA tensors need a build of torch with CUDA. Two things differ: autocast
computes other ops in float32 on CUDA, and attention with dropout keeps no score matrix there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_zero.compat.patches import swap_attribute
from lightning_zero.compat.tensors import tree_map_only

# Ops that autocast runs in float32 on CUDA but not on the CPU, from torch's ATen/autocast_mode.h.
_FLOAT32_OPS = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm cosine_similarity "
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss soft_margin_loss binary_cross_entropy_with_logits dist cdist renorm "
    "logsumexp"
)
# Ops that autocast asks for a float32 result on CUDA, unless the caller passes a dtype.
_FLOAT32_RESULTS = "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList"
_KEY = "AutocastCPU"
DROPOUT = 4  # position of dropout_p among the arguments of attention
_LOW_PRECISION = (torch.bfloat16, torch.float16)


@contextmanager
def emulate_gpu_ops() -> Iterator[None]:
    """Give this process's CPU autocast the rules of CUDA, and attention no dropout, within the context."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that kernels are overridden
            for names, kernel in ((_FLOAT32_OPS, _float32_kernel), (_FLOAT32_RESULTS, _float32_result_kernel)):
                for name in names.split():
                    if (op := _op(name)) is not None:
                        library.impl(name, kernel(op), _KEY, allow_override=True)
        attention = _without_dropout(F.scaled_dot_product_attention)
        with swap_attribute(F, "scaled_dot_product_attention", attention):
            yield
    finally:
        library._destroy()


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _float32_kernel(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            args, kwargs = tree_map_only(Tensor, _to_float32, (args, kwargs))
            return op(*args, **kwargs)

    return kernel


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOW_PRECISION else tensor


def _float32_result_kernel(op: Any) -> Callable[..., Any]:
    def kernel(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            if tensor.dtype in _LOW_PRECISION and kwargs.get("dtype") is None and len(args) < _dtype_position(op):
                kwargs["dtype"] = torch.float32
            return op(tensor, *args, **kwargs)

    return kernel


def _dtype_position(op: Any) -> int:
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    return names.index("dtype") if "dtype" in names else len(names)


def _without_dropout(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return attention without dropout, whose mask a GPU draws again instead of storing it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > DROPOUT:
            args = (*args[:DROPOUT], 0.0, *args[DROPOUT + 1 :])
        kwargs.pop("dropout_p", None)
        return attention(*args, **kwargs)

    return call
