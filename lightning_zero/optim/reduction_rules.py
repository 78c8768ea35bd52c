"""Update rules of optimizers that need sums over whole parameters, such as LAMB, LARS and Adafactor.

Each rank computes the terms of its shard, and ranks add up a few sums: of all elements, of each row, or of each column.
No rank needs a full matrix. State that belongs to rows or columns is small, and every rank stores all of it.
``optim/parameter_sums.py`` adds up, and ``optim/step_kernel.py`` steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.matrix_rules import MatrixRule, Tensors
from lightning_zero.sharding.layout import ShardLayout

ROWS, COLUMNS = "rows", "columns"


def row_shape(shape: torch.Size) -> torch.Size:
    """Return the shape of one value per row: (..., rows, 1)."""
    return torch.Size((*shape[:-1], 1))


def column_shape(shape: torch.Size) -> torch.Size:
    """Return the shape of one value per column: (..., 1, columns)."""
    return torch.Size((*shape[:-2], 1, shape[-1]))


@dataclass(frozen=True, eq=False)
class Reduction:
    """Sums over a parameter, and the values that are computed from them.

    Values are 0-dim, or have the shape of :func:`row_shape` or :func:`column_shape`. ``terms`` and ``apply`` receive
    the value of each element.

    Attributes:
        names: Names of the terms.
        terms: (parameter, gradient, state, scalars, values of earlier reductions; flat shards in float32) -> tensors of
            the shard's size, by name, which are added up.
        values: (sums, shared state, scalars, the full parameter's shape) -> (values by name, new shared state). It must
            give the same result on every rank.
        over: Names of terms that are added up along ``"rows"`` or ``"columns"``: one sum per row, or per column. Other
            sums are of all elements, and 0-dim.
    """

    names: tuple[str, ...]
    terms: Callable[[Tensor, Tensor, Tensors, Tensors, Tensors], Tensors]
    values: Callable[[Tensors, Tensors, Tensors, torch.Size], tuple[Tensors, Tensors]]
    over: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ReductionRule:
    """The update of one optimizer that needs sums over whole parameters.

    Attributes:
        settings: Floats of a parameter group that the rule reads, by name; ``"betas.0"`` is the first of a pair.
        state: Names of the parameter-shaped state, which is sharded. If parameters differ in it, all names.
        scalars: (settings and ``counts``, all 0-dim float64; step count) -> 0-dim float64 tensors, including the new
            ``counts`` other than ``step``. The step count is NaN unless ``counts`` has ``"step"``.
        reductions: Made one after the other. None of them changes ``state``.
        apply: (parameter, gradient, state, scalars, values of all reductions; flat shards in float32) -> (new
            parameter, new state). Elementwise.
        shared: Shape of the state that every rank stores in full, by name, from the parameter's shape.
        counts: Names of 0-dim state. ``"step"`` counts the steps, from 1.
        by_parameter: (parameter's shape, dtype) -> the rule of this parameter, if parameters of one group differ.
            Return one object for parameters that are alike. Its settings, scalars and counts are those of this rule.
    """

    settings: tuple[str, ...]
    state: tuple[str, ...]
    scalars: Callable[[Tensors, Tensor], Tensors]
    reductions: tuple[Reduction, ...]
    apply: Callable[[Tensor, Tensor, Tensors, Tensors, Tensors], tuple[Tensor, Tensors]]
    shared: Mapping[str, Callable[[torch.Size], torch.Size]] = field(default_factory=dict)
    counts: tuple[str, ...] = ()
    by_parameter: Callable[[torch.Size, torch.dtype], ReductionRule] | None = None

    def of(self, shape: torch.Size, dtype: torch.dtype) -> ReductionRule:
        """Return the rule of a parameter of this shape and dtype."""
        return self if self.by_parameter is None else self.by_parameter(shape, dtype)


def of_parameter(rule: Any, shape: torch.Size, dtype: torch.dtype) -> Any:
    """Return the rule of one parameter; rules of other kinds are the same for all."""
    return rule.of(shape, dtype) if isinstance(rule, ReductionRule) else rule


def check_rows(layout: ShardLayout, over: Mapping[str, str], name: str) -> None:
    """Raise :class:`UnsupportedError` if sums of rows or columns are not possible for this layout."""
    if not over:
        return
    if len(layout.shape) < 2:
        raise UnsupportedError(
            f"The rule of {name!r} adds up rows or columns, but its shape is {tuple(layout.shape)}. Return another "
            "rule from ReductionRule.by_parameter for parameters of fewer than two dimensions."
        )
    if layout.order is not None:
        raise UnsupportedError(
            f"The rule of {name!r} adds up rows or columns, but its elements are stored in another order "
            "(channels_last). Leave out module.to(memory_format=torch.channels_last), or give the parameter to AdamW."
        )


def shared_shapes(rule: Any, shape: torch.Size) -> dict[str, torch.Size]:
    """Return the shapes of the state that every rank stores in full for a parameter, by name."""
    if isinstance(rule, ReductionRule):
        return {name: shape_of(shape) for name, shape_of in rule.shared.items()}
    return rule.shared_shapes(shape) if isinstance(rule, MatrixRule) else {}


def shared_names(rule: Any) -> frozenset[str]:
    """Return the names of the state that every rank stores in full."""
    if isinstance(rule, ReductionRule):
        return frozenset(rule.shared)
    return frozenset(rule.shared(1, 1)) if isinstance(rule, MatrixRule) and rule.shared is not None else frozenset()


def shared_bytes(rule: Any, shape: torch.Size, dtype: torch.dtype) -> int:
    """Return the bytes of a parameter's state that every rank stores in full."""
    return sum(own.numel() for own in shared_shapes(rule, shape).values()) * dtype.itemsize
