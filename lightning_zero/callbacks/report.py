"""Writes down what the compiled graphs gather and reduce, when, and what they cost.

A graph is summarised while it is compiled and is not kept. Files are written at the end of the batch after which new
graphs have been seen, and when fitting ends. A report that fails says so once and leaves the training alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.fx import Graph
from typing_extensions import override

from lightning_zero.callbacks.page import Section, Table, page
from lightning_zero.callbacks.pictures import memory_picture, overlap_picture
from lightning_zero.callbacks.strategy import zero_strategy
from lightning_zero.callbacks.summary import GraphSummary, readable, summarise
from lightning_zero.compile.passes.announce import read_plan
from lightning_zero.profiling.bandwidth import BandwidthTable, measure
from lightning_zero.profiling.cost import DeviceSpeed

__all__ = ["PlanReport"]

MOST_ROWS = 12


class PlanReport(Callback):
    """Writes a report on the compiled graphs of a ``ZeroStrategy`` into a folder, on rank 0.

    * ``plan.json`` and ``plan.txt``: what is gathered and reduced, in which order, and when;
    * ``graph_00_forward_before.txt`` and ``_after.txt``: each graph before and after the passes, one line per node;
    * ``graph_00_forward_memory.png`` and ``_overlap.png``: estimates of its memory and of its streams;
    * ``report.html``: all of it in one file.

    While a report is written, graphs do not come out of the compiler's cache.

    Args:
        dirpath: the folder; made if it does not exist. Files of the same names are replaced.
        speed: of the device; measured when the Trainer sets up, if left out.
        bandwidth: of the process group; likewise.

    Raises:
        MisconfigurationException: matplotlib is not installed, or (in ``setup``) the strategy is no ``ZeroStrategy``.
    """

    def __init__(
        self, dirpath: str | Path, speed: DeviceSpeed | None = None, bandwidth: BandwidthTable | None = None
    ) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            raise MisconfigurationException(
                "PlanReport draws with matplotlib, which is not installed. Run `pip install matplotlib`."
            )
        self._folder = Path(dirpath)
        self._speed = speed
        self._bandwidth = bandwidth
        self._strategy: Any = None  # the one that is observed; on rank 0 only
        self._before = ""  # text of the graph that is being compiled
        self._seen: list[GraphSummary] = []  # not written yet
        self._sections: list[Section] = []  # written
        self._warned = False

    def observe(self, what: str, graph: Graph) -> None:
        """Takes note of a graph; ``what`` is ``"joint"``, or ``"before"`` or ``"after"`` the passes."""
        with self._forgiving("look at a compiled graph"):
            if what == "before":
                self._before = readable(graph)
            elif what == "after":
                before, self._before = self._before, ""
                assert self._speed is not None, "setup() was not called"
                plan = None
                with self._forgiving("read a graph's plan"):
                    plan = read_plan(graph)
                self._seen.append(summarise(before, graph, plan, self._speed, self._bandwidth))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        job = "PlanReport reports on graphs that ZeroStrategy compiles"
        strategy = zero_strategy(trainer, "observe_graphs", job)
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._bandwidth is None and group is not None:
            # On every rank: a measurement takes all of them.
            self._bandwidth = measure(group, strategy.root_device)
        # setup comes once for each stage, with the same strategy
        if not trainer.is_global_zero or self._strategy is strategy:
            return
        self._speed = self._speed or DeviceSpeed.of(strategy.root_device)
        strategy.observe_graphs(self.observe)
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
            (self._folder / "plan.txt").write_text(f"{plan}\n", encoding="utf-8")
            for summary in seen:
                self._sections.append(self._section(len(self._sections), summary))
            html = page("What the compiled graphs gather and reduce", plan, self._sections)
            (self._folder / "report.html").write_text(html, encoding="utf-8")

    def _section(self, number: int, summary: GraphSummary) -> Section:
        """Writes one graph's files."""
        stem, title = f"graph_{number:02}_{summary.kind}", f"Graph {number}, {summary.kind}"
        texts = (("before", summary.before), ("after", summary.after))
        for name, text in texts:
            (self._folder / f"{stem}_{name}.txt").write_text(text, encoding="utf-8")
        pictures: list[tuple[str, bytes]] = []
        with self._forgiving(f"draw {stem}"):
            pictures.append(("memory", memory_picture(f"{title}: bytes alive", summary.memory)))
            if summary.timeline is not None:
                pictures.append(("overlap", overlap_picture(f"{title}: streams", summary.timeline)))
        for name, png in pictures:
            (self._folder / f"{stem}_{name}.png").write_bytes(png)
        return Section(
            title,
            _tables(summary),
            tuple((f"{title}: {name}", png) for name, png in pictures),
            tuple((f"nodes {name} the passes", text) for name, text in texts),
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


def _tables(summary: GraphSummary) -> tuple[Table, ...]:
    """The numbers of one graph."""
    computed = sum(cost.seconds for cost in summary.costs)
    facts: list[tuple[str | int | float, ...]] = [
        ("nodes", len(summary.costs)),
        ("GFLOP", sum(cost.flops for cost in summary.costs) / 1e9),
        ("MiB read", sum(cost.read for cost in summary.costs) / 2**20),
        ("MiB written", sum(cost.written for cost in summary.costs) / 2**20),
        ("MiB alive at the peak", summary.memory.peak / 2**20),
        ("ms of compute, estimated", computed * 1e3),
    ]
    if summary.timeline is not None:
        facts += [
            ("ms of waiting for weights, estimated", sum(summary.timeline.exposed) * 1e3),
            ("ms of reducing beyond the end, estimated", summary.timeline.tail * 1e3),
        ]
    slow = sorted(summary.costs, key=lambda cost: -cost.seconds)[:MOST_ROWS]
    alive = summary.memory.alive[:MOST_ROWS]
    return (
        Table("In short", ("", ""), tuple(facts)),
        Table(
            "Alive at the peak, the largest",
            ("tensor", "MiB"),
            tuple((tensor.name, tensor.nbytes / 2**20) for tensor in alive),
        ),
        Table(
            "Most expensive nodes",
            ("node", "ms, estimated", "GFLOP", "MiB read", "MiB written"),
            tuple((c.name, c.seconds * 1e3, c.flops / 1e9, c.read / 2**20, c.written / 2**20) for c in slow),
        ),
    )
