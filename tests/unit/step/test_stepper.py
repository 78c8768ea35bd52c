"""Test the choice of runners and layouts, and that steps are invisible to the optimizer's users."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_zero.errors import UnsupportedError
from lightning_zero.step.cycle import StepEvents
from lightning_zero.step.optimizer_steps import OptimizerSteps
from lightning_zero.step.runners import CapturedRunner, EagerRunner
from lightning_zero.step.step_layouts import FlatParams, OwnParams, StepDemands, StepLayout
from lightning_zero.step.stepper import OptimizerStepper
from tests.helpers.one_rank import OneRank
from tests.helpers.options import config

SHAPES = [(19, 7), (7,), (23, 3), (5,)]
CLIP = 0.4
Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, eps=1e-4)


class Bench:
    """An optimizer over shards, and the same one over a copy of their values."""

    def __init__(self, make: Make = adamw, capture: bool = False) -> None:
        self.sharder: Any = OneRank(SHAPES)
        self.optimizer = make(self.sharder.params)
        self.copies = [torch.nn.Parameter(param.detach().clone()) for param in self.sharder.params]
        self.plain = make(self.copies)
        self.stepper = OptimizerStepper(self.optimizer, self.sharder, capture, emulate=True)
        self.steps = 0

    def bring(self, without: Sequence[int] = ()) -> None:
        self.steps += 1
        self.sharder.bring(self.steps, without)
        for mine, theirs in zip(self.sharder.params, self.copies, strict=True):
            theirs.grad = None if mine.grad is None else mine.grad.clone()

    def step(self, clip: float | None = None, without: Sequence[int] = (), later: bool = True) -> None:
        self.bring(without)
        if clip is not None:
            norm = self.stepper.clip_norm(clip, later)
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(self.copies, clip))
        self.stepper.begin()
        self.optimizer.step()
        assert self.stepper.end()
        self.plain.step()
        self.check()

    def check(self) -> None:
        for mine, theirs in zip(self.sharder.params, self.copies, strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-6, atol=1e-7)
            assert self.optimizer.state[mine].keys() == self.plain.state[theirs].keys()
            for key, value in self.plain.state[theirs].items():
                torch.testing.assert_close(self.optimizer.state[mine][key], value, rtol=1e-5, atol=1e-7)

    def skip(self, flag: float) -> None:
        self.bring()
        self.stepper.begin(skip=torch.tensor(flag))
        self.optimizer.step()
        self.stepper.end()


def dampened(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)


@pytest.mark.parametrize(("make", "first"), [(adamw, CapturedRunner), (dampened, EagerRunner)])
def test_the_optimizer_makes_the_first_step_only_if_its_rule_does_not_tell_how_state_begins(
    make: Any, first: type
) -> None:
    bench, runners = Bench(make, capture=True), []
    for step in range(4):
        bench.step(clip=CLIP if step % 2 else None)
        runners.append(type(bench.stepper.runner))
    assert runners == [first, CapturedRunner, CapturedRunner, CapturedRunner]


def test_without_capture_the_optimizer_makes_all_of_them() -> None:
    bench = Bench()
    for _ in range(3):
        bench.step(clip=CLIP)
        assert type(bench.stepper.runner) is EagerRunner
    assert bench.stepper.eager_reason == "capture is switched off"


@pytest.mark.parametrize(("capture", "deferred"), [(True, True), (False, False)])
def test_gradients_are_scaled_by_the_step_where_its_runner_does_so(capture: bool, deferred: bool) -> None:
    bench = Bench(capture=capture)
    bench.step()
    bench.bring()
    before = [param.grad.clone() for param in bench.sharder.params]
    bench.stepper.clip_norm(CLIP, later=True)
    after = [param.grad for param in bench.sharder.params]
    assert all(map(torch.equal, before, after)) == deferred
    bench.stepper.clip_norm(CLIP, later=False)
    assert not any(map(torch.equal, before, after))


@pytest.mark.parametrize("capture", [False, True])
def test_the_device_skips_even_the_first_step_if_it_is_captured(capture: bool) -> None:
    bench = Bench(capture=capture)
    bench.bring()
    assert bench.stepper.may_skip() == capture
    if not capture:
        return
    before = [param.detach().clone() for param in bench.sharder.params]
    bench.skip(1.0)
    assert all(map(torch.equal, before, bench.sharder.params))
    assert {int(state["step"]) for state in bench.optimizer.state.values()} == {0}


def test_the_device_skips_a_step_only_by_replay() -> None:
    bench = Bench(dampened, capture=True)
    bench.bring()
    assert not bench.stepper.may_skip()
    bench.step()
    bench.bring()
    assert bench.stepper.may_skip()
    before = [param.detach().clone() for param in bench.sharder.params]
    bench.skip(1.0)
    assert all(map(torch.equal, before, bench.sharder.params))
    bench.skip(0.0)
    assert not any(map(torch.equal, before, bench.sharder.params))


class Doubling:
    """A runner with a behavior of its own."""

    can_clip = can_skip = False

    def __init__(self) -> None:
        self.log: list[str] = []

    def can_step(self, layout: StepLayout, own: OwnParams) -> bool:
        return len(layout.runs) == 1

    def begin(self, layout: StepLayout, own: OwnParams, demands: StepDemands) -> FlatParams:
        self.log.append("begin")
        with torch.no_grad():
            for run in layout.runs:
                run.param.mul_(2)
        return FlatParams([], layout.state, [])

    def end(self, layout: StepLayout, own: OwnParams) -> None:
        self.log.append("end")


def test_another_runner_only_has_to_come_first() -> None:
    bench, doubling = Bench(lambda params: torch.optim.SGD(params, lr=0.1), capture=True), Doubling()
    bench.stepper._runners = (doubling, *bench.stepper._runners)
    bench.bring()
    before = [param.detach().clone() for param in bench.sharder.params]
    bench.stepper.begin()
    bench.optimizer.step()
    assert doubling.log == ["begin", "end"]
    for param, old in zip(bench.sharder.params, before, strict=True):
        torch.testing.assert_close(param.detach(), 2 * old)
    bench.bring(without=[1])  # two runs: the next runner in order steps them
    bench.stepper.begin()
    assert type(bench.stepper.runner) is CapturedRunner


def test_each_pattern_of_gradients_has_a_layout_that_is_kept() -> None:
    bench = Bench(capture=True)
    seen = []
    for without in ((), (1,), (), (1,), (), (1,), (2, 3)):
        bench.step(clip=CLIP, without=without)
        seen.append(bench.stepper.layout)
    assert seen[2] is seen[4]
    assert seen[3] is seen[5]
    assert len({id(layout) for layout in seen[3:]}) == 3


@pytest.mark.parametrize("capture", [False, True])
def test_state_that_is_loaded_counts(capture: bool) -> None:
    bench = Bench(capture=capture)
    bench.step()
    bench.step()
    layout = bench.stepper.layout
    for optimizer in (bench.optimizer, bench.plain):
        state = copy.deepcopy(optimizer.state_dict())
        for entries in state["state"].values():
            entries["exp_avg"].mul_(3)
        optimizer.load_state_dict(state)
    bench.step()
    assert bench.stepper.layout is not layout
    bench.step()


def test_a_gradient_that_somebody_put_there_is_the_one_that_counts() -> None:
    bench = Bench()
    bench.step()
    bench.bring()
    for params in (bench.sharder.params, bench.copies):
        params[0].grad = torch.full_like(params[0], 0.3)
    bench.sharder.key += 1
    bench.stepper.begin()
    bench.optimizer.step()
    bench.stepper.end()
    bench.plain.step()
    bench.check()


def test_a_parameter_of_another_model_is_refused() -> None:
    bench = Bench()
    bench.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    bench.bring()
    with pytest.raises(UnsupportedError, match="Parameter 0 of group 1 in AdamW"):
        bench.stepper.begin()


@pytest.mark.parametrize("capture", [False, True])
def test_hooks_of_users_see_the_optimizers_own(capture: bool) -> None:
    bench, seen = Bench(capture=capture), []
    own = bench.optimizer.param_groups, bench.optimizer.state

    def look(*_: Any) -> None:
        seen.append((bench.optimizer.param_groups, bench.optimizer.state))

    bench.optimizer.register_step_post_hook(look)
    bench.step()
    bench.step()
    assert [(groups is own[0], state is own[1]) for groups, state in seen] == [(True, True)] * 2
    assert len(bench.optimizer._optimizer_step_post_hooks) == 1, "ours is gone"


def quarter(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Change all gradients and the settings of one group, as users do in a pre-hook."""
    optimizer.param_groups[0]["lr"] = 0.5 * 0.02
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad.mul_(0.25)


