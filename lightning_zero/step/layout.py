"""Layouts of an optimizer's step: the flat runs of its parameters that have a gradient.

:class:`StepLayouts` rebuilds all layouts if groups, non-numeric settings or the optimizer state change. It keeps a few
layouts for alternating patterns of parameters with gradients.
"""

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
    """The flat runs for one pattern of parameters with gradients.

    Attributes:
        runs: The flat runs. The optimizer steps each of them as one tensor.
        squared: Sum of the squared gradients, 0-dim, of the norms' dtype; of all ranks after the all-reduce.
        state: Optimizer state by flat parameter.
        eager_steps: Steps made by the optimizer itself. State may be missing before the first one.
    """

    def __init__(self, runs: list[FlatRun], device: torch.device, dtype: torch.dtype) -> None:
        self.runs = runs
        self.squared = torch.zeros((), dtype=dtype, device=device)
        self.state: State = defaultdict(dict, {s.param: s.state for s in runs if s.state})
        self.eager_steps = 0
        # Do not bind self: a reference cycle would keep moved state alive until garbage collection.
        self._sum_squares = partial(_sum_squares, runs, self.squared)
        self._captured_sum = GraphedSequence(self._sum_squares, device)

    def sum_squares(self, captured: bool) -> Tensor:
        """Compute ``squared`` of this rank's gradients, by replay of a CUDA graph if ``captured``."""
        (self._captured_sum if captured else self._sum_squares)()
        return self.squared

    def clip_norm(self, max_norm: float) -> None:
        """Scale the gradients to a norm of at most ``max_norm``. ``squared`` must be of all ranks."""
        factor = clip_factor(self.squared, max_norm)
        for run in self.runs:
            wide = factor.to(run.param.dtype).view(1)  # 1-D: a 0-dim factor would be rounded to the gradients' dtype
            torch.mul(run.grad, wide, out=run.grad)

    def prepare_eager_step(self, state: State, max_norm: float | None) -> None:
        """Prepare for a step of the optimizer itself; clip the gradients to ``max_norm`` unless it is None."""
        if max_norm is not None:
            self.clip_norm(max_norm)
        for run in self.runs:
            run.read_non_tensor_state(state)

    def finish_eager_step(self, state: State) -> None:
        """Copy the changes of the optimizer's own step from the flat runs to ``state``."""
        self.eager_steps += 1
        for run in self.runs:
            run.broadcast_counts()
            run.export_state(state)

    def clip_value(self, most: float) -> None:
        """Clamp the gradients to [-most, most]."""
        for run in self.runs:
            run.grad.clamp_(-most, most)

    def flat_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return parameter groups with the settings of ``groups`` and the flat parameters, with gradients."""
        flat: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
        for run in self.runs:
            run.set_param_grad()
            flat[run.group]["params"].append(run.param)
        return flat


def _sum_squares(runs: Sequence[FlatRun], out: Tensor) -> None:
    parts = [torch.linalg.vector_norm(as_real(run.grad), dtype=out.dtype) for run in runs]
    out.copy_(torch.stack(parts).square().sum() if parts else torch.zeros_like(out))
