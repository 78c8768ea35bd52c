"""Load the library, and register fakes and derivatives of its ops with torch.

``gather(shard, shape, dtype)`` returns the full parameter. Its derivative is ``reduce(grad, shard)``, which enqueues
the gradient in the executor. Autograd itself receives no gradient: the executor attaches ``param.grad`` when the
backward pass ends. In a traced graph, ``reduce`` must return a gradient of the shard's shape, or it would be removed as
unused.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.tensors import FakeTensor, FunctionalTensor
from lightning_zero.errors import NativeBuildError
from lightning_zero.native import prebuilt
from lightning_zero.native.build import build
from lightning_zero.native.cache import default_cache
from lightning_zero.native.ops import NAMESPACE, OPS

log = logging.getLogger(__name__)


@functools.cache
def load() -> None:
    """Build if needed, load and register; once per process."""
    _load_library()
    for op in OPS.values():
        torch.library.register_fake(f"{NAMESPACE}::{op.name}", op.fake)
        if op.has_effect:
            torch.fx.node.has_side_effect(op.overload)
    torch.library.register_autograd(f"{NAMESPACE}::gather", _backward_of_four, setup_context=_keep_shard)
    torch.library.register_autograd(f"{NAMESPACE}::gather_eager", _gather_backward, setup_context=_keep_shard)


def _load_library() -> None:
    library = build()
    try:
        if library.parent == prebuilt.FOLDER:
            try:
                torch.ops.load_library(str(library))
                return
            except OSError as error:  # such as an older libstdc++ than that of the wheel's builder
                log.warning("The wheel's C++ executor is not used: %s.", error.__cause__ or error)
                library = build(default_cache())
        torch.ops.load_library(str(library))
    except OSError as error:
        raise NativeBuildError(
            f"The C++ executor {library} does not load with torch {torch.__version__}: {error}. Delete that file to "
            "build it again, or set LIGHTNING_ZERO_CACHE to another directory, if machines of different kinds share "
            "this one (the file built-by next to it names the compiler)."
        ) from error


def _keep_shard(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Not save_for_backward: it would reject a bias that an optimizer has stepped between two backward passes, which
    # plain modules allow. If the weight's values matter, the saved weight itself is checked.
    ctx.shard = inputs[0]
    # Gradients are enqueued in the weight's memory order.
    ctx.order = None
    if not output.is_contiguous():
        ctx.order = sorted(range(output.dim()), key=lambda dim: -output.stride()[dim])
    # No gradient must stay None: zeros would count as a gradient, and weight decay would change the parameter.
    ctx.set_materialize_grads(False)


def _gather_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
    if grad is None:
        return None, None, None
    if grad.layout != torch.strided:  # nn.Embedding(sparse=True)
        grad = grad.to_dense()
    if ctx.order is not None:
        grad = grad.permute(ctx.order)
    if isinstance(grad, FakeTensor | FunctionalTensor):
        return torch.ops.lightning_zero.reduce(grad, ctx.shard), None, None
    torch.ops.lightning_zero.reduce_add(grad, ctx.shard)
    return None, None, None


def _backward_of_four(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
    return *_gather_backward(ctx, grad), None
