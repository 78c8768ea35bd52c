"""Write the time and memory of a training, its plan, and its graphs as text into a folder.

Files are written at the end of the batch after which new graphs have been seen, and when training ends, also by an
exception. A later evaluation adds its graphs and changes no measured number. A report that fails warns once and leaves
the training alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
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
from lightning_zero.compile.graph_plan import GraphPlan
from lightning_zero.compile.passes.base import PassTrace
from lightning_zero.config.text import format_table
from lightning_zero.engine import Engine, engine_of
from lightning_zero.integrations.trainer.pass_schedule import zero_strategy
from lightning_zero.report.html_page import Details, draw_page
from lightning_zero.report.step_recorder import BACKWARD, FORWARD, OPTIMIZER, StepRecorder
from lightning_zero.report.training_summary import TrainingNumbers, collect_numbers

HEADING = ("pass", "ms", "nodes afterwards", "added", "removed", "changed", "moved")


@dataclass(frozen=True)
class _GraphText:
    """The texts of a graph. The graph itself is not kept, because it would keep its compilation alive."""

    kind: str
    before: str
    after: str
    passes: tuple[PassTrace, ...]


class PlanReport(Callback):
    """Write a report on a training with ``ZeroStrategy`` into a folder, on rank 0.

    * ``report.html``: a page for browsers. It shows the time of a step by part (ms), memory by role and over the step,
      a summary in words, and the all-gathers and gradients of each graph. Each number is marked as measured or
      estimated. Graphs of an evaluation have their own section, and change no number of the training;
    * ``plan.json`` and ``plan.txt``: the weights that are gathered and the gradients that are reduced, in their order;
    * ``graph_00_forward_before.txt`` and ``_after.txt``: each graph before and after the passes, one line per node.
      Graphs that are not compiled in a training batch are named ``graph_02_evaluation_before.txt`` and so on;
    * ``passes/``, on request: for each graph a table of the passes, with times and numbers of nodes, and for each pass
      that changed anything a diff of the graph, ``graph_00_forward_03_sink_gathers.diff``;
    * ``memory.json`` and ``memory.txt``, if the strategy has ``memory``: the memory plan.

    The report measures the latest 50 steps in which nothing was compiled. A training batch does not wait for the
    device. While a report is written, graphs are compiled anew instead of read from the compiler's cache.

    Args:
        dirpath: Folder, made if it does not exist. Files of the same names are replaced.
        passes: Write the effect of each pass.

    Raises:
        MisconfigurationException: (in ``setup``) The strategy is no ``ZeroStrategy``.

    Examples:
        >>> from lightning_zero import PlanReport
        >>> report = PlanReport("report")  # pass it as Trainer(callbacks=[report])
    """

    def __init__(self, dirpath: str | Path, passes: bool = False) -> None:
        self._folder = Path(dirpath)
        self._passes = passes
        self._traces: list[PassTrace] = []  # of the graph that is being compiled
        self._strategy: Any = None  # the observed one; on rank 0 only
        self._before = ""  # text of the graph that is being compiled
        self._seen: list[_GraphText] = []  # not written yet
        self._files: list[str] = []  # texts that were written
        self._in_batch = False  # of the training
        self._classified: list[bool] = []  # True for each graph of the plan that first ran in a training batch
        self._engine: Engine | None = None  # during training
        self._recorder: StepRecorder | None = None  # during training
        self._step_hooks: list[Any] = []  # of optimizers, during training
        self._numbers: TrainingNumbers | None = None
        self._warned = False

    def observe(self, what: str, graph: Graph) -> None:
        """Keep the text of a graph; ``what`` is ``"joint"``, or ``"before"`` or ``"after"`` the passes."""
        with self._forgiving("look at a compiled graph"):
            if what == "before":
                self._before, self._traces = format_graph(graph), []
            elif what == "after":
                before, self._before = self._before, ""
                kind = graph_kind(graph) if self._in_batch else "evaluation"
                self._seen.append(_GraphText(kind, before, format_graph(graph), tuple(self._traces)))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy = zero_strategy(trainer, "observe_graphs", "PlanReport reports on graphs that ZeroStrategy compiles")
        # setup() is called once for each stage, with the same strategy.
        if not trainer.is_global_zero or self._strategy is strategy:
            return
        strategy.observe_graphs(self.observe)
        if self._passes:
            strategy.observe_passes(lambda trace: self._traces.append(trace))
        self._strategy, self._classified = strategy, []

    # -- a training

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._engine = engine_of(pl_module) if self._strategy is not None else None
        if (engine := self._engine) is None:
            return
        progress, session = engine.session.progress, engine.session
        self._recorder = StepRecorder(
            engine.device,
            lambda: (progress.compiled, session.is_discovering),
            lambda: engine.executor.counters().get("gather_bytes", 0),
            trainer.global_step,
        )
        if not pl_module.automatic_optimization:  # the training step goes on after an optimizer's step
            self._step_hooks = [one.register_step_post_hook(self._resume_forward) for one in trainer.optimizers]

    def _resume_forward(self, *_: Any) -> None:
        self._record(StepRecorder.part, FORWARD)

    @override
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if self._strategy is None:
            return
        self._in_batch = True
        self._classify(training=False)  # these ran before the batch
        self._record(StepRecorder.batch)

    @override
    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        self._record(StepRecorder.part, BACKWARD)

    @override
    def on_after_backward(self, *args: Any, **kwargs: Any) -> None:
        self._record(StepRecorder.backward_ended)

    @override
    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._record(StepRecorder.part, OPTIMIZER)

    def _record(self, event: Callable[..., None], *args: Any) -> None:
        """Report an event to the recorder, if there is one."""
        if self._recorder is not None:
            with self._forgiving("measure a step"):
                event(self._recorder, *args)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        if self._strategy is None:
            return
        self._in_batch = False
        self._classify(training=True)
        self._record(StepRecorder.batch_ended, trainer.global_step)
        if self._seen:
            self._collect(trainer, pl_module)
            self._write()

    @override
    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        self._record(StepRecorder.pause)

    @override
    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        self._record(StepRecorder.resume)

    # Here and not later: other callbacks may use the model in their on_train_end.
    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._collect(trainer, pl_module)
        self._record(StepRecorder.pause)

    @override
    def on_train_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        self._record(StepRecorder.resume)

    @override
    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._end_training()

    def _end_training(self) -> None:
        self._engine = self._recorder = None
        while self._step_hooks:
            self._step_hooks.pop().remove()

    def _collect(self, trainer: pl.Trainer, module: pl.LightningModule, failed: bool = False) -> None:
        if self._engine is None or self._recorder is None:
            return
        with self._forgiving("collect the measured numbers"):
            if failed:
                self._recorder.drop_unfinished()
            name = type(module).__name__
            self._numbers = collect_numbers(self._engine, trainer.optimizers, self._recorder, name, trainer.global_step)

    def _classify(self, training: bool) -> None:
        self._classified += [training] * (len(self._strategy.plan().graphs) - len(self._classified))

    # -- files

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._in_batch, measured = False, self._recorder is not None
        self._collect(trainer, pl_module, failed=True)
        self._end_training()
        if self._seen or measured:
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
                stem = f"graph_{len(self._files) // 2:02}_{graph.kind}"
                for when, text in (("before", graph.before), ("after", graph.after)):
                    self._files.append(f"{stem}_{when}.txt")
                    self._save(self._files[-1], text)
                if graph.passes:
                    write_passes(self._folder / "passes", stem, graph.passes)
            if self._numbers is not None:
                self._classify(training=False)
                self._save("report.html", draw_page(self._numbers, self._details(plan.graphs, memory)))

    def _details(self, graphs: Sequence[GraphPlan], memory: object) -> Details:
        pairs = list(zip(graphs, self._classified, strict=True))
        return Details(
            [graph for graph, training in pairs if training],
            [graph for graph, training in pairs if not training],
            self._files,
            "" if memory is None else str(memory),
            fitted=self._recorder is None,
        )

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
    """Write ``STEM.txt``, a table of the passes, and ``STEM_NUMBER_PASS.diff`` for each change."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for t in traces:
        counts = (t.nodes, *map(len, (t.added, t.removed, t.changed, t.moved)))
        rows.append((t.name, f"{t.milliseconds:.2f}", *map(str, counts)))
    table = "".join(f"{line}\n" for line in format_table(HEADING, rows, indent=""))
    (folder / f"{stem}.txt").write_text(table, encoding="utf-8")
    for number, trace in enumerate(traces):
        if trace.diff:
            (folder / f"{stem}_{number:02}_{trace.name}.diff").write_text(trace.diff, encoding="utf-8")
