"""Detect a custom optimizer whose step is not elementwise.

State shapes do not always show it: a norm leaves no state, and a mean over the rows of a flat shard leaves a single
number, as a step count does. :class:`ElementwiseCheck` therefore intercepts torch calls during the step.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_zero.compat.tensors import tree_leaves
from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.flat_runs import FlatRun
from lightning_zero.optim.support import INSTEAD, OTHERS, is_torch_optimizer
from lightning_zero.optim.update_rules import has_rules
from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.shard_reductions import REDUCTIONS, is_elementwise_pair
from lightning_zero.sharding.shard_rules import query_full_shape, words
from lightning_zero.step.step_layouts import StepLayout

# Number of first steps that step each parameter by itself, because the optimizer's code may read shapes. Later,
# neighbors are joined unless it has. Some optimizers begin to read shapes only after a warmup of a few steps.
CHECKED_STEPS = 16

# Many optimizers check if all values are finite or equal; the result decides nothing in a healthy training.
_HARMLESS_REDUCTIONS = words("all any equal item __float__ __int__ __bool__ is_nonzero")
_CROSS_ELEMENT_OPS = (REDUCTIONS.keys() - _HARMLESS_REDUCTIONS) | words(
    "nansum nanmean prod var_mean std_mean dot vdot "
    "median nanmedian quantile nanquantile sort argsort topk kthvalue argmax argmin cumsum cumprod logsumexp "
    "softmax log_softmax normalize cosine_similarity dist renorm histc matmul mm bmm mv addmm addmv addr outer "
    "inner einsum tensordot linear trace svd qr __matmul__ __rmatmul__ diag tril triu flip roll"
)


def needs_elementwise_check(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer is neither torch's nor has a registered rule."""
    return not is_torch_optimizer(optimizer) and not has_rules(optimizer, optimizer.param_groups)


_ABOUT_SHAPES = re.compile(
    r"\b(shapes?|sizes?|dim(ension)?s?|broadcast|mat1|ind(ex|ices)|(un)?pack|numel)\b", re.IGNORECASE
)


def explain_shape_error(optimizer: torch.optim.Optimizer, error: Exception) -> None:
    """Raise :class:`UnsupportedError` if the optimizer's own code may have failed because shards are flat."""
    other = isinstance(error, torch.OutOfMemoryError) or type(error).__module__.startswith("lightning_zero.")
    line = next(iter(str(error).splitlines()), "")
    if other or not needs_elementwise_check(optimizer) or not _ABOUT_SHAPES.search(line):
        return
    raise UnsupportedError(
        f"The step() of {type(optimizer).__name__} failed ({type(error).__name__}: {line}). Each rank holds only a "
        f"flat piece of every parameter, which an optimizer of full matrices cannot step. {INSTEAD} {OTHERS} "
        "If its rule is elementwise, make its state by torch.zeros_like(p)."
    ) from error


_SIZES = words("numel nelement nbytes __len__")
_DIMENSIONS = words("dim ndim ndimension")


def _selects_elements(index: Any) -> bool:
    """Return True if an index selects elements by position, as no mask does."""
    return isinstance(index, int | slice) and index != slice(None)


class ShardShape(tuple[int, ...]):
    """Shape of a flat shard: torch sees the shard's sizes, and Python code the full parameter's.

    Args:
        sizes: Sizes of the shard.
        full: Returns the full parameter's shape, or raises an error that names the optimizer.
    """

    def __new__(cls, sizes: torch.Size, full: Callable[[], torch.Size]) -> ShardShape:
        return super().__new__(cls, sizes)

    def __init__(self, sizes: torch.Size, full: Callable[[], torch.Size]) -> None:
        self._full = full

    def __getitem__(self, index: Any) -> Any:
        return self._full()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._full())

    def numel(self) -> int:
        """Return the number of elements of the full parameter."""
        return self._full().numel()


