"""Who carries out an optimizer's step.

To add one: a file with a class like :class:`StepRunner`, and a place in the order of ``stepper.py``. The first that
takes a layout steps it; the last takes every one.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lightning_zero.step.layout import StepLayout
from lightning_zero.step.substitute import OwnParams, FlatParams

__all__ = ["StepRunner"]


class StepRunner(Protocol):
    """One way to step a layout.

    Attributes:
        clips: it scales gradients by their norm while it uses them, which saves reading and writing them once more.
        skips: it can leave it to the device whether anything changes.
    """

    can_clip: bool
    can_skip: bool

    def can_step(self, layout: StepLayout, own: OwnParams) -> bool:
        """Whether it can step this layout now. Asked before each step and before a clipping; what it must prepare once
        for a layout, it prepares here."""
        ...

    def begin(self, layout: StepLayout, own: OwnParams, max_norm: float | None, skip: Tensor | None) -> FlatParams:
        """Before the optimizer's own ``step``.

        Args:
            layout: that it took.
            own: the optimizer's own groups and state.
            max_norm: the gradients are still to be clipped to this norm; ``layout.squared`` is of all ranks.
            skip: 0-dim on the device; where it is not zero, nothing must change. Only if it ``can_skip``.

        Returns:
            what the optimizer steps by itself.
        """
        ...

    def end(self, layout: StepLayout, own: OwnParams) -> None:
        """After the optimizer's own ``step``, with its own parameters back in place."""
        ...
