"""Parameters that cannot be sharded, and models that differ, are refused before anything is cut."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.errors import RankMismatchError, UnsupportedError
from lightning_zero.sharding.checks import check_module, check_parameter, check_same_model


class Mesh:
    """Of this rank and of others, which hold these models; messages are told in their order."""

    def __init__(self, *others: nn.Module) -> None:
        self._others = others
        self.messages: list[Any] = []

    def gathered(self, mine: Any) -> list[Any]:
        self.messages.append(mine)
        return [mine, *(_messages(other)[len(self.messages) - 1] for other in self._others)]


class _Differing(Mesh):
    """Beside this rank there is none that is like it, so all messages are sent."""

    def gathered(self, mine: Any) -> list[Any]:
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
    mesh: Any = Mesh(linear(), linear())
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
        check_same_model(linear(), Mesh(linear(), other))  # type: ignore[arg-type]


def test_ties_are_part_of_a_model() -> None:
    def two(tie: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        if tie:
            model[1].weight = model[0].weight
        return model

    check_same_model(two(True), Mesh(two(True)))  # type: ignore[arg-type]
    with pytest.raises(RankMismatchError, match=r"'\(nothing\)' against '1\.weight"):
        check_same_model(two(True)[:1], Mesh(two(True)))  # type: ignore[index, arg-type]
