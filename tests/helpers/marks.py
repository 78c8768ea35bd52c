"""How often a test's variants run."""

from collections.abc import Collection, Hashable

import pytest

__all__ = ["how_seldom"]


def how_seldom(
    variant: Hashable, quick: Collection[Hashable], exhaustive: Collection[Hashable]
) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of one variant: none of those that always run, ``slow`` of those that are in neither collection."""
    if variant in quick:
        return ()
    return (pytest.mark.exhaustive if variant in exhaustive else pytest.mark.slow,)
