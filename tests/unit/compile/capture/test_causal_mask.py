"""Test which attention masks are recognized as causal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from lightning_zero.compile.capture import causal_mask
from lightning_zero.compile.capture.causal_mask import drop_causal_masks

LENGTH = 6
Make = Callable[[Tensor], Any]


def ordered(length: int) -> Tensor:
    places = torch.arange(length)
    return places[None, :] <= places[:, None]


def of_packed(x: Tensor) -> Tensor:
    """Packed sequences, as transformers masks them; here a single one."""
    places = torch.arange(LENGTH).expand(2, -1)
    packed = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, row, column = torch.arange(2)[:, None, None, None], places[:1, None, :, None], places[:1, None, None, :]
    mask = row.new_ones((), dtype=torch.bool) & (column <= row)
    return (mask & (packed[batch, row] == packed[batch, column])).expand(2, -1, LENGTH, LENGTH)


def with_a_hole(x: Tensor) -> Tensor:
    mask = ordered(LENGTH)
    mask[LENGTH - 1, 1] = False
    return mask


CAUSAL: dict[str, Make] = {
    "compared places": lambda x: ordered(LENGTH),
    "for each of a batch": lambda x: ordered(LENGTH).expand(2, 1, -1, -1),
    "a triangle": lambda x: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
    "added": lambda x: torch.triu(torch.full((LENGTH, LENGTH), -torch.inf), diagonal=1),
    "packed": of_packed,
}
OTHER: dict[str, Make] = {
    "a window": lambda x: ordered(LENGTH) & ~ordered(LENGTH).tril(-3),
    "all": lambda x: torch.ones(LENGTH, LENGTH, dtype=torch.bool),
    "the other triangle": lambda x: ordered(LENGTH).t(),
    "edited in place": with_a_hole,
    "of an input": lambda x: ordered(LENGTH) & (x[:1, 0, :, 0] < 100),
    "drawn": lambda x: ordered(LENGTH) | (torch.rand(LENGTH, LENGTH) < 0.0),
    "added, and more": lambda x: (
        torch.triu(torch.full((LENGTH, LENGTH), -torch.inf), diagonal=1) + 0.5 * ordered(LENGTH)
    ),
    "one of a batch": lambda x: torch.stack([ordered(LENGTH), ordered(LENGTH).t() | ordered(LENGTH)])[:, None],
}


def compiled(
    make: Make, dropped: list[int], dynamic: bool = False, checkpointed: bool = False
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return the function, and the same function compiled by a backend that records dropped masks."""

    def attend(x: Tensor, mask: Any) -> Tensor:
        return F.scaled_dot_product_attention(x, x.sin(), x.cos(), mask, scale=0.5)

    def function(x: Tensor) -> Tensor:
        mask = make(x)
        return checkpoint(attend, x, mask, use_reentrant=False) if checkpointed else attend(x, mask)

    def backend(module: GraphModule, inputs: Any) -> Any:
        dropped.append(drop_causal_masks(module))
        return module

    torch._dynamo.reset()
    return function, torch.compile(function, backend=backend, dynamic=dynamic)


def check(make: Make, expected: int, **how: Any) -> None:
    dropped: list[int] = []
    plain, fast = compiled(make, dropped, **how)
    x = torch.randn(2, 3, LENGTH, 4, generator=torch.Generator().manual_seed(0)).requires_grad_(
        how.get("checkpointed", False)
    )
    before = torch.get_rng_state()
    found = fast(x)
    assert dropped == [expected]
    if "rand" not in make.__code__.co_names:
        assert torch.equal(torch.get_rng_state(), before), "somebody drew a number"
    torch.testing.assert_close(found, plain(x))


@pytest.mark.parametrize("mask", CAUSAL)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_causal_masks_are_dropped(mask: str, checkpointed: bool) -> None:
    check(CAUSAL[mask], 1, checkpointed=checkpointed)


@pytest.mark.parametrize("mask", OTHER)
def test_others_are_kept(mask: str) -> None:
    check(OTHER[mask], 0)


def test_masks_of_unknown_or_too_great_a_length_are_kept() -> None:
    check(lambda x: ordered(x.shape[2]), 0, dynamic=True)
    check(lambda x: ordered(x.shape[2]), 1, dynamic=False)
    with patch.object(causal_mask, "MAX_MASK_ELEMENTS", LENGTH * LENGTH - 1):
        check(CAUSAL["compared places"], 0)


def test_calls_without_a_mask_or_with_more_keys_than_queries_stay_as_they_are() -> None:
    check(lambda x: None, 0)
    calls: list[int] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        calls.append(drop_causal_masks(module))
        return module

    def longer(x: Tensor) -> Tensor:
        keys = torch.cat([x, x], 2)
        return F.scaled_dot_product_attention(x, keys, keys, ordered(2 * LENGTH)[LENGTH:])

    x = torch.randn(1, 1, LENGTH, 4)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(longer, backend=backend)(x), longer(x))
    assert calls == [0]
