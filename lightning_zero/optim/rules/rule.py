"""What an update rule is, and what most of them begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Descent", "Rule", "StateNames", "Tensors"]

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """The update of one optimizer.

    Attributes:
        settings: Floats of a parameter group that the rule reads, by name; ``"betas.0"`` is the first of a pair.
        state: Names of the parameter-shaped state, which is sharded. For a registered rule, checkpoints assume that all
            other state is equal on every rank.
        scalars: (settings and ``counts``, all 0-dim float64; step count after this step, 0-dim) -> 0-dim float64
            tensors, including the new ``counts``.
        apply: (parameter, gradient, state, scalars; all float32) -> (new parameter, new state).
        counts: Names of the 0-dim state other than ``step``.
    """

    settings: tuple[str, ...]
    state: tuple[str, ...]
    scalars: Callable[[Tensors, Tensor], Tensors]
    apply: Callable[[Tensor, Tensor, Tensors, Tensors], tuple[Tensor, Tensors]]
    counts: tuple[str, ...] = ()


@dataclass(frozen=True)
class StateNames:
    """Names in an optimizer's state.

    Attributes:
        cut: State with one element per element of the parameter.
        counts: Single numbers, in addition to ``step``.
        complete: True if all state outside ``cut`` is equal on every rank.
    """

    cut: frozenset[str]
    counts: frozenset[str]
    complete: bool

    def elementwise(self, key: str) -> bool | None:
        """Return True if this entry has one element per element of the parameter; None if unknown."""
        if key in self.cut:
            return True
        return False if self.complete or key == "step" or key in self.counts else None


class Descent(NamedTuple):
    """Options that most optimizers share: direction and weight decay."""

    maximize: bool
    decay: bool
    decoupled: bool

    @classmethod
    def from_group(cls, group: Mapping[str, Any], decoupled: bool = False) -> Descent:
        """Read the group's options; use ``decoupled`` if the group does not have it."""
        return cls(
            bool(group["maximize"]),
            bool(group.get("weight_decay")),
            bool(group.get("decoupled_weight_decay", decoupled)),
        )

    def begin(self, param: Tensor, grad: Tensor, s: Tensors) -> tuple[Tensor, Tensor]:
        """Apply direction and decay; return parameter and gradient.

        Read ``weight_decay``, or ``keep`` if decoupled.
        """
        grad = -grad if self.maximize else grad
        if self.decay and self.decoupled:
            param = param * s["keep"]
        elif self.decay:
            grad = grad + param * s["weight_decay"]
        return param, grad