@pytest.mark.parametrize("everywhere", [False, True], ids=["of one", "of all optimizers"])
@pytest.mark.parametrize("capture", [False, True])
def test_hooks_ahead_of_a_step_change_what_is_stepped(capture: bool, everywhere: bool) -> None:
    bench = Bench(capture=capture)
    bench.step()
    hooks = [register_optimizer_step_pre_hook(quarter)] if everywhere else []
    if not everywhere:
        hooks = [optimizer.register_step_pre_hook(quarter) for optimizer in (bench.optimizer, bench.plain)]
    for _ in range(3):
        bench.bring()
        assert not bench.stepper.may_skip(), "the hooks would know nothing of it"
        norm = bench.stepper.clip_norm(CLIP, later=True)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(bench.copies, CLIP))
        bench.stepper.begin(in_closure=False)
        assert bench.stepper.in_progress
        bench.optimizer.step()
        assert not bench.stepper.in_progress
        assert bench.stepper.end()
        bench.plain.step()
        bench.check()
    for hook in hooks:
        hook.remove()
    bench.step(clip=CLIP)
    assert type(bench.stepper.runner) is (CapturedRunner if capture else EagerRunner)


@pytest.mark.parametrize("capture", [False, True])
def test_where_a_hook_raises_nothing_is_stepped(capture: bool) -> None:
    bench = Bench(capture=capture)
    bench.step()
    hook = bench.optimizer.register_step_pre_hook(refuse)
    bench.bring()
    bench.stepper.begin(in_closure=False)
    with pytest.raises(ValueError, match="not now"):
        bench.optimizer.step()
    assert not bench.stepper.end()
    bench.check()
    hook.remove()
    bench.step()


