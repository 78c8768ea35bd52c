"""Lets ops on the CPU give what they would give on a GPU, where the two differ in the memory of a training step.

A plan is made on fake tensors of the CPU: those of CUDA ask for a build of torch that has CUDA. Two things have to be
mended for that. Autocast widens other ops on a GPU: norms, softmax and losses compute in float32 there, and in bfloat16
on a CPU. And attention with dropout keeps no matrix of scores there.
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

__all__ = ["as_on_gpu"]

# What autocast computes in float32 on CUDA: the lists of torch's ATen/autocast_mode.h, without what a CPU widens, too.
_WIDENED = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "soft_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "cdist",
    "renorm",
    "logsumexp",
]
# Likewise, by the dtype that they are asked to give.
_ASKED = [
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "sum",
    "sum.dim_IntList",
]
_KEY = "AutocastCPU"
DROPOUT = 4  # the place of its share among the arguments of attention
_NARROW = (torch.bfloat16, torch.float16)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Inside, this process's autocast on the CPU has the rules of CUDA, and attention keeps no scores."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are there already is what this is about
            for name in _WIDENED:
                if (op := _op(name)) is not None:
                    library.impl(name, _widened(op), _KEY, allow_override=True)
            for name in _ASKED:
                if (op := _op(name)) is not None:
                    library.impl(name, _asked(op), _KEY, allow_override=True)
        attention = _keeps_no_scores(F.scaled_dot_product_attention)
        with swap_attribute(F, "scaled_dot_product_attention", attention):
            yield
    finally:
        library._destroy()


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _widened(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            args, kwargs = tree_map_only(Tensor, _wide, (args, kwargs))
            return op(*args, **kwargs)

    return kernel


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _NARROW else tensor


def _asked(op: Any) -> Callable[..., Any]:
    def kernel(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            if tensor.dtype in _NARROW and kwargs.get("dtype") is None and len(args) < _places(op):
                kwargs["dtype"] = torch.float32
            return op(tensor, *args, **kwargs)

    return kernel


def _places(op: Any) -> int:
    """Arguments by position behind the first, up to that of the dtype."""
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    return names.index("dtype") if "dtype" in names else len(names)


def _keeps_no_scores(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Flash attention on a GPU draws what it drops anew in backward; on a CPU dropout has other kernels."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > DROPOUT:
            args = (*args[:DROPOUT], 0.0, *args[DROPOUT + 1 :])
        kwargs.pop("dropout_p", None)
        return attention(*args, **kwargs)

    return call
