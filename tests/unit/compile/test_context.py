"""Limits of passes in their units."""

import pytest

from lightning_zero.compile.context import GROUPS_PER_GRAPH, SMALL_BYTES, PassContext
from lightning_zero.compile.passes import default_passes, saved_limits
from lightning_zero.compile.passes.saved_weights import SavedLimits
from lightning_zero.config import CompileConfig

MIB = 2**20


def test_options_in_mib_are_bytes_here() -> None:
    context = PassContext(CompileConfig(gather_group_mb=3, prefetch_mb=5), 2)
    assert (context.group_bytes, context.window_bytes) == (3 * MIB, 5 * MIB)
    assert PassContext(CompileConfig(), 2).window_bytes is None


def test_no_weight_is_small_where_each_is_gathered_by_itself() -> None:
    assert PassContext(CompileConfig(), 2).small_bytes == SMALL_BYTES
    assert PassContext(CompileConfig(prefetch=False), 2).small_bytes == 0


@pytest.mark.parametrize(
    ("options", "follows", "kept"),
    [
        ({}, False, SavedLimits(SMALL_BYTES, 0.0, 0, GROUPS_PER_GRAPH, 0.25)),
        ({}, True, SavedLimits(SMALL_BYTES, 0.0, 128 * MIB, GROUPS_PER_GRAPH, 0.25)),
        ({"unsharded_cache_mb": 7}, False, SavedLimits(SMALL_BYTES, 7.0 * MIB, 0, GROUPS_PER_GRAPH, 0.25)),
        (
            {"unsharded_cache_mb": 7, "unsharded_cache_until": "step"},
            False,
            SavedLimits(SMALL_BYTES, 0.0, 0, GROUPS_PER_GRAPH, 0.25),
        ),
        ({"prefetch": False}, True, SavedLimits(0, 0.0, 0, GROUPS_PER_GRAPH, 0.25)),
    ],
)
def test_what_is_kept_for_backward(options: dict[str, float], follows: bool, kept: SavedLimits) -> None:
    config = CompileConfig(**options)  # type: ignore[arg-type]
    assert saved_limits(PassContext(config, 2, saved_share=0.25, backward_follows=follows)) == kept


@pytest.mark.parametrize("borrow", [True, False])
def test_gradients_are_borrowed_only_where_the_executor_sends_them_from_where_they_lie(borrow: bool) -> None:
    names = [spec.name for spec in default_passes(PassContext(CompileConfig(), 2, zero_copy_gradients=borrow))]
    assert ("zero_copy_gradients" in names) is borrow
