"""Points at which a fault can happen.

The action of a rank, the wrapped functions, and the training that reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.data import get_worker_info

from tests.faults.injector import Injector, wrap

__all__ = ["POINTS", "Point"]

Calls = Callable[..., Any]
Install = Callable[["Point", Injector], None]


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _wrap_targets(point: Point, injector: Injector) -> None:
    for target in point.targets:
        wrap(target, injector.around(point.name, point.step, point.after, point.skipped))


@dataclass(frozen=True)
class Point:
    """
    Args:
        what: the action that the rank begins, or has just ended.
        targets: wrapped functions, ``"module:Class.method"``; each of them is this point.
        after: the point comes after the call, and not before it.
        step: batches (minus one) that have begun, at least, when something happens here; -1: before the first.
        training: settings other than the default with which a training reaches the point; names of ``Training``.
        skipped: the result of a call that the action ``skip`` leaves out.
        install: puts the point in place, where wrapping the targets is not enough.
        ranks: ranks that reach the point; ``None``: all.
    """

    name: str
    what: str
    targets: tuple[str, ...]
    step: int = 2
    after: bool = False
    training: Mapping[str, Any] = field(default_factory=dict)
    skipped: Calls = _nothing
    install: Install = _wrap_targets
    ranks: tuple[int, ...] | None = None


def _between(point: Point, injector: Injector) -> None:
    """In the second block only, and not where the compiler looks on, whose graphs the point would break."""
    (target,) = point.targets

    def make(original: Calls) -> Calls:
        def between(block: Any, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling() and block.index == 1 and torch.is_grad_enabled():
                injector.reach(point.name, point.step)
            return original(block, x)

        return between

    wrap(target, make)


def _in_backward(point: Point, injector: Injector) -> None:
    """Half way through the backward pass."""
    (target,) = point.targets

    def make(original: Calls) -> Calls:
        def forward(block: Any, x: torch.Tensor) -> torch.Tensor:
            out = original(block, x)
            if out.requires_grad and block.index == 1:
                out.register_hook(lambda grad: injector.reach(point.name, point.step))
            return out

        return forward

    wrap(target, make)


def _in_graphs(point: Point, injector: Injector, backward: bool) -> None:
    """A node in the middle of each forward, or backward, graph, after all passes.

    Inductor takes no such node.
    """
    (target,) = point.targets

    def make(original: Calls) -> Calls:
        def rewrite(compiler: Any, graph: torch.fx.Graph) -> torch.fx.Graph:
            graph = original(compiler, graph)
            inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
            if backward == any(name.startswith("tangents") for name in inputs):
                calls = [node for node in graph.nodes if node.op == "call_function"]
                with graph.inserting_before(calls[len(calls) // 2]):
                    graph.call_function(reach, ())
            return graph

        return rewrite

    def reach() -> None:
        injector.reach(point.name, point.step)

    wrap(target, make)


def _in_worker(point: Point, injector: Injector) -> None:
    """In a process that loads data for the rank."""
    (target,) = point.targets

    def make(original: Calls) -> Calls:
        def fetch(*args: Any, **kwargs: Any) -> Any:
            if get_worker_info() is not None:
                injector.step = max(injector.step, -1) + 1  # of this worker's copy
                injector.reach(point.name, point.step)
            return original(*args, **kwargs)

        return fetch

    wrap(target, make)


def _first_to_build(point: Point, injector: Injector) -> None:
    """One rank builds, the others wait for it, so these begin later."""
    build, compile = point.targets
    wrap(compile, injector.around(point.name, point.step, False, point.skipped))

    def make(original: Calls) -> Calls:
        def later(*args: Any, **kwargs: Any) -> Any:
            if injector.fault is None:
                injector.wait_for("fired", range(injector.world))
            return original(*args, **kwargs)

        return later

    wrap(build, make)


STRATEGY = "lightning_zero.integrations.trainer.strategy:ZeroStrategy"
ENGINE = "lightning_zero.engine:Engine"
CYCLE = "lightning_zero.step.cycle:StepCycle"
LOOP = "lightning.pytorch.loops.evaluation_loop:_EvaluationLoop"
PEERS = "lightning_zero.sharding.symm_mem.symmetric_memory:SymmetricMemory"
COMPILER = "lightning_zero.compile.backend:Compiler"
PAIRS = "lightning_zero.compile.cuda_graphs.graph_pairs"
MODEL = "tests.faults.model"

COMPILED = {"strategy": "aot_eager"}
COPIED = COMPILED | {"precision": "bf16-mixed", "options": {"gather_transport": "copy", "reduce_transport": "copy"}}
REPLAYED = COMPILED | {"emulate": True, "steps": 12}


def _hook(name: str, step: int = 2, what: str = "", ranks: tuple[int, ...] | None = None, **training: Any) -> Point:
    """One of the user's hooks; ``what`` distinguishes it from a point of the same name."""
    return Point(name + what, f"runs {name}()", (f"{MODEL}:Trained.{name}",), step, training=training, ranks=ranks)


