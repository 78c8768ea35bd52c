"""The optimizer steps flat parameters by itself, in a few kernels in place of many."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_zero.optim.flat_runs import State
from lightning_zero.step.layout import StepLayout
from lightning_zero.step.layouts import StepLayouts
from lightning_zero.step.substitute import OwnParams, FlatParams

__all__ = ["EagerRunner"]


class EagerRunner:
    """Shows the optimizer a layout's segments, and gives out what it keeps for them as its own parameters' state."""

    can_clip = can_skip = False

    def __init__(self, layouts: StepLayouts) -> None:
        self._layouts = layouts

    def can_step(self, layout: StepLayout, own: OwnParams) -> bool:
        return True

    def begin(self, layout: StepLayout, own: OwnParams, max_norm: float | None, skip: Tensor | None) -> FlatParams:
        assert skip is None, "only what replays can skip"
        layout.prepare_eager_step(own.state, max_norm)
        flat = layout.flat_groups(own.groups)
        layout.state.update(_shared_state(own.state))
        return FlatParams(flat, layout.state, range(len(flat)))

    def end(self, layout: StepLayout, own: OwnParams) -> None:
        for run in layout.runs:
            run.state = layout.state[run.param]
        layout.finish_eager_step(own.state)
        own.state.update(_shared_state(layout.state))
        self._layouts.remember_state(own.state)


def _shared_state(state: State) -> dict[Any, Any]:
    """Return what an optimizer keeps once for all parameters, such as MADGRAD's step count."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}
