"""Test which calls may follow each other, their effects, and the watchdog's phases."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lightning_zero
from lightning_zero.native.watchdog import Phase
from lightning_zero.sharding.weight_reader import ShardSync
from lightning_zero.step.cycle import State, StepCycle


class Calls:
    """Logs the names of its calls."""

    def __init__(self, log: list[Any], answers: dict[str, Any] | None = None) -> None:
        self._log, self._answers = log, answers or {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._log.append(" ".join([name, *map(str, kwargs)]))
            return self._answers.get(name, 0)

        return call


class Parts(Calls):
    """An executor whose parts share one log."""

    weights = gradients = parameters = property(lambda self: self)
    world_size = 1


class Compiled(Calls):
    @contextmanager
    def surround(self) -> Iterator[None]:
        self._log.append("surround")
        yield
        self._log.append("leave")


class Step:
    """An optimizer's step."""

    in_progress = False


class Bench:
    """A cycle whose parts log their calls."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.phases: list[Phase] = []
        executor = Parts(self.log, {"last_attached": []})
        self.watchdog = SimpleNamespace(enter=self.phases.append, begin=lambda: None, failed=False)
        self.in_forward = False
        sharder = SimpleNamespace(
            executor=executor,
            sync=ShardSync(executor),  # type: ignore[arg-type]
            reader=SimpleNamespace(
                begin_forward=partial(self.set_forward, True), end_forward=partial(self.set_forward, False)
            ),
            memory=Calls(self.log),
            records=[],
        )
        buffers = Calls(self.log)
        parts: Any = (executor, self.watchdog, sharder, buffers, Compiled(self.log))
        self.cycle = StepCycle(*parts)
        self.steps = {name: Step() for name in "ab"}

    def set_forward(self, inside: bool) -> None:
        self.in_forward = inside

    def do(self, what: str) -> None:
        """Run one event: a method's name, or ``begin a``, ``made a``, ``end a`` of an optimizer's step."""
        kind, _, name = what.partition(" ")
        if kind == "forward":
            with self.cycle.train_step():
                for inner in filter(None, name.split(", ")):
                    self.do(inner if hasattr(self.cycle, inner) else inner.replace("_", " "))
        elif kind == "backward":
            self.cycle.before_backward()
            self.cycle.on_backward_end()
            self.cycle.after_backward()
        elif kind == "begin":
            self.cycle.begin_step(self.steps[name])
            self.steps[name].in_progress = True
        elif kind == "made":
            self.steps[name].in_progress = False
        elif kind == "end":
            was, self.steps[name].in_progress = self.steps[name].in_progress, False
            self.cycle.end_step(self.steps[name], changed=was)
        else:
            getattr(self.cycle, what)()

    def run(self, *events: str) -> "Bench":
        for event in events:
            self.do(event)
        return self


STEP_A, STEP_B = ("begin a", "made a", "end a"), ("begin b", "made b", "end b")


@pytest.mark.parametrize(
    "events",
    [
        ("begin_stage", "forward", "backward", "before_step", *STEP_A, "clean_up"),
        ("forward", "backward", "forward", "backward", *STEP_A),
        ("forward backward, begin_a, made_a, end_a, backward, begin_b, made_b, end_b",),
        ("forward begin_a, made_a, end_a, backward",),
        ("forward", *STEP_A),
        ("end a", "forward", "backward", "before_step", "begin a", "end a", "forward", "backward", *STEP_A),
        ("begin a", "begin a", "made a", "end a"),
        ("begin a", "made a", *STEP_B, "end a"),
        ("eval_step", "after_eval", "eval_step", "forward", "backward", "eval_step", *STEP_A),
        ("forward", "eval_step", "backward"),
        ("begin_stage", "eval_step", "after_eval", "before_step", "eval_step", "clean_up"),
        ("forward", "before_backward", "forward", "backward"),
        ("begin a", "reset", "forward", "backward"),
        ("begin a", "clean_up", "begin_stage", "eval_step"),
        ("after_backward", "after_eval", "end a", "end a"),
        ("eval_step", "backward", *STEP_A),
    ],
    ids=[
        "a step of fit",
        "accumulation",
        "two optimizers in manual optimization",
        "a step before anything else",
        "a step without backward",
        "a closure that is called twice",
        "a step that is begun twice",
        "a step in another one's post-hook",
        "evaluation between all else",
        "evaluation between forward and backward",
        "averages exchanged for validation",
        "a backward that failed",
        "a step that failed, and a reset",
        "a step that failed, and another stage",
        "ends of what never began",
        "training in a test step",
    ],
)
def test_what_users_and_lightning_do_is_never_refused(events: tuple[str, ...]) -> None:
    bench = Bench().run(*events)
    assert bench.cycle.state in (State.IDLE, State.EVALUATION)


@pytest.mark.parametrize(
    ("events", "names", "way_out"),
    [
        (["forward forward"], "train_step() was called in the state FORWARD, and leads to FORWARD", "Leave the"),
        (["forward backward, forward"], "train_step() was called in the state IDLE, and leads to FORWARD", "Leave"),
        (["forward eval_step"], "eval_step() was called in the state FORWARD, and leads to EVALUATION", "before or"),
        (["begin a", "forward"], "train_step() was called in the state STEP, and leads to FORWARD", "end_step"),
        (["begin a", "backward"], "before_backward() was called in the state STEP, and leads to BACKWARD", "end_step"),
        (["begin a", "eval_step"], "eval_step() was called in the state STEP, and leads to EVALUATION", "end_step"),
        (["begin a", "begin b"], "the step of an optimizer was called in the state STEP, and leads to STEP", "end_"),
    ],
)
def test_a_wrong_order_is_an_error_that_names_both_states(events: list[str], names: str, way_out: str) -> None:
    bench = Bench()
    with pytest.raises(RuntimeError) as error:
        bench.run(*events)
    assert str(error.value).startswith(names)
    assert way_out in str(error.value)
    bench.run("end a", "forward", "backward", *STEP_A)  # and nothing is stuck


def test_a_refused_step_does_not_end_the_one_that_goes_on() -> None:
    bench = Bench().run("begin a")
    with pytest.raises(RuntimeError):
        bench.do("begin b")
    bench.log.clear()
    bench.do("end b")
    assert bench.log == []
    assert bench.cycle.state is State.STEP
    bench.do("end a")
    assert bench.log == ["expire_compute_shards", "end_step forward_follows", "end_writing"]


def test_a_reset_drops_a_backward_before_what_it_brought_could_be_written() -> None:
    bench = Bench().run("forward")
    bench.log.clear()
    bench.do("reset")
    assert bench.log == [
        "reset",
        "abort",
        "sync_user_writes forget",
        "drop",
        "reset",
    ]  # compiled code first, buffers last


def test_a_training_step_is_prepared_in_one_order() -> None:
    bench = Bench().run("forward")
    assert bench.log == [
        "allocate",
        "allocate_gradients",
        "begin_training_step",
        "prepare",
        "before_forward",
        "surround",
        "leave",
        "notice",
    ]
    assert bench.in_forward
    bench.cycle.on_backward_end()
    assert not bench.in_forward


@pytest.mark.parametrize(
    ("event", "calls"),
    [
        ("after_backward", ["sync_user_writes"]),
        ("before_step", ["stepped", "stepped", "sync_user_writes forget", "begin_writing"]),
        ("begin a", ["reduce_deferred", "stepped", "stepped", "sync_user_writes forget", "begin_writing"]),
        ("end a", ["end_writing"]),
        (
            "eval_step",
            [
                *("finalize_layout", "release_memory", "sync_user_writes", "expire_compute_shards"),
                *("before_evaluation", "before_forward"),
            ],
        ),
        ("after_eval", ["sync_user_writes forget"]),
        ("reset", ["reset", "abort", "sync_user_writes forget", "drop", "reset"]),
        ("clean_up", ["reset", "abort", "sync_user_writes forget", "drop", "reset", "release_buffers"]),
    ],
)
def test_when_edits_reach_shards_and_shards_are_written(event: str, calls: list[str]) -> None:
    assert Bench().run(event).log == calls


@pytest.mark.parametrize(
    ("events", "times"),
    [
        (("forward", "backward", *STEP_A), 0),
        (("forward", *STEP_A), 1),
        (("forward", "before_backward", "after_backward", *STEP_A), 1),
        (("forward", "end_backward", "end_backward", *STEP_A), 1),
        (("forward", "backward", "forward", "finalize_gradients", *STEP_A), 1),
        (("forward backward, begin_a, made_a, end_a, begin_b, made_b, end_b",), 1),
        (("forward", "reset", *STEP_A), 0),
        ((*STEP_A, *STEP_B, "after_backward"), 0),
    ],
)
def test_a_rank_without_a_backward_ends_one_with_the_others(events: tuple[str, ...], times: int) -> None:
    bench = Bench()
    bench.cycle._executor.__dict__["world_size"] = 2
    assert bench.run(*events).log.count("end_empty_backward") == times


def test_copies_are_void_after_a_step_and_only_then() -> None:
    bench = Bench().run("begin a")
    bench.log.clear()
    assert bench.run("end a").log == ["expire_compute_shards", "end_step forward_follows", "end_writing"]
    bench.log.clear()
    assert bench.run("end a").log == ["end_writing"]


def test_the_watchdog_hears_of_each_phase() -> None:
    bench = Bench().run("begin_stage", "forward", "backward", *STEP_A, "eval_step", "after_eval", "clean_up")
    assert bench.phases == [
        Phase.SETUP,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.BETWEEN,
        Phase.STEP,
        Phase.BETWEEN,
        Phase.EVALUATION,
        Phase.OUTSIDE,
    ]


def test_the_state_can_be_seen() -> None:
    bench, seen = Bench(), []
    with bench.cycle.train_step():
        seen.append(bench.cycle.state)
    seen.append(bench.cycle.state)
    bench.cycle.before_backward()
    seen.append(bench.cycle.state)
    bench.run("after_backward", "begin a")
    seen.append(bench.cycle.state)
    bench.run("end a", "eval_step")
    seen.append(bench.cycle.state)
    assert seen == [State.FORWARD, State.IDLE, State.BACKWARD, State.STEP, State.EVALUATION]


def test_a_forward_that_fails_is_over_and_the_watchdog_still_names_it() -> None:
    bench = Bench()
    with pytest.raises(ZeroDivisionError), bench.cycle.train_step():
        raise ZeroDivisionError
    assert bench.cycle.state is State.IDLE
    assert bench.phases == [Phase.FORWARD]
    bench.run("forward", "backward", *STEP_A)


def test_what_a_lost_device_raises_does_not_hide_what_came_first() -> None:
    bench = Bench()

    def lost() -> None:
        raise RuntimeError("the device is gone")

    bench.cycle._executor.__dict__["abort"] = lost
    with pytest.raises(RuntimeError, match="gone"):
        bench.cycle.clean_up()
    bench.watchdog.failed = True
    bench.cycle.clean_up()


def test_nobody_else_says_when_edits_are_synchronised() -> None:
    """Writers use ShardSync or the cycle; a caller of the executor would have to make three calls."""
    package = Path(lightning_zero.__file__).parent
    names = ("sync_user_writes", "begin_writing", "end_writing", "expire_compute_shards")
    callers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(f"executor.weights.{name}(" in path.read_text() for name in names)
    }
    # A capture forgets weights that eager code has released, and writes nothing.
    assert callers == {"sharding/weight_reader.py", "compile/cuda_graphs/manager.py"}
