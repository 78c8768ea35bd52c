"""Runners: the ways to carry out an optimizer's step.

:class:`CapturedRunner` replays a CUDA graph, :class:`EagerRunner` lets the optimizer step flat parameters, and
:class:`~lightning_zero.step.chunked_step.ChunkedRunner` steps them in chunks. The stepper uses the first runner that
can step a layout; the last one can step all.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lightning_zero.step.layout import StepLayout
from lightning_zero.step.substitute import FlatParams, OwnParams

__all__ = ["StepRunner"]


class StepRunner(Protocol):
    """One way to step a layout.

    Attributes:
        can_clip: The runner scales gradients while it uses them, which saves one read and write.
        can_skip: The device may decide if anything changes.
    """

    can_clip: bool
    can_skip: bool

    def can_step(self, layout: StepLayout, own: OwnParams) -> bool:
        """Return True if the runner can step this layout now, and prepare the layout at the first call.

        Called before each step and before clipping.
        """
        ...

    def begin(self, layout: StepLayout, own: OwnParams, max_norm: float | None, skip: Tensor | None) -> FlatParams:
        """Run before the optimizer's own ``step``.

        Args:
            layout: A layout for which :meth:`can_step` returned True.
            own: The optimizer's own groups and state.
            max_norm: Clip the gradients to this norm, unless None; ``layout.squared`` is of all ranks.
            skip: 0-dim on the device; if not zero, change nothing. Only if ``can_skip``.

        Returns:
            The parameters and state that the optimizer steps by itself.
        """
        ...

    def end(self, layout: StepLayout, own: OwnParams) -> None:
        """Run after the optimizer's own ``step``, with its own parameters restored."""
        ...
