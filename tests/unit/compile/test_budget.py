"""When a budget is decided on, what share of its weights a graph may keep, and whether that is worth compiling again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero.compile.budget import MEASURED_STEPS, MOST_STEPS, MemoryPlanner
from lightning_zero.compile.graph_plan import Gather, GraphPlan
from lightning_zero.compile.shares import another_fits, saved_share
from lightning_zero.config import CompileConfig, EngineConfig
from lightning_zero.profiling.headroom import DeviceMemory
from tests.helpers.options import config as options

CPU = torch.device("cpu")
AUTO = EngineConfig(reshard_after_forward="auto")


def plan(kind: str, *groups: tuple[int, int]) -> GraphPlan:
    """Groups of (number of weights, bytes)."""
    gathers = tuple(Gather(("w",) * count, "float32", size, 0, "", 0, "") for count, size in groups)
    return GraphPlan(kind, 9, gathers, ())


@pytest.mark.parametrize(
    ("budget", "traffic", "share"), [(0, 800, 0.0), (100, 800, 0.25), (400, 800, 1.0), (900, 800, 1.0), (100, 0, 0.0)]
)
def test_what_a_pass_gathers_is_in_it_twice(budget: float, traffic: float, share: float) -> None:
    assert saved_share(budget, traffic) == share


def test_graphs_that_run_several_times_stay_within_the_budget_together() -> None:
    runs, weights, budget = 24, 100, 600
    share = saved_share(budget, 2 * runs * weights)
    assert runs * share * weights == pytest.approx(budget)


@pytest.mark.parametrize(("share", "fits"), [(0.0, False), (0.24, False), (0.25, True), (1.0, True)])
def test_a_weight_of_a_backward_fits_into_its_share(share: float, fits: bool) -> None:
    # 400 bytes in all; the smallest weight of the first group has at most 100.
    plans = [plan("forward", (1, 1)), plan("backward", (3, 300), (1, 100))]
    assert another_fits(plans, share, 0.0, 0) is fits


def test_shares_are_of_single_graphs() -> None:
    assert not another_fits([plan("backward", (1, 100))] * 5, 0.9, 0.0, 0)


@pytest.mark.parametrize(("budget", "fits"), [(0, False), (99, False), (100, True), (1e9, True)])
def test_a_weight_that_is_not_small_fits_until_the_step(budget: float, fits: bool) -> None:
    assert another_fits([plan("forward", (4, 40), (1, 100))], 0.0, budget, small_bytes=10) is fits


def test_where_nothing_is_gathered_nothing_fits() -> None:
    assert not another_fits([], 1.0, 1e9, 0)
    assert not another_fits([plan("backward")], 1.0, 1e9, 0)


class Alone(MemoryPlanner):
    """Of a single rank, whose device has 2000 bytes and gives half of them; a pass gathers 800."""

    def __init__(self, exists: bool = True) -> None:
        self.said: list[str] = []
        self.starts = 0
        self.progress: Any = SimpleNamespace(compiled=0, report=self.said.append)
        self.plans: Any = SimpleNamespace(count=0, agreed_plans=(plan("backward", (4, 400)),), charts=[])
        self.executor: Any = SimpleNamespace(counters=lambda: {"gather_bytes": self.bytes})
        self.bytes = 0
        gauge: Any = SimpleNamespace(
            reports_memory=exists, captures=False, start=self._begin, read=self._read, empty=lambda: None, device=CPU
        )
        super().__init__(self.progress, self.plans, self.executor, None, gauge)  # type: ignore[arg-type]

    def _begin(self, anew: bool) -> None:
        assert anew
        self.starts += 1

    def _read(self) -> DeviceMemory:
        return DeviceMemory(2000, 0, 1700, 0, 0)

    def _least(self, *values: float) -> list[float]:
        return list(values)

    def batch(self, compiles: bool = False, steps: bool = True, config: EngineConfig = AUTO) -> float | None:
        found = self.decided(config)
        self.progress.compiled += compiles
        self.bytes += 800
        if steps:
            self.optimizer_steps()
        return None if found is None else found.share


def test_it_is_decided_once_after_some_steps_without_compiling() -> None:
    budget = Alone()
    assert [budget.batch(compiles) for compiles in (False, True, False, True)] == [None] * 4
    assert [budget.batch() for _ in range(MEASURED_STEPS)] == [None] * MEASURED_STEPS
    # 100 bytes are left, of 400 that are gathered twice.
    assert budget.batch() == 0.25
    budget.progress.compiled += 1
    assert [budget.batch() for _ in range(50)] == [None] * 50
    assert budget.starts == 2
    assert len(budget.said) == 1


def test_passes_count_between_steps_and_only_steps_are_measured() -> None:
    budget = Alone()
    budget.batch(True)
    found = [budget.batch(steps=number % 4 == 3) for number in range(4 * (MEASURED_STEPS + 2))]
    assert [number for number, again in enumerate(found) if again] == [4 * MEASURED_STEPS]
    assert found[4 * MEASURED_STEPS] == 0.25


def test_the_search_for_steps_without_compiling_ends() -> None:
    budget = Alone()
    assert [budget.batch(number % 3 == 0) for number in range(MOST_STEPS + 50)] == [None] * (MOST_STEPS + 50)
    assert ["Set unsharded_cache_mb to keep some" in line for line in budget.said] == [True]


def test_other_options_are_measured_anew() -> None:
    budget = Alone()
    for _ in range(2):
        assert [budget.batch(number == 1) is None for number in range(MEASURED_STEPS + 3)].count(False) == 1
        budget.reset()


def test_a_device_that_does_not_tell_keeps_nothing_and_says_so_once() -> None:
    budget = Alone(reports_memory=False)
    assert [budget.batch(True) for _ in range(9)] == [None] * 9
    assert budget.said == [
        "reshard_after_forward='auto' keeps no parameters: this device does not tell how much memory it has."
    ]


@pytest.mark.parametrize("chosen", [{}, {"unsharded_cache_mb": 7}, {"reshard_after_forward": "auto", "compile": False}])
def test_without_auto_nothing_is_measured(chosen: dict[str, Any]) -> None:
    budget = Alone()
    assert [budget.batch(config=options(**chosen)) for _ in range(9)] == [None] * 9
    assert (budget.starts, budget.said) == (0, [])


def test_until_the_step_the_budget_is_one_of_bytes() -> None:
    budget, config = Alone(), options(reshard_after_forward="auto", unsharded_cache_until="step")
    budget.plans.agreed_plans = (plan("forward", (1, 10**6)),)
    assert budget.until_step(config.compiled) == 0.0
    for number in range(9):
        assert budget.batch(number == 1, config=config) is None
    assert budget.until_step(config.compiled) == 0.0
    assert budget.until_step(CompileConfig(unsharded_cache_mb=3, unsharded_cache_until="step")) == 3 * 2**20
    assert budget.until_step(CompileConfig(unsharded_cache_mb=3)) == 0.0


def test_a_device_is_not_read_in_backward_once_all_is_decided() -> None:
    budget, reads = Alone(), 0

    def read() -> DeviceMemory:
        nonlocal reads
        reads += 1
        return budget._read()

    budget._gauge.read = read  # type: ignore[method-assign]
    budget._wanted = budget._course.looked = True  # a limit was given, and a first step has been looked at
    budget._measuring.quiet.steps = 1
    budget.backward_begins()
    assert reads == 1, "what forward saves is measured"
    budget._course.done = True
    budget.backward_begins()
    assert reads == 1
