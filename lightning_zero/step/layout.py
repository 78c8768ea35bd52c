"""What an optimizer steps together: the segments of its parameters that have a gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_zero.optim.clip import clip_factor
from lightning_zero.optim.flat_runs import FlatRun, State
from lightning_zero.optim.graphed import GraphedSequence
from lightning_zero.sharding.layout import as_real

__all__ = ["StepLayout"]


class StepLayout:
    """The segments for one pattern of parameters with gradients.

    Attributes:
        segments: what is stepped as one tensor each.
        squared: 0-dim, of the norms' dtype: the sum of the gradients' squares; of all ranks once they were added up.
        state: what the optimizer keeps, by flat parameter.
        eager_steps: how many steps the optimizer itself has made; before the first one there may be no state.
    """

    def __init__(self, runs: list[FlatRun], device: torch.device, dtype: torch.dtype) -> None:
        self.runs = runs
        self.squared = torch.zeros((), dtype=dtype, device=device)
        self.state: State = defaultdict(dict, {s.param: s.state for s in runs if s.state})
        self.eager_steps = 0
        # Not bound to this: a cycle would hold state that has moved until somebody looks for cycles.
        self._sum_squares = partial(_sum_squares, runs, self.squared)
        self._captured_sum = GraphedSequence(self._sum_squares, device)

    def sum_squares(self, captured: bool) -> Tensor:
        """``squared``, of this rank's gradients as they are now; by replay of a CUDA graph if ``captured``."""
        (self._captured_sum if captured else self._sum_squares)()
        return self.squared

    def clip_norm(self, max_norm: float) -> None:
        """Scales the gradients, whose ``squared`` is of all ranks, to a norm of at most ``max_norm``."""
        factor = clip_factor(self.squared, max_norm)
        for run in self.runs:
            wide = factor.to(run.param.dtype).view(1)  # 1-D, or it would be rounded to what gradients lie in
            torch.mul(run.grad, wide, out=run.grad)

    def prepare_eager_step(self, state: State, max_norm: float | None) -> None:
        """Prepare for a step of the optimizer itself; ``max_norm``: clip the gradients to it, unless it is None."""
        if max_norm is not None:
            self.clip_norm(max_norm)
        for run in self.runs:
            run.read_non_tensor_state(state)

    def finish_eager_step(self, state: State) -> None:
        """Give the optimizer's ``state`` what its own step has changed in the segments."""
        self.eager_steps += 1
        for run in self.runs:
            run.broadcast_counts()
            run.export_state(state)

    def clip_value(self, most: float) -> None:
        """Clamps the gradients to [-most, most]."""
        for run in self.runs:
            run.grad.clamp_(-most, most)

    def flat_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups with the settings of ``groups``, of flat parameters with their gradients."""
        flat: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
        for run in self.runs:
            run.set_param_grad()
            flat[run.group]["params"].append(run.param)
        return flat


def _sum_squares(runs: Sequence[FlatRun], out: Tensor) -> None:
    parts = [torch.linalg.vector_norm(as_real(run.grad), dtype=out.dtype) for run in runs]
    out.copy_(torch.stack(parts).square().sum() if parts else torch.zeros_like(out))