def refuse(*_: Any) -> None:
    raise ValueError("not now")


def test_under_way_is_from_begin_to_the_end_of_the_optimizers_own_step() -> None:
    bench = Bench()
    bench.bring()
    stepper = bench.stepper
    assert not stepper.in_progress
    stepper.begin()
    assert stepper.in_progress
    bench.optimizer.step()
    assert not stepper.in_progress
    assert (stepper.end(), stepper.end()) == (True, False)
    stepper.begin()
    stepper.end()
    assert not stepper.in_progress
    assert bench.optimizer.param_groups[0]["params"][0] is bench.sharder.params[0]


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.parametrize("capture", [True, False])
def test_a_step_in_a_hook_steps_once_more(capture: bool, register: str) -> None:
    bench = Bench(lambda params: torch.optim.SGD(params, lr=0.1), capture=capture)
    optimizers = steps(bench, [])
    calls: list[int] = []

    def step_once_more(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        calls.append(len(calls))
        if len(calls) % 2:
            optimizer.step()

    getattr(bench.optimizer, register)(step_once_more)
    for _ in range(2):
        bench.bring()
        with optimizers.stepping(bench.optimizer, clip=1e-3):
            bench.optimizer.step()
        torch.nn.utils.clip_grad_norm_(bench.copies, 1e-3)
        for _ in range(2):
            bench.plain.step()
        bench.check()
    assert len(calls) == 4


def test_inside_flat_there_are_a_few_parameters_with_their_gradients() -> None:
    bench = Bench()
    bench.bring()
    with bench.stepper.show_flat_params():
        (group,) = bench.optimizer.param_groups
        assert len(group["params"]) == 1
        group["params"][0].grad.mul_(0.5)
    for mine, theirs in zip(bench.sharder.params, bench.copies, strict=True):
        torch.testing.assert_close(mine.grad, 0.5 * theirs.grad)
    assert len(bench.optimizer.param_groups[0]["params"]) == len(SHAPES)


class Cycle(SimpleNamespace):
    def __init__(self, log: list[Any]) -> None:
        super().__init__(
            events=StepEvents(),
            before_step=lambda stepping: log.append("before"),
            end_backward=lambda: None,
            finalize_gradients=lambda: log.append("final"),
            begin_step=lambda step: log.append("begin"),
            end_step=lambda step, changed: log.append(("end", changed)),
        )


def steps(bench: Bench, log: list[Any]) -> OptimizerSteps:
    return OptimizerSteps(bench.sharder, Cycle(log), config(emulate_cuda_graph_step=True))  # type: ignore[arg-type]


def test_stepping_surrounds_a_plain_step() -> None:
    bench, log = Bench(), []
    optimizers = steps(bench, log)
    for _ in range(3):
        bench.bring()
        with optimizers.stepping(bench.optimizer, clip=CLIP) as norm:
            bench.optimizer.step()
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(bench.copies, CLIP))
        bench.plain.step()
        bench.check()
    assert log == ["begin", ("end", True)] * 3
    assert type(optimizers.stepper(bench.optimizer).runner) is CapturedRunner