_HOOKS = (
    _hook("prepare_data", -1, ranks=(0,)),
    _hook("setup", -1),
    _hook("configure_model", -1, late=True),
    _hook("configure_optimizers", -1),
    _hook("on_load_checkpoint", -1, resume=True),
    _hook("on_fit_start", -1),
    _hook("on_train_start", -1),
    _hook("on_train_epoch_start", -1),
    _hook("on_train_batch_start"),
    _hook("on_before_backward"),
    _hook("on_before_optimizer_step"),
    _hook("on_validation_start"),
    _hook("on_validation_epoch_end"),
    _hook("on_validation_end"),
    _hook("on_save_checkpoint"),
    _hook("on_train_epoch_end"),
    _hook("on_train_end"),
    _hook("on_fit_end"),
    _hook("teardown", what="_hook"),
    _hook("on_test_start", then="test"),
    _hook("test_step", then="test"),
    _hook("on_test_end", then="test"),
    _hook("predict_step", then="predict"),
    _hook("on_predict_end", then="predict"),
)

_ALL = (
    Point("join", "joins the process group", ("lightning_zero.integrations.processes:init_process_group",), -1),
    Point(
        "build",
        "builds the C++ executor",
        ("lightning_zero.integrations.strategy_base:build", "lightning_zero.native.build:_compile"),
        -1,
        training={"cold": True},
        install=_first_to_build,
    ),
    Point(
        "construction",
        "shards a layer that was just built in configure_model",
        ("lightning_zero.sharding.sharder:Sharder.shard_module",),
        -1,
        training={"late": True},
    ),
    Point("shard", "shards the model", (f"{ENGINE}.shard",), -1),
    Point(
        "checkpoint_load",
        "loads the checkpoint that it resumes from",
        (f"{STRATEGY}.load_checkpoint",),
        -1,
        training={"resume": True},
    ),
    Point(
        "checkpoint_scatter",
        "takes its part of a weight from the checkpoint that it resumes from",
        ("lightning_zero.sharding.state_dict:StateDictHooks._load_shards",),
        -1,
        training={"resume": True},
    ),
    Point("data_loader", "asks its loader for a batch", ("torch.utils.data.dataloader:_BaseDataLoaderIter.__next__",)),
    Point(
        "data_worker",
        "loads a batch in a process of its own",
        ("torch.utils.data._utils.fetch:_MapDatasetFetcher.fetch",),
        training={"workers": 1},
        install=_in_worker,
    ),
    Point("peer_memory", "allocates memory that its peers read", (f"{PEERS}.empty",), 0, training=COPIED),
    Point(
        "peer_memory_mapped",
        "maps the memory of its peers",
        ("lightning_zero.sharding.symm_mem.symmetric_memory:map_shared",),
        0,
        training=COPIED,
    ),
    Point(
        "first_forward",
        "is half way through the first forward, which is not compiled",
        (f"{MODEL}:Block.between",),
        0,
        training=COMPILED,
        install=_between,
    ),
    Point("before_forward", "begins a training step", (f"{ENGINE}.train_step",)),
    Point("forward", "is half way through a forward", (f"{MODEL}:Block.between",), install=_between),
    Point(
        "gather_in_backward", "gathers a weight again", ("lightning_zero.compile.capture.eager_weights:gather_full",)
    ),
    Point("compile", "compiles a graph", (f"{COMPILER}._tag",), 1, training=COMPILED),
    Point(
        "agreement",
        "compares its new plan with the other ranks'",
        ("lightning_zero.compile.consensus:RankConsensus.check",),
        1,
        training=COMPILED,
    ),
    Point(
        "compiled_forward",
        "is half way through a compiled forward",
        (f"{COMPILER}._rewrite",),
        training=COMPILED,
        install=partial(_in_graphs, backward=False),
    ),
    Point(
        "compiled_backward",
        "is half way through a compiled backward",
        (f"{COMPILER}._rewrite",),
        training=COMPILED,
        install=partial(_in_graphs, backward=True),
    ),
    Point("backward", "is half way through a backward", (f"{MODEL}:Block.forward",), install=_in_backward),
    Point("reduce", "hands a gradient over", ("lightning_zero.native.load:_gather_backward",)),
    Point("end_backward", "has all gradients", (f"{CYCLE}.on_backward_end",)),
    Point("gradient_hook", "runs a user's hook on a gradient", (f"{MODEL}:Trained.gradient_hook",)),
    Point("clip", "takes the norm of all gradients", ("lightning_zero.step.stepper:OptimizerStepper.clip_norm",)),
    Point("before_step", "is about to step the optimizer", (f"{CYCLE}.before_step",)),
    Point(
        "in_step",
        "steps the optimizer",
        ("torch.optim.adam:adam", "lightning_zero.optim.step_kernel:StepKernel.run"),
    ),
    Point("after_step", "has stepped the optimizer", (f"{STRATEGY}.optimizer_step",), after=True),
    Point("batch_end", "is between two batches", (f"{MODEL}:Trained.on_train_batch_end",)),
    Point("capture", "captures compiled code", (f"{PAIRS}:CaptureSpec.run",), training=REPLAYED),
    Point(
        "replay",
        "is about to replay a forward",
        (f"{PAIRS}:EmulatedGraphPair.forward", f"{PAIRS}:CUDAGraphPair.forward"),
        6,
        training=REPLAYED,
        skipped=lambda pair: pair._outputs,
    ),
    Point(
        "replay_backward",
        "is about to replay a backward",
        (f"{PAIRS}:EmulatedGraphPair.backward", f"{PAIRS}:CUDAGraphPair.backward"),
        6,
        training=REPLAYED,
    ),
    Point(
        "replaying",
        "has started a replay, which runs on",
        (f"{PAIRS}:_started",),
        6,
        training=REPLAYED,
    ),
    Point("validation_start", "begins to validate", (f"{LOOP}.on_run_start",)),
    Point("validation_step", "validates a batch", (f"{STRATEGY}.validation_step",)),
    Point(
        "log",
        "averages what was logged",
        ("lightning_zero.integrations.trainer.strategy:ZeroStrategy.reduce",),
        skipped=lambda strategy, value, *args, **kwargs: value,
    ),
    Point("validation_end", "ends a validation", (f"{LOOP}.on_run_end",)),
    Point(
        "checkpoint_gather",
        "gathers a weight for a checkpoint",
        ("lightning_zero.checkpoint.full_checkpoint:full_on_cpu",),
    ),
    Point(
        "checkpoint_optimizer",
        "gathers the optimizer's state for a checkpoint",
        ("lightning_zero.checkpoint.optimizer_state:gather_value",),
    ),
    Point(
        "checkpoint_write",
        "writes a checkpoint, for which the others wait",
        ("lightning_zero.integrations.checkpoint_files:FileIO.save_checkpoint",),
        ranks=(0,),
    ),
    Point(
        "checkpoint_outcome",
        "is about to hear how a checkpoint was written",
        ("lightning_zero.checkpoint.rank_tasks:RankTasks.run_on_rank0",),
    ),
    Point(
        "barrier",
        "waits until all have come",
        ("lightning_zero.integrations.trainer.strategy:ZeroStrategy.barrier",),
        3,
    ),
    Point("teardown", "cleans up after the training", (f"{STRATEGY}.teardown",)),
)

POINTS: dict[str, Point] = {point.name: point for point in (*_ALL, *_HOOKS)}
