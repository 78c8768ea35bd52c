"""The optimizer steps flat buffers in a few parts, or by a captured graph, with the results of single parameters."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.flat_runs import FlatRun
from lightning_zero.step.elementwise_check import CHECKED_STEPS
from tests.helpers.models import build
from tests.helpers.optimizer_steps import (
    OPTIMIZERS,
    SELDOM,
    Event,
    Parts,
    compare,
    forget_one_state,
    load_own_state,
    nothing,
    other_settings,
    replace_gradients,
    train_sharded_steps,
    unfreeze_and_add,
)
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import engine_for, whole_params
from tests.ranks.pool import Ranks


class ByRows(torch.optim.SGD):
    """Keeps a number for each row: no optimizer for shards."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for param in self.param_groups[0]["params"]:
            self.state[param]["rows"] = param.detach().new_zeros(2)


@pytest.mark.parametrize("emulate", [False, True], ids=["own", "captured"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in SELDOM])
def test_steps_equal_the_plain_optimizers(ranks: Ranks, name: str, emulate: bool) -> None:
    for flat_runs, captured, *_ in compare(ranks, 3 if name == "AdamW" else 2, name, nothing, emulate):
        assert captured == (emulate and name != "Lion")
        if name != "Lion":  # which could ask for shapes
            assert flat_runs <= 2 if captured else flat_runs <= 4


@pytest.mark.parametrize("name", SELDOM)
def test_captured_steps_of_less_common_optimizers_equal_the_plain_ones(ranks: Ranks, name: str) -> None:
    for _, captured, *_ in compare(ranks, 2, name, load_own_state, True):
        assert captured


@pytest.mark.parametrize("emulate", [False, True], ids=["own", "captured"])
@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("AdamW", unfreeze_and_add),
        ("AdamW", other_settings),
        ("SGD", other_settings),
        ("AdamW", load_own_state),
        ("AdamW", forget_one_state),
        ("AdamW", replace_gradients),
        ("Lion", unfreeze_and_add),
    ],
)
def test_changes_between_steps_are_noticed(ranks: Ranks, name: str, event: Event, emulate: bool) -> None:
    compare(ranks, 2, name, event, emulate)


def hooks_see() -> list[Any]:
    model = build(Parts)
    seen = []
    with engine_for(model, "eager", emulate_cuda_graph_step=True) as engine:
        with engine.registered_parameters():
            optimizer = torch.optim.AdamW(model.parameters())
        params = optimizer.param_groups[0]["params"]
        state = optimizer.state
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["params"] is params))
        optimizer.register_step_post_hook(lambda o, *_: seen.append(o.param_groups[0]["params"] is params))
        optimizer.register_step_post_hook(lambda o, *_: seen.append(o.state is state and len(state) == len(params)))

        for _ in range(4):

            def closure() -> Tensor:
                with engine.train_step():
                    loss = model(torch.ones(3, 19)).mean()
                loss.backward()
                engine.optimizers.begin(optimizer)
                return loss

            optimizer.zero_grad()
            with engine.optimizers.with_closure(optimizer) as wrap:
                loss = optimizer.step(wrap(closure))
            seen.append(bool(loss.isfinite()))
    return seen


def train_with_counts_elsewhere(name: str, event: Event, emulate: bool) -> Any:
    """As on a GPU, where an optimizer keeps its step counts on the host until they are captured."""
    moved: list[Tensor] = []  # held, so that no other memory gets their addresses

    def move_counts(self: FlatRun, device: torch.device) -> bool:
        there = {counts.untyped_storage().data_ptr() for counts in moved}
        away = [key for key, counts in self.counts.items() if counts.untyped_storage().data_ptr() not in there]
        for key in away:
            self.counts[key] = self.counts[key].clone()
            self.state[key] = self.counts[key][0]
            moved.append(self.counts[key])
        return bool(away)

    with patch.object(FlatRun, "move_counts", move_counts):
        return train_sharded_steps(name, event, emulate)


@pytest.mark.parametrize("event", [nothing, unfreeze_and_add])
def test_counts_that_move_to_the_device_are_those_of_all_plans(ranks: Ranks, event: Event) -> None:
    for _, captured, *_ in compare(ranks, 2, "AdamW", event, True, train_with_counts_elsewhere):
        assert captured


