"""Modules on the meta device get values by their own ``reset_parameters()``."""

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding import materialise
from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.materialise import Materialiser
from lightning_zero.sharding.module_patching import SHAPES
from lightning_zero.sharding.record import Records, Role, ShardedParameter

CPU = torch.device("cpu")


class Layer(nn.Module):
    """Fills its own parameters with 3 and its buffer with 4; ``seen``: what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3, device="meta"))
        self.frozen = nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
        self.there = nn.Parameter(torch.ones(2))
        self.register_parameter("none", None)
        self.register_buffer("buffer", torch.empty(2, device="meta"))
        self.register_buffer("own", torch.ones(2))
        self.register_buffer("nothing", None)
        self.child = nn.Linear(2, 2, device="meta")
        self.seen: dict[str, Tensor] = {}

    def reset_parameters(self) -> None:
        self.seen = {name: param.clone() for name, param in self.named_parameters(recurse=False)}
        for value in (self.weight, self.frozen):
            value.fill_(3)  # type: ignore[operator]
        self.buffer.fill_(4)  # type: ignore[operator]


def test_a_module_has_values_of_its_own_on_the_device() -> None:
    layer = Layer()
    child, there, own = layer.child.weight, layer.there, layer.own
    found = dict(Materialiser(Records(), CPU).values(layer, "net.0"))
    assert list(found) == ["weight", "frozen", "there"]
    assert all(found[key] is getattr(layer, key) for key in found)
    assert layer.weight.equal(torch.full((2, 3), 3.0))
    assert layer.buffer.equal(torch.full((2,), 4.0))
    assert layer.weight.requires_grad
    assert not layer.frozen.requires_grad
    assert layer.weight.is_leaf, "filled without autograd"
    assert layer.there is there
    assert layer.own is own
    assert layer.child.weight is child, "a child's turn comes when its own is"


def test_what_users_have_noted_on_a_parameter_stays() -> None:
    layer = Layer()
    layer.weight.no_decay = True  # type: ignore[attr-defined]
    Materialiser(Records(), CPU).values(layer, "")
    assert layer.weight.no_decay  # type: ignore[attr-defined]


def test_what_stands_for_a_parameter_is_known_until_all_ties_are_made() -> None:
    layer, materialiser = Layer(), Materialiser(Records(), CPU)
    before, there = layer.weight, layer.there
    other = nn.Parameter(torch.ones(1))
    materialiser.values(layer, "")
    assert materialiser.latest(before) is layer.weight
    assert materialiser.latest(there) is there
    assert materialiser.latest(other) is other
    materialiser.forget()
    assert materialiser.latest(before) is before


def test_a_parameter_that_reset_parameters_replaces_stands_for_the_one_before() -> None:
    class Replacing(Layer):
        def reset_parameters(self) -> None:
            self.weight = nn.Parameter(torch.ones(2, 3))

    layer, materialiser = Replacing(), Materialiser(Records(), CPU)
    before = layer.weight
    found = dict(materialiser.values(layer, ""))
    assert materialiser.latest(before) is layer.weight is found["weight"]
    assert layer.weight.equal(torch.ones(2, 3))


def test_what_is_sharded_already_is_whole_for_a_while_and_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, records = Layer(), Records()
    layout = ShardLayout.of(torch.Size((2, 3)), torch.float32, 2)
    tied = nn.Parameter(torch.zeros(layout.visible_shape), requires_grad=False)
    spec: Any = MagicMock()
    record = ShardedParameter(0, "p", tied, layout, {Role.MASTER_SHARD: tied.data.view(-1)}, spec)
    records.add(record)
    layer.weight = tied
    layer.__dict__[SHAPES] = {"weight": (2, 3)}
    during = []
    whole = torch.full((2, 3), 7.0)

    def gather(asked: ShardedParameter) -> Tensor:
        assert asked is record
        return whole

    monkeypatch.setattr(materialise, "gather_full", gather)
    reset = layer.reset_parameters
    layer.reset_parameters = lambda: (during.append(layer.__dict__[SHAPES]["weight"]), reset())  # type: ignore[assignment]
    materialiser = Materialiser(records, CPU)
    found = dict(materialiser.values(layer, ""))
    assert layer.seen["weight"].equal(torch.full((2, 3), 7.0))
    assert not layer.seen["weight"].requires_grad
    assert during == [None], "modules show what stands there"
    assert layer.weight is found["weight"] is tied
    assert layer.__dict__[SHAPES] == {"weight": (2, 3)}
    assert not tied.any()
    assert materialiser.latest(tied) is tied


def test_the_older_name_of_reset_parameters_is_called() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))

        def _reset_parameters(self) -> None:
            self.weight.fill_(5)  # type: ignore[operator]

    layer = Attention()
    Materialiser(Records(), CPU).values(layer, "")
    assert layer.weight.equal(torch.full((2,), 5.0))


@pytest.mark.parametrize(("name", "shown"), [("net.0", "net.0"), ("", "root")])
def test_without_it_the_module_is_refused_before_anything_is_allocated(name: str, shown: str) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))

    layer = Bare()
    with pytest.raises(UnsupportedError, match=rf"Module '{shown}' \(Bare\) has .*no reset_parameters\(\).* Add that"):
        Materialiser(Records(), CPU).values(layer, name)
    assert layer.weight.is_meta
