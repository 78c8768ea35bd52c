"""Writes down what the compiled graphs gather and reduce, when, and what they cost.

A graph is summarised while it is compiled and is not kept. Files are written at the end of the batch after which new
graphs have been seen, again once a few batches have been measured, and when fitting ends. A report that fails says so
once and leaves the training alone.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.fx import Graph
from typing_extensions import override

from lightning_zero.compile.passes.announce import read_plan
from lightning_zero.compile.passes.trace import PassTrace
from lightning_zero.compile.readable import readable
from lightning_zero.integrations.trainer.lookup import zero_strategy
from lightning_zero.profiling.bandwidth import BandwidthTable, measure
from lightning_zero.profiling.cost import DeviceSpeed
from lightning_zero.report.page import Section, page
from lightning_zero.report.passes import pass_table, write_passes
from lightning_zero.report.pictures import memory_picture, overlap_picture
from lightning_zero.report.step import Step, correct, step_graphs
from lightning_zero.report.stopwatch import Stopwatch
from lightning_zero.report.summary import GraphSummary, summarise
from lightning_zero.report.tables import graph_tables

__all__ = ["PlanReport"]


class PlanReport(Callback):
    """Writes a report on the compiled graphs of a ``ZeroStrategy`` into a folder, on rank 0.

    * ``plan.json`` and ``plan.txt``: what is gathered and reduced, in which order, and when;
    * ``graph_00_forward_before.txt`` and ``_after.txt``: each graph before and after the passes, one line per node;
    * ``graph_00_forward_memory.png`` and ``_overlap.png``: estimates of its memory and of its streams; once batches
      have been measured, ``_memory_corrected.png`` and ``_overlap_corrected.png`` beside them;
    * ``step.json`` and ``step.txt``: time and memory of forward and backward, estimated, measured and corrected;
    * ``passes/``, on request: for each graph a table of the passes, with times and numbers of nodes, and for each pass
      that did anything a diff of the graph, ``graph_00_forward_03_sink_gathers.diff``;
    * ``memory.json`` and ``memory.txt``, where the strategy has ``memory``: how it is spent;
    * ``report.html``: all of it in one file.

    While a report is written, graphs do not come out of the compiler's cache. For the few batches that are measured,
    torch's own statistics of peak memory are reset.

    Args:
        dirpath: the folder; made if it does not exist. Files of the same names are replaced.
        speed: of the device; if left out, what the strategy has measured for itself, and where that is nothing, it is
            measured when the Trainer sets up.
        bandwidth: of the process group; likewise.
        passes: whether to write what each pass did.

    Raises:
        MisconfigurationException: matplotlib is not installed, or (in ``setup``) the strategy is no ``ZeroStrategy``.
    """

    def __init__(
        self,
        dirpath: str | Path,
        speed: DeviceSpeed | None = None,
        bandwidth: BandwidthTable | None = None,
        passes: bool = False,
    ) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            raise MisconfigurationException(
                "PlanReport draws with matplotlib, which is not installed. Run `pip install matplotlib`."
            )
        self._folder = Path(dirpath)
        self._speed = speed
        self._bandwidth = bandwidth
        self._passes = passes
        self._traces: list[PassTrace] = []  # of the graph that is being compiled
        self._strategy: Any = None  # the one that is observed; on rank 0 only
        self._before = ""  # text of the graph that is being compiled
        self._seen: list[GraphSummary] = []  # not written yet
        self._written: list[GraphSummary] = []
        self._sections: dict[int, Section] = {}  # by number
        self._watch: Stopwatch | None = None
        self._step = Step({})
        self._warned = False

    def observe(self, what: str, graph: Graph) -> None:
        """Takes note of a graph; ``what`` is ``"joint"``, or ``"before"`` or ``"after"`` the passes."""
        with self._forgiving("look at a compiled graph"):
            if what == "before":
                self._before, self._traces = readable(graph), []
            elif what == "after":
                before, self._before = self._before, ""
                assert self._speed is not None, "setup() was not called"
                plan = None
                with self._forgiving("read a graph's plan"):
                    plan = read_plan(graph)
                summary = summarise(before, graph, plan, self._speed, self._bandwidth)
                self._seen.append(replace(summary, passes=tuple(self._traces)))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        job = "PlanReport reports on graphs that ZeroStrategy compiles"
        strategy = zero_strategy(trainer, "observe_graphs", job)
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        # On every rank, whatever this one has already: an engine that has to be made for it takes all of them.
        costs = strategy.costs()
        if costs is not None:
            self._bandwidth = self._bandwidth or (None if group is None else costs.table(group.size()))
            self._speed = self._speed or costs.speed
        if self._bandwidth is None and group is not None:
            # On every rank: a measurement takes all of them.
            self._bandwidth = measure(group, strategy.root_device)
        # setup comes once for each stage, with the same strategy
        if not trainer.is_global_zero or self._strategy is strategy:
            return
        self._speed = self._speed or DeviceSpeed.of(strategy.root_device)
        strategy.observe_graphs(self.observe)
        if self._passes:
            strategy.observe_passes(lambda trace: self._traces.append(trace))
        self._strategy = strategy
        self._watch = Stopwatch(strategy.root_device, lambda: strategy.counters().get("gather_bytes", 0))

    @override
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        watch = self._watching()
        if watch is not None:
            with self._forgiving("measure a batch"):
                watch.begin()

    @override
    def on_after_backward(self, *args: Any, **kwargs: Any) -> None:
        watch = self._watching()
        if watch is not None:
            with self._forgiving("measure a batch"):
                watch.backward_ends()

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        watch = self._watching()
        if self._seen:
            self._write()
        elif watch is not None:
            with self._forgiving("measure a batch"):
                watch.end()
                if watch.done:
                    self._step = correct(self._step.graphs, watch.measured())
                    for number in self._step.graphs:
                        self._sections.pop(number, None)  # to be made again
                    self._write()

    def _watching(self) -> Stopwatch | None:
        """What measures, once there are graphs and until enough batches are measured."""
        return self._watch if self._written and self._watch is not None and not self._watch.done else None

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
        if seen and self._watch is not None:
            self._watch.forget()  # other graphs than those that it measures
            self._written += seen
            self._step = Step(step_graphs(self._written))
        with self._forgiving(f"write into {self._folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            plan = self._strategy.plan()
            plan.save(self._folder / "plan.json")
            (self._folder / "plan.txt").write_text(f"{plan}\n", encoding="utf-8")
            (self._folder / "step.json").write_text(self._step.to_json(), encoding="utf-8")
            (self._folder / "step.txt").write_text(self._step.text(), encoding="utf-8")
            self._write_memory()
            for number, summary in enumerate(self._written):
                if number not in self._sections:
                    self._sections[number] = self._section(number, summary)
            first = Section("Time and memory", (self._step.table(),), paragraphs=self._step.notes)
            html = page(
                "What the compiled graphs gather and reduce",
                plan,
                [first, *(self._sections[n] for n in sorted(self._sections))],
            )
            (self._folder / "report.html").write_text(html, encoding="utf-8")

    def _write_memory(self) -> None:
        plan = getattr(self._strategy, "memory_plan", None)
        if plan is not None:
            (self._folder / "memory.json").write_text(json.dumps(plan.as_dict()), encoding="utf-8")
            (self._folder / "memory.txt").write_text(f"{plan}\n", encoding="utf-8")

    def _section(self, number: int, summary: GraphSummary) -> Section:
        """Writes one graph's files."""
        stem, title = f"graph_{number:02}_{summary.kind}", f"Graph {number}, {summary.kind}"
        texts = (("before", summary.before), ("after", summary.after))
        for name, text in texts:
            (self._folder / f"{stem}_{name}.txt").write_text(text, encoding="utf-8")
        memory, timeline = self._step.memories.get(number), self._step.timelines.get(number)
        pictures: list[tuple[str, bytes]] = []
        with self._forgiving(f"draw {stem}"):
            pictures.append(("memory", memory_picture(f"{title}: bytes alive, estimated", summary.memory)))
            if memory is not None:
                pictures.append(("memory_corrected", memory_picture(f"{title}: bytes alive, corrected", memory)))
            if summary.timeline is not None:
                pictures.append(("overlap", overlap_picture(f"{title}: streams, estimated", summary.timeline)))
            if timeline is not None:
                pictures.append(("overlap_corrected", overlap_picture(f"{title}: streams, corrected", timeline)))
        tables = graph_tables(summary, timeline, memory)
        diffs = tuple((f"what {trace.name} did", trace.diff) for trace in summary.passes if trace.diff)
        if summary.passes:
            tables = (*tables, pass_table(summary.passes))
            write_passes(self._folder / "passes", stem, summary.passes)
        for name, png in pictures:
            (self._folder / f"{stem}_{name}.png").write_bytes(png)
        return Section(
            title,
            tables,
            tuple((f"{title}: {name}", png) for name, png in pictures),
            (*((f"nodes {name} the passes", text) for name, text in texts), *diffs),
        )

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
