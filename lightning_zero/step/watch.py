"""Notices a hand-written optimizer that looks at more than single elements.

Its state's shapes do not always tell: a norm leaves nothing behind, and a mean over rows, of which a flat piece has
one, leaves a single number as a step count does.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_zero.compat.tensors import tree_leaves
from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.formulas import has_rules
from lightning_zero.optim.support import INSTEAD, is_of_torch
from lightning_zero.sharding.reductions import BY_NAME, is_of_two
from lightning_zero.sharding.rules import words
from lightning_zero.step.layout import StepLayout

__all__ = ["WATCHED", "Watch", "needs_watching"]

WATCHED = 16  # steps: each call of torch takes some microseconds longer in them

# Whether all is finite, or the same, is asked by many, and decides nothing in a training that is well.
_HARMLESS = words("all any equal allclose item __float__ __int__ __bool__ is_nonzero")
_TOGETHER = (BY_NAME.keys() - _HARMLESS) | words(
    "median nanmedian quantile nanquantile sort argsort topk kthvalue argmax argmin cumsum cumprod logsumexp "
    "softmax log_softmax normalize cosine_similarity dist renorm histc matmul mm bmm mv addmm addmv addr outer "
    "inner einsum tensordot linear trace svd qr __matmul__ __rmatmul__"
)


def needs_watching(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nobody knows that this optimizer treats elements one by one: it is neither torch's nor has a rule."""
    return not is_of_torch(optimizer) and not has_rules(optimizer, optimizer.param_groups)


class Watch(TorchFunctionMode):
    """Inside, what takes elements of this layout's parameters together is refused."""

    def __init__(self, optimizer: torch.optim.Optimizer, layout: StepLayout) -> None:
        super().__init__()
        self._optimizer = type(optimizer).__name__
        self._least = min((segment.param.numel() for segment in layout.segments), default=0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # Dynamo follows this function, too
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        together = name.rpartition("foreach_")[2] in _TOGETHER or name.startswith("linalg_")  # of lists, too
        if together and not is_of_two(name, args, kwargs) and any(map(self._is_piece, tree_leaves((args, kwargs)))):
            self._refuse(name)
        return func(*args, **kwargs)

    def _is_piece(self, value: Any) -> bool:
        # Of the module's own parameters, which are in sight, all ranks take norms together.
        return isinstance(value, Tensor) and "_zero_sight" not in value.__dict__ and value.numel() >= self._least

    def _refuse(self, name: str) -> NoReturn:
        raise UnsupportedError(
            f"The step() of {self._optimizer} takes {name} of a parameter, a gradient or state. Each rank holds only a "
            f"flat piece of every parameter, and sees several of them as one, so it would train wrongly. {INSTEAD} A "
            "number that is only reported belongs in on_before_optimizer_step (in a loop of your own: before step()), "
            "where p.grad.norm() is of the whole gradient."
        )
