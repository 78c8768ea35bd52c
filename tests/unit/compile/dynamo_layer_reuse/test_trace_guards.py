"""Differences between modules without a guard reject reuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.compile.dynamo_layer_reuse.trace_guards import check_built_alike
from lightning_zero.compile.dynamo_layer_reuse.trace_inputs import ReuseRejected
from tests.unit.compile.dynamo_layer_reuse.layers import Layer


def nothing(layer: Any) -> None:
    pass


def numbered(layer: Any) -> None:
    layer.number = 7


def with_containers(layer: Any) -> None:
    layer.shapes = {"weight": (3, 4)}
    layer.options = {"target": {"name": "first", "scale": 1.0}}
    layer.activation = partial(nn.functional.gelu, approximate="tanh")  # transformers makes one for each layer


def named(layer: Any) -> None:
    layer.options = {"target": {"name": "second", "scale": 2.0}}  # PEFT keeps the path of each adapted layer so


def saved(layer: Any) -> None:
    layer.register_state_dict_post_hook(lambda *_: None)


@pytest.mark.parametrize("change", [nothing, numbered, named, with_containers, saved])
def test_attributes_with_guards_may_differ(change: Callable[[Any], None]) -> None:
    one, other = Layer(), Layer()
    with_containers(one)
    with_containers(other)
    change(other)
    check_built_alike(one, other)
    check_built_alike(one, one)


def other_class(layer: Any) -> None:
    layer.drop = nn.Identity()


def other_number_of_torchs(layer: Any) -> None:
    layer.norm.eps = 0.1


def evaluated(layer: Any) -> None:
    layer.drop.eval()


def hooked(layer: Any) -> None:
    layer.attention.register_full_backward_hook(lambda *_: None)


def with_an_attribute_more(layer: Any) -> None:
    layer.more = 1


def other_object(layer: Any) -> None:
    layer.function = lambda x: x


def other_contents(layer: Any) -> None:
    layer.shapes = {"weight": (3, 5)}


def other_keys(layer: Any) -> None:
    layer.options = {"target": {"name": "first"}}


def other_keyword_of_partial(layer: Any) -> None:
    layer.activation = partial(nn.functional.gelu, approximate="none")


def other_function_of_partial(layer: Any) -> None:
    layer.activation = partial(lambda x, approximate: x, approximate="tanh")


def other_dtype(layer: Any) -> None:
    layer.norm.double()


def no_gradient(layer: Any) -> None:
    layer.norm.weight.requires_grad_(False)


def no_bias(layer: Any) -> None:
    layer.norm.bias = None


def a_buffer(layer: Any) -> None:
    layer.register_buffer("steps", torch.zeros(1))


CHANGES = [
    other_class, other_number_of_torchs, evaluated, hooked, with_an_attribute_more, other_object, other_contents, other_keys,
    other_keyword_of_partial, other_function_of_partial, other_dtype, no_gradient, no_bias, a_buffer,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("first", [False, True])
def test_attributes_without_guards_may_not_differ(change: Callable[[Any], None], first: bool) -> None:
    layers: list[Any] = [Layer(), Layer()]
    for layer in layers:
        with_containers(layer)
        layer.function = torch.relu
    change(layers[first])
    with pytest.raises(ReuseRejected):
        check_built_alike(*layers)
