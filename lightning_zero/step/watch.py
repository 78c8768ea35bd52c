"""Notices a hand-written optimizer that looks at more than single elements.

Its state's shapes do not always tell: a norm leaves nothing behind, and a mean over rows, of which a flat piece has
one, leaves a single number as a step count does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
    "inner einsum tensordot linear trace svd qr __matmul__ __rmatmul__ diag tril triu flip roll"
)


def needs_watching(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nobody knows that this optimizer treats elements one by one: it is neither torch's nor has a rule."""
    return not is_of_torch(optimizer) and not has_rules(optimizer, optimizer.param_groups)


_GET_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


def _takes_some(index: Any) -> bool:
    """Return True if an index takes some of a dimension by their places, as no mask does."""
    return isinstance(index, int | slice) and index != slice(None)


class PieceShape(tuple[int, ...]):
    """The shape of a piece: it can be compared and allocated by, but its sizes are no parameter's.

    Args:
        sizes: of the dimensions.
        refuse: raises an error that names the optimizer.
    """

    def __new__(cls, sizes: torch.Size, refuse: Callable[[], NoReturn]) -> PieceShape:
        return super().__new__(cls, sizes)

    def __init__(self, sizes: torch.Size, refuse: Callable[[], NoReturn]) -> None:
        self._refuse, self.numel = refuse, sizes.numel

    def __getitem__(self, index: Any) -> Any:
        self._refuse()

    def __iter__(self) -> Iterator[int]:
        self._refuse()


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
        sized = name in ("size", "__len__", "__getitem__") or (name == "__get__" and func == _GET_SHAPE)
        # Dynamo reads sizes where a step is compiled.
        if (
            sized
            and not sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
            and self._is_piece(args[0])
        ):
            return self._sized(func, name, args, kwargs)
        together = name.rpartition("foreach_")[2] in _TOGETHER or name.startswith("linalg_")  # of lists, too
        if together and not is_of_two(name, args, kwargs) and any(map(self._is_piece, tree_leaves((args, kwargs)))):
            self._refuse(name)
        return func(*args, **kwargs)

    def _sized(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what depends on the shape of a piece, as far as that is the same for a whole parameter."""
        if name == "__len__" or (name == "size" and (len(args) > 1 or kwargs.get("dim") is not None)):
            self._refuse_size()
        if name == "__getitem__" and any(map(_takes_some, args[1] if isinstance(args[1], tuple) else args[1:])):
            self._refuse_size()
        found = func(*args, **kwargs)
        return found if name == "__getitem__" else PieceShape(found, self._refuse_size)

    def _is_piece(self, value: Any) -> bool:
        # Of the module's own parameters, which are in sight, all ranks take norms together.
        return isinstance(value, Tensor) and "_zero_sight" not in value.__dict__ and value.numel() >= self._least

    def _refuse_size(self) -> NoReturn:
        raise UnsupportedError(
            f"The step() of {self._optimizer} reads the size of a dimension, or a row, of a parameter, a gradient or "
            "state. Each rank holds only a flat piece of every parameter, and sees several of them as one, so it would "
            "train wrongly. A factor that depends on a parameter's shape belongs into a group of its own, "
            '{"params": [p], "lr": lr / math.sqrt(p.shape[-1])}; state is allocated by torch.zeros_like(p). '
            f"Otherwise: {INSTEAD}"
        )

    def _refuse(self, name: str) -> NoReturn:
        raise UnsupportedError(
            f"The step() of {self._optimizer} takes {name} of a parameter, a gradient or state. Each rank holds only a "
            f"flat piece of every parameter, and sees several of them as one, so it would train wrongly. {INSTEAD} A "
            "number that is only reported belongs in on_before_optimizer_step (in a loop of your own: before step()), "
            "where p.grad.norm() is of the whole gradient."
        )
