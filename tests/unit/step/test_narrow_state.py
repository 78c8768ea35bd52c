"""State in bfloat16: the same to the last bit however a step is carried out and wherever the elements lie, and as near to
float32's as its rounding allows."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.offload.pinned_memory import HostMemory
from lightning_zero.offload.staging_ring import StagingRing
from lightning_zero.optim.bf16_state import ROUNDING_COUNT
from lightning_zero.optim.flat_runs import StateOnHost
from lightning_zero.step.runners import CapturedRunner
from lightning_zero.step.stepper import OptimizerStepper
from tests.helpers.lion import Lion
from tests.helpers.one_rank import OneRank

CPU = torch.device("cpu")
SHAPES = [(72, 61), (61,), (4096,), (63, 65), (70, 90)]  # the fourth has one element less than is needed
STEPS = 6
Make = Callable[[Any], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "a user's own": lambda p: Lion(p, lr=0.01),
}


class Training:
    """Of one rank, whose gradients are the same in every training."""

    def __init__(self, make: Make, narrow: bool = True, on_host: bool = False, rank: int = 0, world: int = 1) -> None:
        self.sharder: Any = OneRank(SHAPES, rank=rank, world_size=world)
        self.optimizer = make(self.sharder.params)
        self.host = StateOnHost(HostMemory(CPU), StagingRing(CPU, 1 << 15)) if on_host else None
        self.narrow, self.steps = narrow, 0
        self.capture(False)

    def capture(self, capture: bool) -> None:
        device: Any = (self.optimizer, self.sharder, capture, True)
        self.stepper = OptimizerStepper(*device, self.host, self.narrow)

    def go(
        self, steps: int = STEPS, skip: float | None = None, without: tuple[int, ...] = (), scale: float = 1.0
    ) -> "Training":
        for _ in range(steps):
            self.steps += 1
            self.sharder.bring(self.steps, without)
            for record in self.sharder.live:
                record.gradient.mul_(scale)
            self.stepper.begin(None if skip is None else torch.tensor(skip))
            self.optimizer.step()
            self.stepper.end()
        return self

    def kept(self) -> list[dict[str, Any]]:
        """Of each parameter: its values, and what the optimizer keeps; without padding."""
        found = []
        for record in self.sharder.live:
            begin, end = record.layout.shard_range(self.sharder.rank)
            entries = {"param": record.param, **self.optimizer.state[record.param]}
            found.append(
                {
                    key: value.detach().reshape(-1)[: end - begin].clone() if value.numel() > 1 else float(value)
                    for key, value in entries.items()
                    if isinstance(value, Tensor)
                }
            )
        return found


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", MAKES)
def test_the_parameters_global_size_decides_what_is_narrow(name: str) -> None:
    for world in (1, 3):
        for number, entries in enumerate(Training(MAKES[name], world=world).go(2).kept()):
            dtypes = {key: value.dtype for key, value in entries.items() if isinstance(value, Tensor)}
            assert dtypes.pop("param") is torch.float32
            assert set(dtypes.values()) == {torch.float32 if number in (1, 3) else torch.bfloat16}


@pytest.mark.parametrize("name", MAKES)
def test_captured_eager_and_on_the_host_are_the_same_to_the_last_bit(name: str) -> None:
    expected = Training(MAKES[name]).go().kept()
    for on_host in (False, True):
        for capture in (False, True):
            training = Training(MAKES[name], on_host=on_host)
            training.capture(capture)
            same(training.go().kept(), expected)
            assert isinstance(training.stepper.runner, CapturedRunner)


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_ranks_has_the_same_to_the_last_bit(name: str, world: int) -> None:
    expected = Training(MAKES[name]).go().kept()
    ranks = [Training(MAKES[name], rank=rank, world=world).go().kept() for rank in range(world)]
    for number, entries in enumerate(expected):
        for key, value in entries.items():
            parts = [rank[number][key] for rank in ranks]
            same(torch.cat(parts) if isinstance(value, Tensor) else parts[0], value)


@pytest.mark.parametrize("name", MAKES)
def test_what_is_loaded_goes_on_as_if_nothing_had_happened(name: str) -> None:
    """Also where it has become float32 on the way, and where some parameters rest for a while."""
    expected = Training(MAKES[name]).go(2).go(1, without=(2, 4)).go(3)
    training = Training(MAKES[name]).go(2).go(1, without=(2, 4))
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    wide = training.optimizer.state[training.sharder.params[0]]
    assert {value.dtype for value in wide.values() if value.numel() > 1} == {torch.float32}
    same(training.go(3).kept(), expected.kept())


def test_what_has_no_state_yet_is_stepped_beside_what_has_some() -> None:
    training = Training(MAKES["AdamW"]).go(2, without=(2, 4)).go(2)
    counts = [entries["step"] for entries in training.kept()]
    assert counts == [4, 4, 2, 4, 2]
    assert training.kept()[4]["exp_avg"].dtype is torch.bfloat16


def test_an_optimizer_that_counts_no_steps_has_them_counted() -> None:
    training = Training(MAKES["SGD"]).go(5)
    assert [entries.get(ROUNDING_COUNT) for entries in training.kept()] == [5, None, 5, None, 5]


def test_a_skipped_step_changes_nothing() -> None:
    training = Training(MAKES["AdamW"]).go(3)
    before = copy.deepcopy(training.kept())
    same(training.go(1, skip=1.0).kept(), before)
    training.steps -= 1
    same(training.go(1, skip=0.0).kept(), Training(MAKES["AdamW"]).go(4).kept())


def test_an_optimizer_whose_formula_is_not_known_is_refused_by_name() -> None:
    class Mine(torch.optim.AdamW):
        pass

    with pytest.raises(UnsupportedError, match="what Mine keeps rounded .* leave state_dtype out"):
        Training(Mine).go(1)


def test_moments_and_weights_stay_as_near_to_those_in_float32_as_rounding_allows() -> None:
    """Rounding adds to an average an error of zero mean and of at most half of what bfloat16 can tell apart, 2**-7 of
    the value, as standard deviation; the average forgets it at its own rate. So no average is off by more than that over
    sqrt(1 - beta**2), nor on the whole: rounded to the nearest, second moments would stand still, which fall here by a
    thousandth each step."""
    steps, rate, unit = 200, 1e-3, 2.0**-7
    beta1, beta2 = 0.9, 0.999

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=rate, weight_decay=0.0, betas=(beta1, beta2))

    found, expected = (Training(make, narrow).go(1).go(steps, scale=0.1).kept() for narrow in (True, False))
    for number in (0, 2, 4):
        error: dict[str, float] = {}
        for key, beta in (("exp_avg", beta1), ("exp_avg_sq", beta2)):
            exact = expected[number][key].double()
            off = found[number][key].double() - exact
            size = exact.square().mean().sqrt()
            error[key] = unit / 2 / math.sqrt(1 - beta**2)
            if key == "exp_avg":  # whose values in the past were as large as they are now, and not larger
                assert off.square().mean().sqrt() < error[key] * size
            else:
                assert (off / exact).square().mean().sqrt() < error[key]
            # On the whole: the mean of so many independent errors.
            assert off.mean().abs() < 5 * error[key] * size / math.sqrt(len(exact))
        moved = found[number]["param"] - expected[number]["param"]
        # Of each step, of about the rate, the part by which first moments and roots of second ones are off.
        assert moved.square().mean().sqrt() < steps * rate * (error["exp_avg"] + error["exp_avg_sq"] / 2)
