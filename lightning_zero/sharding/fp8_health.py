"""Numbers about each layer's fp8 matrices: amax, and shares of elements that underflow or overflow.

Compiled forwards and backwards raise them in a table at a fixed address, by the op ``fp8_health``. So CUDA graphs do,
too. :class:`Fp8Health` copies the table to the host after every N optimizer steps and resets it. The host reads a copy
at a later step, so that it does not wait for the device.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_zero.native import Executor
from lightning_zero.sharding.param_record import Records, ShardedParameter

log = logging.getLogger(__name__)

MATRICES = "input", "weight", "output_gradient"  # of a layer; rows of the table
NUMBERS = "amax", "underflow", "overflow"  # columns of the table
UNKNOWN = -1.0  # a number that nothing has raised
MOST_NAMES = 3  # of matrices in a warning
WAIT_S = 2.0  # for the last report at the end of a training, whose device may be stuck


class Fp8Health:
    """Read the health of one rank's fp8 matrices.

    Args:
        every: optimizer steps between two reports.

    Attributes:
        values: largest numbers of the last reported steps, by name, such as ``"blocks.0.up.weight/input_amax"``. Shares
            are from 0 to 1. A matrix that several layers read has the name of the first.
        steps: optimizer steps that ``values`` cover: ``every``, or fewer at the end of a training.
        reports: number of reports so far.
        nonfinite: matrices that have had infinite elements or NaN, and the optimizer step in which that began, counted
            from 1. The earliest are first, in the order in which a step computes them.
    """

    def __init__(self, executor: Executor, records: Records, every: int) -> None:
        self._executor, self._all_records = executor, records
        self.every = every
        self._step = self._reported = 0
        self._copied_steps = 0
        self._has_rest = False  # a forward has begun since the last report
        self._record_count = -1  # of all parameters, when places were given
        self._records: list[ShardedParameter] = []
        self._table = torch.empty(0)  # float32, of shape (layers, matrices, numbers + 1)
        self._copy: Tensor | None = None  # on the host, not read yet
        self._arrival: torch.cuda.Event | None = None
        self.values: dict[str, float] = {}
        self.nonfinite: dict[str, int] = {}
        self.steps = self.reports = 0

    @torch.inference_mode(False)
    def before_forward(self) -> bool:
        """Give each matrix of parameters a place in the table.

        Returns:
            True if graphs raise numbers in other memory from now on.
        """
        self._has_rest = True
        if len(self._all_records) == self._record_count:
            return False
        self._record_count = len(self._all_records)
        found = [record for record in self._all_records.live if len(record.shape) > 1]
        if [record.index for record in found] == [record.index for record in self._records]:
            return False
        self._records = found
        device = self._executor.device
        shape = len(found), len(MATRICES), len(NUMBERS) + 1
        self._table = torch.full(shape, UNKNOWN, dtype=torch.float32, device=device)
        self._table[..., -1] = math.inf  # the step of the first infinity or NaN
        self._copy = None
        for record, rows in zip(found, self._numbers.unbind(), strict=True):
            self._executor.parameters.set_fp8_health(record.index, rows)
        return True

    @property
    def _numbers(self) -> Tensor:
        return self._table[..., :-1]

    @torch.inference_mode(False)
    @torch.no_grad()
    def after_step(self) -> None:
        """Count an optimizer step, and begin a report if one is due."""
        if not self._records:
            return
        self._step += 1
        self._mark_nonfinite(self._step)
        if self._copy is not None and (self._arrival is None or self._arrival.query()):
            self.read()
        if self._copy is None and self._step >= self._reported + self.every:
            self._start_copy()

    def _mark_nonfinite(self, step: int) -> None:
        amax, since = self._table[..., 0], self._table[..., -1]
        since.masked_fill_(~amax.isfinite() & since.isinf(), step)

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self, on_report: Callable[[], object] = lambda: None) -> None:
        """Report the steps since the last report. Call when a training ends, also within a step.

        Wait for at most two seconds, because the device may be stuck. Then :meth:`read` waits for the report.

        Args:
            on_report: called after each report: the last full one may be unread.
        """
        try:
            while self._report_rest():
                on_report()
        except RuntimeError as error:  # the device is lost
            log.warning("fp8: the last steps are not reported (%s: %s).", type(error).__name__, error)

    def _report_rest(self) -> bool:
        before = self.reports
        if self._copy is None and self._has_rest:
            self._mark_nonfinite(self._step + 1)
            self._start_copy()
        deadline = time.monotonic() + WAIT_S
        while self._copy is not None and self._arrival is not None and not self._arrival.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        self.read()
        return self.reports > before

    def _start_copy(self) -> None:
        self._copied_steps, self._reported, self._has_rest = self._step - self._reported, self._step, False
        on_gpu = self._table.device.type == "cuda"
        self._copy = torch.empty(self._table.shape, dtype=torch.float32, pin_memory=on_gpu)
        self._copy.copy_(self._table, non_blocking=True)
        if on_gpu:
            self._arrival = torch.cuda.Event()
            self._arrival.record()
        self._numbers.fill_(UNKNOWN)

    def read(self) -> dict[str, float]:
        """Return the numbers of the last report, and wait for its copy if that is under way."""
        copy, self._copy = self._copy, None
        if copy is None:
            return self.values
        if self._arrival is not None:
            self._arrival.synchronize()
        values = copy.tolist()
        found = {
            f"{record.name}/{matrix}_{name}": number
            for record, rows in zip(self._records, values, strict=True)
            for matrix, row in zip(MATRICES, rows, strict=True)
            for name, number in zip(NUMBERS, row[:-1], strict=True)
            if number != UNKNOWN
        }
        if found or self._copied_steps:
            self.values, self.steps, self.reports = found, self._copied_steps, self.reports + 1
        self._warn(values)
        return self.values

    def _warn(self, values: Sequence[Sequence[Sequence[float]]]) -> None:
        """Warn once of the matrices that were the first to have infinite elements or NaN."""
        found = [
            (int(row[-1]), matrix == "output_gradient", -number if matrix == "output_gradient" else number, matrix)
            for number, rows in enumerate(values)
            for matrix, row in zip(MATRICES, rows, strict=True)
            if row[-1] != math.inf
        ]
        if self.nonfinite and all(map(math.isfinite, self.values.values())):
            self.nonfinite = {}  # the training has recovered
            self._table[..., -1] = math.inf
        elif found and not self.nonfinite:
            self._name_first(found)

    def _name_first(self, found: list[tuple[int, bool, int, str]]) -> None:
        self.nonfinite = {
            f"{self._records[abs(number)].name}/{matrix}": step for step, _, number, matrix in sorted(found)
        }
        names, step = [*self.nonfinite], min(self.nonfinite.values())
        more = f", and {len(names) - MOST_NAMES} more later" if len(names) > MOST_NAMES else ""
        # All ranks gather the same weights.
        log.log(
            logging.DEBUG if self._executor.rank and names[0].endswith("/weight") else logging.WARNING,
            "fp8: infinite numbers or NaN on rank %d, since optimizer step %d of this training, first in %s%s. "
            "Products of these matrices have NaN, and so do the gradient norm and the next weights of all ranks. Load "
            "an earlier checkpoint; then lower the learning rate, or keep the layers in 16 bits by fp8_exclude.",
            self._executor.rank,
            step,
            ", ".join(names[:MOST_NAMES]),
            more,
        )
