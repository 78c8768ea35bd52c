"""Test the checks before sharding, and modules on the meta device."""

from contextlib import suppress
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.errors import RankMismatchError, UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.sharding import sharder as materialise
from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.module_patching import SHAPES
from lightning_zero.sharding.param_record import Records, Role, ShardedParameter
from lightning_zero.sharding.sharder import Materializer, check_module, check_parameter, check_same_model


class EmulatedMesh:
    """Emulate this rank and others, which hold these models; messages are sent in order."""

    def __init__(self, *others: nn.Module) -> None:
        self._others = others
        self.messages: list[Any] = []

    def all_gather_values(self, mine: Any) -> list[Any]:
        self.messages.append(mine)
        return [mine, *(_messages(other)[len(self.messages) - 1] for other in self._others)]

    first_difference = Mesh.first_difference


class _Differing(EmulatedMesh):
    """Make every rank differ, so that all messages are sent."""

    def all_gather_values(self, mine: Any) -> list[Any]:
        self.messages.append(mine)
        return [mine, mine + mine]


def _messages(model: nn.Module) -> list[Any]:
    mesh = _Differing()
    with suppress(RankMismatchError):
        check_same_model(model, mesh)  # type: ignore[arg-type]
    return mesh.messages


def linear(inputs: int = 2, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 3, **options))


def test_ordinary_parameters_are_taken() -> None:
    for param in (
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.zeros(2).double(),
        torch.ones(2) * 1j,
    ):
        check_parameter("p", nn.Parameter(param))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, dtype=torch.complex32), r"'net\.p' has dtype torch\.complex32, .*Store it as torch\.complex64"),
        (torch.zeros(2, 2).to_sparse(), r"'net\.p' has .*layout torch\.sparse_coo; only dense"),
    ],
)
def test_what_cannot_be_sharded_is_refused(value: torch.Tensor, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        check_parameter("net.p", nn.Parameter(value))


def test_what_another_has_sharded_is_refused() -> None:
    param = nn.Parameter(torch.zeros(2))
    param.device_mesh = object()  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"'p' is a DTensor: .*Remove that call from configure_model\(\)"):
        check_parameter("p", param)


def test_a_lazy_parameter_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'weight' has no shape yet .*Run one batch"):
        check_parameter("weight", nn.LazyLinear(3).weight)


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_a_forward_that_scales_its_weight_is_refused(make: Any) -> None:
    check_module("net.words", make(3, 4))
    with pytest.raises(UnsupportedError, match=r"'net\.words' \(Embedding.*max_norm=1\.5: .*renorm_\(2, 0, 1\.5\)"):
        check_module("net.words", make(3, 4, max_norm=1.5))


def test_equal_models_are_compared_by_one_small_message() -> None:
    mesh: Any = EmulatedMesh(linear(), linear())
    check_same_model(linear(), mesh)
    assert [len(message) for message in mesh.messages] == [64]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (linear(4), r"rank 0 and rank 2: '0\.weight \(3, 2\) torch.float32 True' against '0\.weight \(3, 4\)"),
        (linear(dtype=torch.float64), r"'0\.weight \(3, 2\) torch.float32 True' against '0.weight .*float64"),
        (linear().requires_grad_(False), r"float32 True' against '0\.weight \(3, 2\) torch\.float32 False'"),
        (linear(bias=False), r"'0\.bias \(3,\) torch\.float32 True' against '\(nothing\)'"),
        (nn.Sequential(*linear(), nn.Linear(3, 1)), r"'\(nothing\)' against '1\.weight \(1, 3\)"),
        (nn.Sequential(nn.LazyLinear(3)), r"against '0\.weight \(not known yet\)"),
    ],
)
def test_the_first_difference_is_named_with_the_rank_that_has_it(other: nn.Module, words: str) -> None:
    with pytest.raises(RankMismatchError, match=words):
        check_same_model(linear(), EmulatedMesh(linear(), other))  # type: ignore[arg-type]


def test_ties_are_part_of_a_model() -> None:
    def two(tie: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        if tie:
            model[1].weight = model[0].weight
        return model

    check_same_model(two(True), EmulatedMesh(two(True)))  # type: ignore[arg-type]
    with pytest.raises(RankMismatchError, match=r"'\(nothing\)' against '1\.weight"):
        check_same_model(two(True)[:1], EmulatedMesh(two(True)))  # type: ignore[index, arg-type]


CPU = torch.device("cpu")


class Layer(nn.Module):
    """Fill its own parameters with 3 and its buffer with 4; ``seen`` are the values before that."""

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
    found = dict(Materializer(Records(), CPU).values(layer, "net.0"))
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
    Materializer(Records(), CPU).values(layer, "")
    assert layer.weight.no_decay  # type: ignore[attr-defined]


def test_what_stands_for_a_parameter_is_known_until_all_ties_are_made() -> None:
    layer, materialiser = Layer(), Materializer(Records(), CPU)
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

    layer, materialiser = Replacing(), Materializer(Records(), CPU)
    before = layer.weight
    found = dict(materialiser.values(layer, ""))
    assert materialiser.latest(before) is layer.weight is found["weight"]
    assert layer.weight.equal(torch.ones(2, 3))


def test_what_is_sharded_already_is_whole_for_a_while_and_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, records = Layer(), Records()
    layout = ShardLayout.from_shape(torch.Size((2, 3)), torch.float32, 2)
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
    materialiser = Materializer(records, CPU)
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
    Materializer(Records(), CPU).values(layer, "")
    assert layer.weight.equal(torch.full((2,), 5.0))


@pytest.mark.parametrize(("name", "shown"), [("net.0", "net.0"), ("", "root")])
def test_without_it_the_module_is_refused_before_anything_is_allocated(name: str, shown: str) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))

    layer = Bare()
    with pytest.raises(UnsupportedError, match=rf"Module '{shown}' \(Bare\) has .*no reset_parameters\(\).* Add that"):
        Materializer(Records(), CPU).values(layer, name)
    assert layer.weight.is_meta
