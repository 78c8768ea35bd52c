"""Write the plan and the texts of the compiled graphs into a folder.

Files are written at the end of the batch after which new graphs have been seen, and when fitting ends. A report that
fails warns once and leaves the training alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.fx import Graph
from typing_extensions import override

from lightning_zero.compile.fx_utils import format_graph, graph_kind
from lightning_zero.compile.passes.base import PassTrace
from lightning_zero.integrations.trainer.pass_schedule import zero_strategy

__all__ = ["PlanReport", "write_passes"]

HEADING = ("pass", "ms", "nodes afterwards", "added", "removed", "changed", "moved")


@dataclass(frozen=True)
class _GraphText:
    """The texts of a graph. The graph itself is not kept, because it would keep its compilation alive."""

    kind: str
    before: str
    after: str
    passes: tuple[PassTrace, ...]


class PlanReport(Callback):
    """Write a report on the compiled graphs of a ``ZeroStrategy`` into a folder, on rank 0.

    * ``plan.json`` and ``plan.txt``: which weights are gathered and which gradients are reduced, in which order, and
      when;
    * ``graph_00_forward_before.txt`` and ``_after.txt``: each graph before and after the passes, one line per node;
    * ``passes/``, on request: for each graph a table of the passes, with times and numbers of nodes, and for each pass
      that changed anything a diff of the graph, ``graph_00_forward_03_sink_gathers.diff``;
    * ``memory.json`` and ``memory.txt``, if the strategy has ``memory``: how it is spent.

    While a report is written, graphs do not come out of the compiler's cache.

    Args:
        dirpath: the folder; made if it does not exist. Files of the same names are replaced.
        passes: write what each pass did.

    Raises:
        MisconfigurationException: (in ``setup``) the strategy is no ``ZeroStrategy``.
    """

    def __init__(self, dirpath: str | Path, passes: bool = False) -> None:
        self._folder = Path(dirpath)
        self._passes = passes
        self._traces: list[PassTrace] = []  # of the graph that is being compiled
        self._strategy: Any = None  # the observed one; on rank 0 only
        self._before = ""  # text of the graph that is being compiled
        self._seen: list[_GraphText] = []  # not written yet
        self._written = 0  # graphs
        self._warned = False

    def observe(self, what: str, graph: Graph) -> None:
        """Keep the text of a graph; ``what`` is ``"joint"``, or ``"before"`` or ``"after"`` the passes."""
        with self._forgiving("look at a compiled graph"):
            if what == "before":
                self._before, self._traces = format_graph(graph), []
            elif what == "after":
                before, self._before = self._before, ""
                self._seen.append(_GraphText(graph_kind(graph), before, format_graph(graph), tuple(self._traces)))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy = zero_strategy(trainer, "observe_graphs", "PlanReport reports on graphs that ZeroStrategy compiles")
        # setup() is called once for each stage, with the same strategy.
        if not trainer.is_global_zero or self._strategy is strategy:
            return
        strategy.observe_graphs(self.observe)
        if self._passes:
            strategy.observe_passes(lambda trace: self._traces.append(trace))
        self._strategy = strategy

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._seen:
            self._write()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._seen:
            self._write()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._seen:
            self._write()

    def _write(self) -> None:
        if self._strategy is None:
            return
        seen, self._seen = self._seen, []
        with self._forgiving(f"write into {self._folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            plan = self._strategy.plan()
            plan.save(self._folder / "plan.json")
            self._save("plan.txt", f"{plan}\n")
            memory = getattr(self._strategy, "memory_plan", None)
            if memory is not None:
                self._save("memory.json", json.dumps(memory.as_dict()))
                self._save("memory.txt", f"{memory}\n")
            for graph in seen:
                stem = f"graph_{self._written:02}_{graph.kind}"
                self._written += 1
                self._save(f"{stem}_before.txt", graph.before)
                self._save(f"{stem}_after.txt", graph.after)
                if graph.passes:
                    write_passes(self._folder / "passes", stem, graph.passes)

    def _save(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text, encoding="utf-8")

    @contextmanager
    def _forgiving(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"PlanReport could not {doing}: {type(error).__name__}: {error}. The training goes on; the report "
                    "lacks this and maybe more."
                )


def write_passes(folder: Path, stem: str, traces: Sequence[PassTrace]) -> None:
    """Write ``STEM.txt``, a table of the passes, and ``STEM_NUMBER_PASS.diff`` for each change.

    Args:
        folder: made if it does not exist.
        stem: of the graph's files.
        traces: of the passes, in their order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [HEADING]
    for t in traces:
        counts = (t.nodes, *map(len, (t.added, t.removed, t.changed, t.moved)))
        rows.append((t.name, f"{t.milliseconds:.2f}", *map(str, counts)))  # type: ignore[arg-type]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADING))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    (folder / f"{stem}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for number, trace in enumerate(traces):
        if trace.diff:
            (folder / f"{stem}_{number:02}_{trace.name}.diff").write_text(trace.diff, encoding="utf-8")
