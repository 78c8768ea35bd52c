"""Calls that free memory when a plan moves optimizer state or gradients."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero.memory_planner.inputs import MemoryConfig
from lightning_zero.step.memory_controller import MemoryController
from tests.helpers.options import config


def calls(before: Sequence[str], after: Sequence[str], over: bool = False, lies: bool = False) -> list[str]:
    """Return the calls in their order. ``over``, ``lies``: gradients aliased copies before, and do now."""
    found: list[str] = []
    planned: Any = MemoryController.__new__(MemoryController)
    first_step = SimpleNamespace(expect_state_from_host=lambda: found.append("comes back"))
    planned._planner = SimpleNamespace(first_step=first_step, empty_cache=lambda: found.append("empty cache"))
    planned._optimizers = SimpleNamespace(
        config=config(offload=before), on_host="optimizer" in before, configure=lambda _: found.append("configure")
    )
    planned.gradients = SimpleNamespace(
        aliased=over, automatic=False, set_aliasing=lambda to: found.append(f"over copies: {to}")
    )
    planned._sharder = SimpleNamespace(executor=SimpleNamespace())
    chosen = config(offload=after, grad_aliasing=lies or None, compute_dtype=torch.bfloat16)
    planned._apply(chosen, MemoryConfig(offload=tuple(after), grad_aliasing=lies))
    return found


@pytest.mark.parametrize(
    ("before", "after", "asked"),
    [
        # A pass would allocate in addition to the cached blocks of the state.
        ((), ("optimizer",), ["configure", "empty cache"]),
        # State moves back with the next optimizer step, in addition to the cached blocks of a pass.
        (("optimizer",), (), ["comes back", "configure", "empty cache"]),
        (("optimizer",), ("optimizer",), ["configure"]),
        ((), (), ["configure"]),
    ],
)
def test_room_is_made_where_state_moves(before: tuple[str, ...], after: tuple[str, ...], asked: list[str]) -> None:
    assert calls(before, after) == asked


def test_room_is_made_where_gradients_move_once_no_optimizer_looks_at_them() -> None:
    assert calls((), (), False, True) == ["configure", "over copies: True", "empty cache"]
    assert calls((), (), True, False) == ["configure", "over copies: False", "empty cache"]
    assert calls((), (), True, True) == ["configure"]
