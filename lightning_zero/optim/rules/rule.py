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
    """How one optimizer changes elements.

    Attributes:
        settings: the floats of a parameter group that the rule reads, by name; ``"betas.0"`` is the first of a pair.
        state: names of the state tensors of a parameter's shape, which are cut like it. Where a rule is registered,
            checkpoints take all others to be the same on every rank, whatever their shape.
        scalars: (settings and ``counts``, all 0-dim float64; step count after this step, 0-dim) -> 0-dim float64
            tensors, among them the new ``counts``.
        apply: (parameter, gradient, state, scalars; all float32) -> (new parameter, new state).
        counts: names of the state tensors of no dimensions, other than ``step``.
    """

    settings: tuple[str, ...]
    state: tuple[str, ...]
    scalars: Callable[[Tensors, Tensor], Tensors]
    apply: Callable[[Tensor, Tensor, Tensors, Tensors], tuple[Tensor, Tensors]]
    counts: tuple[str, ...] = ()


@dataclass(frozen=True)
class StateNames:
    """What is known of an optimizer's state by the names in it.

    Attributes:
        cut: what has one element for each of the parameter's.
        counts: what is one number, besides ``step``.
        complete: whatever is not in ``cut`` is the same on every rank.
    """

    cut: frozenset[str]
    counts: frozenset[str]
    complete: bool

    def elementwise(self, key: str) -> bool | None:
        """Whether this entry has one element for each of the parameter's; None: its name does not say."""
        if key in self.cut:
            return True
        return False if self.complete or key == "step" or key in self.counts else None


class Descent(NamedTuple):
    """Which way to go, and how weights decay; most optimizers share these options."""

    maximize: bool
    decay: bool
    decoupled: bool

    @classmethod
    def from_group(cls, group: Mapping[str, Any], decoupled: bool = False) -> Descent:
        """As the group says; ``decoupled`` where it does not."""
        return cls(
            bool(group["maximize"]),
            bool(group.get("weight_decay")),
            bool(group.get("decoupled_weight_decay", decoupled)),
        )

    def begin(self, param: Tensor, grad: Tensor, s: Tensors) -> tuple[Tensor, Tensor]:
        """Parameter and gradient to go on with. Reads ``weight_decay``, or ``keep`` if that is decoupled."""
        grad = -grad if self.maximize else grad
        if self.decay and self.decoupled:
            param = param * s["keep"]
        elif self.decay:
            grad = grad + param * s["weight_decay"]
        return param, grad
