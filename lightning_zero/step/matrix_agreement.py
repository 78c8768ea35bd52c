"""Check before a step that all ranks step the same parameters, if they exchange values for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.errors import RankMismatchError
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.optim.update_rules import needs_ranks, rule_for
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.step.step_layouts import OwnParams, StepLayout


class MatrixAgreement:
    """Compares over the ranks which parameters of such rules have gradients, on the CPU.

    After a backward they are the same on all ranks. Only the user's code can change them on one rank, for instance by
    ``param.grad = None``. The sizes of the exchange would then differ, which ends gloo's processes and blocks NCCL's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharder: Sharder) -> None:
        self._optimizer = optimizer
        self._sharder = sharder
        self._names: WeakKeyDictionary[StepLayout, tuple[list[str], Tensor]] = WeakKeyDictionary()

    def check(self, layout: StepLayout, own: OwnParams) -> None:
        """Raise on all ranks if they differ. Collective if a group's rule needs values of other ranks.

        Raises:
            RankMismatchError: A parameter has a gradient on some ranks only.
        """
        mesh = self._sharder.mesh
        if mesh.world_size == 1 or not any(map(self._is_of_matrices, own.groups)):
            return
        if layout not in self._names:
            self._names[layout] = self._find(layout, own)
        names, present = self._names[layout]
        found = present.clone()  # flags of "has a gradient", then of "has none": the maximum over ranks shows both
        self._sharder.executor.collective(
            "gradients of matrices",
            SequenceId.CONTROL,
            lambda later: dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.control_group, async_op=later),
        )
        some, none = found.view(2, -1).bool()
        differing = (some & none).nonzero().view(-1).tolist()
        if differing:
            here = ", ".join(f"{names[n]!r} ({'present' if present[n] else 'None'} here)" for n in differing[:3])
            raise RankMismatchError(
                f"{type(self._optimizer).__name__} needs values of all ranks for its step, but the gradients of "
                f"{len(differing)} parameters are None on some ranks only: {here}. Set param.grad = None on all ranks, "
                "or param.grad.zero_() on one."
            )

    def _is_of_matrices(self, group: Mapping[str, Any]) -> bool:
        return needs_ranks(rule_for(self._optimizer, group))

    def _find(self, layout: StepLayout, own: OwnParams) -> tuple[list[str], Tensor]:
        """Return names of the parameters, and flags that say if they have gradients, or none, on this rank."""
        stepped = {record.index for run in layout.runs for record in run.members}
        names: list[str] = []
        flags: list[bool] = []
        for group in own.groups:
            if not self._is_of_matrices(group):
                continue
            for param in group["params"]:
                record = self._sharder.find(param)
                assert record is not None
                names.append(record.name)
                flags.append(record.index in stepped)
        present = torch.tensor(flags, dtype=torch.uint8)
        return names, torch.cat([present, 1 - present])