def test_optimizers_of_an_earlier_training_are_gone_with_their_state() -> None:
    """They must not count as optimizers that may step next."""
    bench: Any = Bench()
    bench.sharder.memory, bench.stepper = SimpleNamespace(group_shards=lambda *_: None, steps_write_copies=False), None
    optimizers = steps(bench, [])
    for _ in range(2):
        optimizers.arrange([bench.optimizer])
        bench.bring()
        with optimizers.stepping(bench.optimizer):
            bench.optimizer.step()
        gone, bench.optimizer = weakref.ref(bench.optimizer), adamw(bench.sharder.params)
        assert len(optimizers._steppers) == 1
        optimizers.arrange([bench.optimizer])
        gc.collect()
        assert gone() is None
        assert len(optimizers._steppers) == 0


def test_a_step_that_fails_is_ended() -> None:
    """No runner must have stepped anything."""
    bench, log = Bench(), []
    optimizers = steps(bench, log)
    for _ in range(3):
        bench.bring()
        with pytest.raises(ZeroDivisionError), optimizers.stepping(bench.optimizer):
            raise ZeroDivisionError
        assert log == ["begin", ("end", False)]
        assert bench.optimizer.param_groups[0]["params"][0] is bench.sharder.params[0]
        for mine, theirs in zip(bench.sharder.params, bench.copies, strict=True):
            assert torch.equal(mine, theirs)
        with optimizers.stepping(bench.optimizer):
            bench.optimizer.step()
        bench.plain.step()
        bench.check()
        log.clear()
        for mine, theirs in zip(bench.sharder.params, bench.copies, strict=True):
            theirs.data.copy_(mine)  # the two may differ by rounding


def test_a_closure_that_is_called_twice_sees_the_optimizers_own_each_time() -> None:
    bench, log = Bench(), []
    optimizers = steps(bench, log)
    bench.bring()

    def closure() -> None:
        assert bench.optimizer.param_groups[0]["params"][0] is bench.sharder.params[0]
        log.append("closure")

    with optimizers.with_closure(bench.optimizer) as wrap:
        wrapped = wrap(closure)
        for _ in range(2):
            wrapped()
            optimizers.begin(bench.optimizer)
        bench.optimizer.step()
    assert log == [
        *(("end", False), "closure", "before", "begin"),
        *(("end", True), "closure", "before", "begin"),
        ("end", True),
    ]


def test_a_layout_is_laid_out_only_once_per_change() -> None:
    bench = Bench()
    bench.step()
    with patch("lightning_zero.step.step_layouts.make_flat_runs", side_effect=AssertionError("laid out again")):
        for _ in range(3):
            bench.step(clip=CLIP)


class Listing(torch.optim.SGD):
    """Keeps tensors in a list, as a preconditioner for each dimension."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sums"] = [param.detach().clone()]
        return super().step(closure)


def test_a_list_of_tensors_in_the_state_is_refused() -> None:
    bench = Bench(lambda params: Listing(params, lr=0.1))
    bench.bring()
    bench.stepper.begin()
    with pytest.raises(UnsupportedError, match=r"a state 'sums' for 'p\d' that is a list with a tensor of shape"):
        bench.optimizer.step()
