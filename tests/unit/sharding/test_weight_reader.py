"""What eager code is given for a weight, in each mode."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.sharding.gathered import GatheredWeight
from lightning_zero.sharding.weight_reader import WeightView


@pytest.fixture
def param() -> nn.Parameter:
    return nn.Parameter(torch.zeros(4), requires_grad=False)


def test_outside_of_a_forward_a_weight_knows_its_parameter(param: nn.Parameter) -> None:
    weight = torch.ones(2, 2)
    shown = WeightView().shown(weight, param)
    assert shown is weight
    assert type(shown) is GatheredWeight
    assert not shown.requires_grad


def test_in_a_forward_it_is_a_plain_tensor_where_autograd_looks(param: nn.Parameter) -> None:
    view = WeightView()
    view.begin_forward()
    assert type(view.shown(torch.ones(2, 2), param)) is torch.Tensor
    with torch.no_grad():
        assert type(view.shown(torch.ones(2, 2), param)) is GatheredWeight
    for _ in range(2):
        view.end_forward()
        assert type(view.shown(torch.ones(2, 2), param)) is GatheredWeight


def test_code_that_builds_a_model_sees_a_parameter_whose_data_is_the_weights(param: nn.Parameter) -> None:
    view, weight = WeightView(), torch.ones(2, 2)
    view.begin_forward()
    with view.parameters():
        shown: Any = view.shown(weight, param)
        assert isinstance(shown, nn.Parameter)
        assert not shown.requires_grad
        shown.data = torch.full((2, 2), 3.0)
        assert weight.eq(3).all()
    assert type(view.shown(weight, param)) is torch.Tensor


@pytest.mark.parametrize("mode", ["shards", "parameters"])
def test_modes_end_with_an_exception(mode: str, param: nn.Parameter) -> None:
    view = WeightView()
    with pytest.raises(KeyError), getattr(view, mode)():
        assert view.shows_shards == (mode == "shards")
        raise KeyError
    assert not view.shows_shards
    assert type(view.shown(torch.ones(1), param)) is GatheredWeight


def test_it_remembers_the_last_read_while_the_parameter_lives() -> None:
    view = WeightView()
    assert view.last_read is None
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    view.reads(first)
    view.reads(second)
    assert view.last_read is second
    del second
    gc.collect()
    assert view.last_read is None


def test_a_given_weight_is_told_of_once() -> None:
    view = WeightView()
    assert not view.take_given()
    view.was_given()
    assert [view.take_given(), view.take_given()] == [True, False]


def test_it_finds_the_record_of_a_parameter_while_there_is_an_engine(param: nn.Parameter) -> None:
    class Engine:
        def __init__(self) -> None:
            self.sharder = self

        def find(self, found: nn.Parameter) -> str | None:
            return "its record" if found is param else None

    view, engine = WeightView(), Engine()
    assert (view.engine, view.record_of(param)) == (None, None)
    view.belongs_to(engine)
    assert (view.engine, view.record_of(param)) == (engine, "its record")
    del engine
    gc.collect()
    assert (view.engine, view.record_of(param)) == (None, None)
