"""Test the result of eager reads in each mode."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.sharding.weight_reader import GatheredWeight, WeightReader


@pytest.fixture
def param() -> nn.Parameter:
    return nn.Parameter(torch.zeros(4), requires_grad=False)


def test_outside_of_a_forward_a_weight_knows_its_parameter(param: nn.Parameter) -> None:
    weight = torch.ones(2, 2)
    wrap = WeightReader().wrap(weight, param)
    assert wrap is weight
    assert type(wrap) is GatheredWeight
    assert not wrap.requires_grad


def test_in_a_forward_it_is_a_plain_tensor_where_autograd_looks(param: nn.Parameter) -> None:
    view = WeightReader()
    view.begin_forward()
    assert type(view.wrap(torch.ones(2, 2), param)) is torch.Tensor
    with torch.no_grad():
        assert type(view.wrap(torch.ones(2, 2), param)) is GatheredWeight
    for _ in range(2):
        view.end_forward()
        assert type(view.wrap(torch.ones(2, 2), param)) is GatheredWeight


def test_code_that_builds_a_model_sees_a_parameter_whose_data_is_the_weights(param: nn.Parameter) -> None:
    view, weight = WeightReader(), torch.ones(2, 2)
    view.begin_forward()
    with view.reading_parameters():
        wrap: Any = view.wrap(weight, param)
        assert isinstance(wrap, nn.Parameter)
        assert not wrap.requires_grad
        wrap.data = torch.full((2, 2), 3.0)
        assert weight.eq(3).all()
    assert type(view.wrap(weight, param)) is torch.Tensor


@pytest.mark.parametrize("mode", ["reading_shards", "reading_parameters"])
def test_modes_end_with_an_exception(mode: str, param: nn.Parameter) -> None:
    view = WeightReader()
    with pytest.raises(KeyError), getattr(view, mode)():
        assert view.reads_shards == (mode == "reading_shards")
        raise KeyError
    assert not view.reads_shards
    assert type(view.wrap(torch.ones(1), param)) is GatheredWeight


def test_it_remembers_the_last_read_while_the_parameter_lives() -> None:
    view = WeightReader()
    assert view.last_read is None
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    view.note_read(first)
    view.note_read(second)
    assert view.last_read is second
    del second
    gc.collect()
    assert view.last_read is None


def test_a_given_weight_is_told_of_once() -> None:
    view = WeightReader()
    assert not view.pop_functional_call_read()
    view.note_functional_call_read()
    assert [view.pop_functional_call_read(), view.pop_functional_call_read()] == [True, False]


def test_it_finds_the_record_of_a_parameter_while_there_is_an_engine(param: nn.Parameter) -> None:
    class Engine:
        def __init__(self) -> None:
            self.sharder = self

        def find(self, found: nn.Parameter) -> str | None:
            return "its record" if found is param else None

    view, engine = WeightReader(), Engine()
    assert (view.engine, view.find_record(param)) == (None, None)
    view.bind_engine(engine)
    assert (view.engine, view.find_record(param)) == (engine, "its record")
    del engine
    gc.collect()
    assert (view.engine, view.find_record(param)) == (None, None)
