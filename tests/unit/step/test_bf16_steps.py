"""Test bfloat16 state: all runners agree bitwise, and the error against float32 is that of rounding."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.bf16_state import ROUNDING_COUNT
from lightning_zero.step.runners import CapturedRunner
from tests.helpers.rounded_steps import MAKES, Training


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
    """Also if it became float32 in between, and if some parameters pause for a while."""
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

    with pytest.raises(UnsupportedError, match="rounds the state of Mine .* leave state_dtype out"):
        Training(Mine).go(1)


@pytest.mark.parametrize(
    "options",
    [{"state_dtype": "bf16"}, {"state_dtype": "8bit"}, {"round_weights": True, "state_dtype": None}, {"on_host": True}],
    ids=str,
)
def test_a_second_step_in_a_hook_is_refused(options: dict[str, Any]) -> None:
    training = Training(lambda params: torch.optim.AdamW(params, lr=0.01), **options)
    hook = training.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.step())
    with pytest.raises(UnsupportedError, match=r"AdamW.step\(\) was called again .* `optimizer.step\(\)` twice"):
        training.go(1)
    hook.remove()
    training.go(1)


def test_moments_and_weights_stay_as_near_to_those_in_float32_as_rounding_allows() -> None:
    """Bound the error of averages by that of their rounding.

    Rounding adds an error of zero mean and of at most half of bfloat16's resolution (2**-7 of the value) as standard
    deviation. An average forgets it at its own rate, so its error is at most that over sqrt(1 - beta**2). With
    round-to-nearest, second moments would not change, which fall here by a thousandth at each step.
    """
    steps, rate, unit = 200, 1e-3, 2.0**-7
    beta1, beta2 = 0.9, 0.999

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=rate, weight_decay=0.0, betas=(beta1, beta2))

    found, expected = (Training(make, dtype).go(1).go(steps, scale=0.1).kept() for dtype in ("bf16", None))
    for number in (0, 2, 4):
        error: dict[str, float] = {}
        for key, beta in (("exp_avg", beta1), ("exp_avg_sq", beta2)):
            exact = expected[number][key].double()
            off = found[number][key].double() - exact
            size = exact.square().mean().sqrt()
            error[key] = unit / 2 / math.sqrt(1 - beta**2)
            if key == "exp_avg":  # whose past values were at most as large as the present ones
                assert off.square().mean().sqrt() < error[key] * size
            else:
                assert (off / exact).square().mean().sqrt() < error[key]
            # The mean of many independent errors.
            assert off.mean().abs() < 5 * error[key] * size / math.sqrt(len(exact))
        moved = found[number]["param"] - expected[number]["param"]
        # The relative error of a step of about the learning rate, from first moments and roots of second moments.
        assert moved.square().mean().sqrt() < steps * rate * (error["exp_avg"] + error["exp_avg_sq"] / 2)