class ElementwiseCheck(TorchFunctionMode):
    """Shows full parameters' shapes in this mode, and raises for ops that combine elements of a parameter.

    Each torch call takes some microseconds longer.

    Attributes:
        reads_shapes: The step has read a parameter's, a gradient's or state's shape.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layout: StepLayout) -> None:
        super().__init__()
        self._optimizer = type(optimizer).__name__
        self._by_address = {
            tensor.data_ptr(): run
            for run in layout.runs
            for tensor in (run.param, run.grad, *run.state.values())
            if isinstance(tensor, Tensor)
        }
        self._derived: Any = WeakTensorKeyDictionary()  # runs from which results were computed elementwise
        self._sizes = {run.param.numel() for run in layout.runs}
        self._min_numel = min(self._sizes, default=0)
        self.reads_shapes = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # Dynamo traces this function, too
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        by_torch = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")  # Dynamo reads sizes
        if args and not by_torch and self._is_shard(args[0]):
            if name in ("shape", "size"):
                return self._shape(func, args, kwargs)
            if name in _DIMENSIONS or name in _SIZES:
                return self._measured(name, func, args, kwargs)
            if name == "__getitem__" and any(
                map(_selects_elements, args[1] if isinstance(args[1], tuple) else args[1:])
            ):
                self._raise_unsupported("takes a row, or a part of one, of a parameter, a gradient or state")
        # foreach ops, too
        combines = name.rpartition("foreach_")[2] in _CROSS_ELEMENT_OPS or name.startswith("linalg_")
        if (
            combines
            and not is_elementwise_pair(name, args, kwargs)
            and any(map(self._is_shard, tree_leaves((args, kwargs))))
        ):
            self._raise_unsupported(f"takes {name} of a parameter, a gradient or state")
        result = func(*args, **kwargs)
        self._note(result, args)
        return result

    def _note(self, result: Any, args: Any) -> None:
        """Remember the run of each result: that of the first argument, or of the same position in its list."""
        pairs = zip(result, args[0], strict=False) if isinstance(result, list | tuple) else [(result, *args[:1])]
        for derived, *sources in pairs if args else ():
            run = self._run_of(sources[0]) if sources else None
            if run is not None and isinstance(derived, Tensor) and derived.numel() == run.param.numel():
                self._derived[derived] = run

    def _run_of(self, value: Any) -> FlatRun | None:
        if not isinstance(value, Tensor) or "_zero_spec" in value.__dict__:
            return None
        return self._by_address.get(value.data_ptr()) or self._derived.get(value)

    def _shape(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if args[0].numel() not in self._sizes:  # a tensor of the optimizer's own
            return func(*args, **kwargs)
        dim = args[1] if func is Tensor.size and len(args) > 1 else kwargs.get("dim")
        if dim is None:
            return ShardShape(func(*args, **kwargs), lambda: self._full_shape(args[0]))
        return self._full_shape(args[0])[dim]

    def _full_shape(self, shard: Tensor) -> torch.Size:
        return self._layout(shard, "the shape").shape

    def _measured(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        shard = args[0]
        run = self._run_of(shard)
        is_single = run is not None and len(run.members) == 1
        # Parameters that are stepped together have the same number of dimensions.
        if shard.numel() not in self._sizes or (name in _DIMENSIONS and not is_single):
            return func(*args, **kwargs)
        return query_full_shape(name, self._layout(shard, f"the {name}"), args, kwargs)

    def _layout(self, shard: Tensor, description: str) -> ShardLayout:
        run = self._run_of(shard)
        self.reads_shapes = True
        if run is None or len(run.members) > 1:
            self._raise_unsupported(f"asks for {description} of a parameter, a gradient or state")
        return run.members[0].layout

    def _is_shard(self, value: Any) -> bool:
        # All ranks compute norms of the module's own parameters together.
        if not isinstance(value, Tensor) or "_zero_spec" in value.__dict__:
            return False
        return value.numel() >= self._min_numel

    def _raise_unsupported(self, does: str) -> NoReturn:
        raise UnsupportedError(
            f"The step() of {self._optimizer} {does}. Each rank holds only a "
            f"flat piece of every parameter, and steps several of them as one, so it would train wrongly. {INSTEAD} A "
            "number that is only reported belongs in on_before_optimizer_step (in a loop of your own: before step()), "
            "where p.grad.norm() is that of the full gradient."
        )
