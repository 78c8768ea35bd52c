"""One line about a training's start."""

from collections import defaultdict

import pytest

from lightning_zero.report.startup_timer import BATCHES, MOST_BATCHES, StartupTimer


class Training:
    """Time passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.spent: defaultdict[str, float] = defaultdict(
            float, graphs=3.0, compiling=50.0, joint=7.0
        )  # by another training
        self.torch: defaultdict[str, float] = defaultdict(float, {"_compile.compile_inner": 7.0})
        self.clock = StartupTimer(lambda: self.spent, lambda: self.runs, lambda: self.now, lambda: self.torch)
        self.runs = ""

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def compiles(
        self, dynamo: float, joint: float, passes: float, rest: float, subgraphs: int = 0, new: int = 0
    ) -> None:
        inside = joint + passes + rest
        self.passes(dynamo + inside)
        self.spent["graphs"] += 1
        self.spent["compiling"] += inside
        self.spent["passes"] += passes
        self.spent["subgraphs"] += subgraphs
        self.spent["subgraphs compiled"] += new
        self.spent["joint"] += joint
        self.torch["_compile.compile_inner"] += dynamo + inside
        self.torch["OutputGraph.call_user_compiler"] += inside

    def batches(self, count: int, seconds: float = 0.5) -> list[str]:
        lines: list[str] = []
        for _ in range(count):
            lines += self.clock.batch()
            self.passes(seconds)
        return lines


def test_the_line_says_where_each_second_went() -> None:
    training = Training()
    training.passes(3.0)
    training.clock.built(1.5)
    assert not training.batches(1, seconds=2.0)
    assert training.clock.batch() == []
    training.compiles(5.0, 8.0, 1.0, 18.0, subgraphs=152, new=12)
    training.passes(0.5)
    assert training.batches(20) == [
        "Start: 41.5 s until batch 10 = build 1.5 + setup 1.5 + first batch 2.0 + tracing 13.0 + compiling 19.0 + "
        "other batches 4.5."
    ]
    assert training.clock.ends() == [], "once is enough"


def test_what_was_compiled_while_the_executor_was_built_is_no_part_of_the_model() -> None:
    training = Training()
    training.torch["_compile.compile_inner"] += 4.0
    training.torch["OutputGraph.call_user_compiler"] += 1.0
    training.spent["joint"] += 1.0
    training.passes(5.0)
    training.clock.built(1.0)
    training.compiles(2.0, 3.0, 0.0, 1.0)
    [line] = training.batches(15)
    assert "= build 1.0 + setup 4.0 + first batch 0.5 + tracing 5.0 + compiling 1.0 + " in line


def test_it_waits_until_nothing_is_compiled_any_more() -> None:
    training = Training()
    for _ in range(BATCHES + 5):
        assert not training.batches(1)
        training.compiles(0.1, 0.1, 0.1, 0.1)
    [line] = training.batches(5)
    assert f"until batch {BATCHES + 5 + 3} =" in line


def test_it_does_not_wait_for_ever() -> None:
    training = Training()
    lines = []
    for _ in range(MOST_BATCHES + 10):
        lines += training.batches(1)
        training.compiles(0.1, 0.1, 0.1, 0.1)
    assert [f"until batch {MOST_BATCHES} =" in line for line in lines] == [True]


def test_a_short_training_says_it_at_its_end() -> None:
    training = Training()
    assert training.clock.ends() == [], "no training"
    training.batches(2)
    training.compiles(1.0, 1.0, 1.0, 1.0)
    [line] = training.clock.ends()
    assert "until batch 2 =" in line
    assert training.clock.ends() == []


def test_nothing_is_said_where_nothing_was_compiled_or_built() -> None:
    training = Training()
    assert not training.batches(30)
    assert training.clock.ends() == []


def test_what_runs_is_said_at_the_end_of_the_start_and_whatever_was_compiled() -> None:
    training = Training()
    training.runs = "Runs: much."
    assert training.batches(BATCHES) == []
    assert training.batches(20) == ["Runs: much."]
    training = Training()
    training.runs = "Runs: little."
    training.batches(1)
    training.compiles(1.0, 1.0, 1.0, 1.0)
    first, second = training.clock.ends()
    assert first.startswith("Start: ")
    assert second == "Runs: little."


def test_a_line_that_fails_ends_no_training() -> None:
    def fails() -> str:
        raise ValueError("no")

    clock = StartupTimer(dict, fails, lambda: 0.0, dict)
    clock.batch()
    assert clock.ends() == ["The startup summary failed: ValueError: no."]


def parts_of(line: str) -> tuple[float, list[float]]:
    total, _, parts = line.removeprefix("Start: ").rstrip(".").partition(" s until batch ")
    return float(total), [float(part.rsplit(" ", 1)[1]) for part in parts.partition(" = ")[2].split(" + ")]


def test_parts_do_not_overlap_wherever_something_is_compiled() -> None:
    """Compile in the setup, as a validation before training does, in the first step and in later ones."""
    training = Training()
    training.passes(1.0)
    for _ in range(3):
        training.compiles(1.0, 2.0, 0.5, 4.0)
        training.batches(1)
    [line] = training.batches(20)
    total, parts = parts_of(line)
    assert sum(parts) == pytest.approx(total, abs=0.2)
    assert "setup 1.0 + " in line
    assert "tracing 9.0 + compiling 13.5" in line


def test_a_second_trainer_reports_only_its_own_times() -> None:
    """The module's engine already has seconds of the first Trainer.

    The new strategy sees them when it adopts it.
    """
    first = Training()
    adopted: dict[str, float] = {}
    timer = StartupTimer(lambda: adopted, lambda: "", lambda: first.now, lambda: first.torch)
    adopted.update(graphs=5.0, compiling=70.0, subgraphs=9.0)
    timer.adopted()
    timer.batch()
    first.passes(0.1)
    assert timer.ends() == [], "nothing was compiled for it"
    timer = StartupTimer(lambda: adopted, lambda: "", lambda: first.now, lambda: first.torch)
    timer.batch()
    first.passes(2.0)
    adopted.update(graphs=6.0, compiling=71.0)
    [line] = timer.ends()
    assert line == "Start: 2.0 s until batch 1 = first batch 1.0 + compiling 1.0."


def test_parts_add_up_although_the_user_compiles_a_function_too() -> None:
    training = Training()
    training.batches(1)
    training.compiles(1.0, 2.0, 0.5, 1.0)
    training.passes(16.0)
    training.torch["_compile.compile_inner"] += 16.0
    training.torch["OutputGraph.call_user_compiler"] += 15.0
    training.torch["aot_trace_joint_graph"] += 9.0  # in the user's backend
    [line] = training.batches(20)
    total, parts = parts_of(line)
    assert sum(parts) == pytest.approx(total, abs=0.2)
    assert "tracing 4.0 + compiling 1.5 + " in line


def test_parts_add_up_after_a_reset_of_the_compiler() -> None:
    training = Training()
    training.compiles(2.0, 1.0, 0.0, 1.0)
    training.batches(1)
    training.compiles(1.0, 1.0, 0.5, 2.0)
    training.batches(1)
    training.torch.clear()  # by torch.compiler.reset()
    training.compiles(0.5, 0.5, 0.0, 1.0)
    [line] = training.batches(20)
    total, parts = parts_of(line)
    assert sum(parts) == pytest.approx(total, abs=0.2)
    assert "tracing 6.0 + compiling 4.5 + " in line


def test_time_and_compilations_after_the_last_batch_do_not_count_if_its_end_is_announced() -> None:
    training = Training()
    training.runs = "Runs: x."
    training.batches(1, seconds=1.0)
    training.compiles(2.0, 3.0, 0.0, 1.0)
    training.clock.pause()
    training.passes(100.0)
    training.compiles(1.0, 1.0, 1.0, 1.0)  # of an evaluation
    assert training.clock.ends() == [
        "Start: 7.0 s until batch 1 = first batch 1.0 + tracing 5.0 + compiling 1.0.",
        "Runs: x.",
    ]


def test_a_pause_before_the_first_batch_means_nothing_and_the_next_batch_ends_it() -> None:
    training = Training()
    training.clock.pause()
    assert training.clock.ends() == []
    training.compiles(1.0, 0.0, 0.0, 1.0)
    training.batches(1, seconds=1.0)
    training.clock.pause()
    training.passes(5.0)
    training.batches(1, seconds=1.0)
    [line] = training.clock.ends()
    assert line.startswith("Start: 9.0 s until batch 2 =")
