"""Notices a hand-written optimizer that looks at more than single elements.

Its state's shapes do not always tell: a norm leaves nothing behind, and a mean over rows, of which a flat piece has
one, leaves a single number as a step count does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_zero.compat.tensors import tree_leaves
from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.formulas import has_rules
from lightning_zero.optim.support import INSTEAD, is_of_torch
from lightning_zero.sharding.reductions import BY_NAME, is_of_two
from lightning_zero.sharding.rules import MEASURES, measure, words
from lightning_zero.step.layout import StepLayout

if TYPE_CHECKING:
    from lightning_zero.sharding.layout import ShardLayout

__all__ = ["WATCHED", "Watch", "needs_watching"]

# Steps in which each parameter is stepped by itself, as code may ask for its shape. After that, neighbours are stepped
# together, unless it has asked. Some optimizers begin to look at shapes only after a warm-up of a few steps.
WATCHED = 16

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
    """Inside, shapes are those of full parameters, and what takes elements of a parameter together is refused.

    Each call of torch takes some microseconds longer.

    Attributes:
        reads_shapes: the step has asked a parameter, a gradient or state for its shape.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layout: StepLayout) -> None:
        super().__init__()
        self._optimizer = type(optimizer).__name__
        self._segments = layout.segments
        self._least = min((segment.param.numel() for segment in layout.segments), default=0)
        self.reads_shapes = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # Dynamo follows this function, too
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if name in MEASURES and args and self._is_piece(args[0]):
            return self._measured(name, func, args, kwargs)
        together = name.rpartition("foreach_")[2] in _TOGETHER or name.startswith("linalg_")  # of lists, too
        if together and not is_of_two(name, args, kwargs) and any(map(self._is_piece, tree_leaves((args, kwargs)))):
            self._refuse(f"takes {name} of a parameter, a gradient or state")
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if any(map(self._is_piece, tree_leaves((args, kwargs)))):
                error.add_note(
                    f"lightning_zero: in the step() of {self._optimizer} each rank has a flat part of every parameter. "
                    "State that fits is made by torch.zeros_like(p), not by torch.zeros(p.shape)."
                )
            raise

    def _measured(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        piece = args[0]
        alike = [s for s in self._segments if s.param.numel() == piece.numel()]
        own = [s for s in alike if piece.data_ptr() in (s.param.data_ptr(), s.grad.data_ptr())] or alike
        layouts = {(s.members[0].layout if len(s.members) == 1 else None) for s in own}
        layout: ShardLayout | None = layouts.pop() if len(layouts) == 1 else None
        if name in ("dim", "ndim", "ndimension") and layout is None:
            return func(*args, **kwargs)  # parameters with different numbers of dimensions are not stepped together
        self.reads_shapes = True
        if layout is None and own:
            self._refuse(f"asks for the {name} of a parameter, a gradient or state")
        return func(*args, **kwargs) if layout is None else measure(name, layout, args, kwargs)

    def _is_piece(self, value: Any) -> bool:
        # Of the module's own parameters, which are in sight, all ranks take norms together.
        if not isinstance(value, Tensor) or "_zero_sight" in value.__dict__:
            return False
        return value.numel() >= self._least

    def _refuse(self, does: str) -> NoReturn:
        raise UnsupportedError(
            f"The step() of {self._optimizer} {does}. Each rank holds only a "
            f"flat piece of every parameter, and sees several of them as one, so it would train wrongly. {INSTEAD} A "
            "number that is only reported belongs in on_before_optimizer_step (in a loop of your own: before step()), "
            "where p.grad.norm() is of the whole gradient."
        )