def gradients_by_hand(emulate: bool) -> tuple[list[list[Tensor]], list[list[Tensor]], list[int]]:
    """Weights that are not trained have no place here, by turns each in memory of its own, and side by side."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).requires_grad_(False)
    plain = [nn.Parameter(layer.weight.detach().reshape(1, -1).clone()) for layer in model]
    found, expected, flat_runs = [], [], []
    with engine_for(model, "eager", emulate_cuda_graph_step=emulate) as engine:
        theirs, optimizer = (torch.optim.AdamW(params, lr=0.02) for params in (plain, model.parameters()))
        ways = [torch.zeros(1, 64), torch.zeros(1, 64)], torch.zeros(2, 1, 64).unbind()[::-1]  # in the order of shards
        for step in range(8):
            grads = ways[step // 2 % 2]
            for param, other, grad in zip(model.parameters(), plain, grads, strict=True):
                param.grad = grad.copy_(torch.randn(1, 64))
                other.grad = grad.clone()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            theirs.step()
            found.append([param.to_local().view(1, -1) for param in model.parameters()])
            expected.append([param.detach().clone() for param in plain])
            flat_runs.append(len(engine.optimizers.stepper(optimizer).layout.runs))
    return found, expected, flat_runs


@pytest.mark.parametrize("emulate", [False, True], ids=["own", "captured"])
def test_state_that_moves_for_one_plan_moves_for_all(ranks: Ranks, emulate: bool) -> None:
    ((found, expected, flat_runs),) = ranks.run(1, gradients_by_hand, emulate)
    assert flat_runs == [2, 2, 1, 1] * 2
    assert_close_relative(found, expected, 1e-6)


def test_hooks_see_the_optimizers_own_parameters_and_state(ranks: Ranks) -> None:
    for seen in ranks.run(2, hooks_see):
        assert all(seen), seen


def require_capture(name: str, emulate: bool) -> str:
    model = build(Parts)
    with engine_for(model, "eager", emulate_cuda_graph_step=emulate, cuda_graph_step=True) as engine:
        with engine.registered_parameters():
            optimizer = OPTIMIZERS[name](model)
        try:
            engine.optimizers.check(optimizer)
        except UnsupportedError as error:
            return str(error)
    return ""


def test_a_step_that_must_be_captured_but_cannot_is_an_error(ranks: Ranks) -> None:
    (message,) = ranks.run(1, require_capture, "AdamW", False)
    assert "cuda_graph_step=True, but the step of AdamW cannot be captured: there are no CUDA graphs" in message
    assert "cuda_graph_step='auto'" in message
    (message,) = ranks.run(1, require_capture, "Lion", True)
    assert "the step of Lion cannot be captured: its update rule is not known" in message
    assert ranks.run(1, require_capture, "AdamW", True) == [""]


def step_by_rows() -> str:
    model = build(Parts)
    with engine_for(model, "eager") as engine:
        with engine.registered_parameters():
            optimizer = ByRows(model.parameters(), lr=0.1)
        with engine.train_step():
            loss = model(torch.ones(3, 19)).mean()
        loss.backward()
        try:
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
        except UnsupportedError as error:
            return str(error)
    return ""


def test_state_that_is_not_kept_by_element_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(2, step_by_rows):
        assert "keeps a state 'rows' of shape" in message
        assert "does not treat elements one by one" in message


class ByShape(torch.optim.Optimizer):
    """Reads shapes, as rules that scale by fan-in do, from the step ``begin`` on."""

    def __init__(self, params: Any, begin: int = 0) -> None:
        super().__init__(params, {"lr": 0.01})
        self.begin, self.steps = begin, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            momentum = self.state[param].setdefault("momentum", torch.zeros_like(param)).lerp_(param.grad, 0.5)
            scale = 1.0
            if self.steps >= self.begin:
                matrix = param.ndim > 1 and len(param.grad.shape) > 1
                scale = param.shape[-1] ** -0.5 * param.grad.size(0) if matrix else 1 / momentum.numel()
            param.add_(momentum, alpha=-0.01 * scale)
        self.steps += 1


def by_shape(begin: int) -> Any:
    model = build(Parts)
    plain = copy.deepcopy(model)
    with engine_for(model, "eager") as engine:
        ours, theirs, flat_runs = ByShape(model.parameters(), begin), ByShape(plain.parameters(), begin), []
        for step in range(CHECKED_STEPS + 2):
            x = torch.randn(3, 19, generator=torch.Generator().manual_seed(step))
            with engine.train_step():
                loss = model(x).square().mean()
            loss.backward()
            plain(x).square().mean().backward()
            try:
                with engine.optimizers.stepping(ours):
                    ours.step()
            except UnsupportedError as error:
                return step, str(error)
            theirs.step()
            ours.zero_grad()
            theirs.zero_grad()
            layout = engine.optimizers.stepper(ours).layout
            assert layout is not None
            flat_runs.append(len(layout.runs))
        return whole_params(engine, model), dict(plain.named_parameters()), flat_runs


def test_a_step_that_reads_shapes_reads_those_of_full_parameters(ranks: Ranks) -> None:
    for found, expected, flat_runs in ranks.run(2, by_shape, 0):
        assert_close_relative(found, {k: v.detach() for k, v in expected.items()}, 1e-5)
        assert set(flat_runs) == {len(expected)}
    for step, message in ranks.run(2, by_shape, CHECKED_STEPS):
        assert step == CHECKED_STEPS
        assert message.startswith("The step() of ByShape asks for the "), message


class Failing(torch.optim.SGD):
    """Fails in its step, as ``fails`` does with a gradient."""

    def __init__(self, params: Any, fails: Callable[[Tensor], Any]) -> None:
        super().__init__(params, lr=0.1)
        self.fails = fails

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.ndim > 1:
                self.fails(param.grad)


def no_device(grad: Tensor) -> None:
    raise RuntimeError("no kernel image is available for execution")


def no_memory(grad: Tensor) -> None:
    raise torch.OutOfMemoryError("tried to allocate a tensor of size 3 GiB")


# As Alice, DASH, RACS and FlashAdamW of pytorch_optimizer do; by Python code of the optimizer; or not about shapes.
FAILURES: dict[str, tuple[Callable[[Tensor], Any], type[Exception]]] = {
    "view": (lambda grad: grad.view(19, -1), RuntimeError),
    "product": (lambda grad: torch.ones(19, 19).addcmul_(torch.ones(19, 19), grad), RuntimeError),
    "dimension": (lambda grad: grad.transpose(0, 2), IndexError),
    "unpack": (lambda grad: [rows + columns for rows, columns in [grad.stride() + (1,)]], ValueError),
    "device": (no_device, RuntimeError),
    "memory": (no_memory, torch.OutOfMemoryError),
}


def fail_in_step(with_closure: bool) -> dict[str, tuple[type, str, type]]:
    found = {}
    for name, (fails, _) in FAILURES.items():
        model = build(Parts)
        with engine_for(model, "eager") as engine:
            optimizer = Failing(model.parameters(), fails)
            with engine.train_step():
                loss = model(torch.ones(3, 19)).square().mean()
            loss.backward()
            steps = engine.optimizers
            try:
                if with_closure:
                    with steps.with_closure(optimizer):
                        steps.begin(optimizer)
                        optimizer.step()
                else:
                    with steps.stepping(optimizer):
                        optimizer.step()
            except Exception as error:
                found[name] = type(error), str(error), type(error.__cause__)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_that_fails_for_shapes_says_that_it_needs_full_matrices(
    ranks: Ranks, world_size: int, with_closure: bool
) -> None:
    for outcomes in ranks.run(world_size, fail_in_step, with_closure):
        for name, (kind, message, cause) in outcomes.items():
            original = FAILURES[name][1]
            if name in ("device", "memory"):
                assert (kind, cause) == (original, type(None)), f"{name}: {message}"
            else:
                assert (kind, cause) == (UnsupportedError, original), f"{name}: {message}"
                assert message.startswith(f"The step() of Failing failed ({original.__name__}: "), message
                assert "lightning_zero.register_matrix_rule" in message
        assert len(outcomes) == len(FAILURES)


def test_an_unknown_optimizer_that_reads_no_shapes_steps_neighbours_together_later(ranks: Ranks) -> None:
    for found, expected, flat_runs in ranks.run(2, by_shape, 1000):
        assert_close_relative(found, {k: v.detach() for k, v in expected.items()}, 1e-5)
        assert flat_runs[:CHECKED_STEPS] == [len(expected)] * CHECKED_STEPS
        assert flat_runs[CHECKED_STEPS] < len(expected)
