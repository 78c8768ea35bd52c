"""The optimizer steps flat parameters by itself, in a few kernels in place of many."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_zero.optim.flat_runs import State
from lightning_zero.step.layout import StepLayout
from lightning_zero.step.layouts import StepLayouts
from lightning_zero.step.substitute import Own, Shown

__all__ = ["EagerRunner"]


class EagerRunner:
    """Shows the optimizer a layout's segments, and gives out what it keeps for them as its own parameters' state."""

    clips = skips = False

    def __init__(self, layouts: StepLayouts) -> None:
        self._layouts = layouts

    def takes(self, layout: StepLayout, own: Own) -> bool:
        return True

    def begin(self, layout: StepLayout, own: Own, max_norm: float | None, skip: Tensor | None) -> Shown:
        assert skip is None, "only what replays can skip"
        layout.before_own_step(own.state, max_norm)
        flat = layout.flat_groups(own.groups)
        layout.state.update(_of_no_parameter(own.state))
        return Shown(flat, layout.state, range(len(flat)))

    def end(self, layout: StepLayout, own: Own) -> None:
        for segment in layout.segments:
            segment.state = layout.state[segment.param]
        layout.after_own_step(own.state)
        own.state.update(_of_no_parameter(layout.state))
        self._layouts.note(own.state)


def _of_no_parameter(state: State) -> dict[Any, Any]:
    """Return what an optimizer keeps once for all parameters, such as MADGRAD's step count."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}
