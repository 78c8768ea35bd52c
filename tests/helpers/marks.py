"""How often a test's variants run."""

from collections.abc import Collection, Hashable, Sequence
from fnmatch import fnmatchcase

import pytest

__all__ = ["how_seldom", "matching", "mark_variants"]


def how_seldom(
    variant: Hashable, quick: Collection[Hashable], exhaustive: Collection[Hashable]
) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of one variant: none of those that always run, ``slow`` of those that are in neither collection."""
    if variant in quick:
        return ()
    return (pytest.mark.exhaustive if variant in exhaustive else pytest.mark.slow,)


def matching(patterns: Sequence[str], ids: Sequence[str]) -> set[str]:
    """Return the ids that match a pattern, in which ``*`` is the only wildcard.

    Raises:
        ValueError: if a pattern matches no id, as after a variant was renamed.
    """
    found: set[str] = set()
    for pattern in patterns:
        matches = {one for one in ids if fnmatchcase(one, pattern.replace("[", "[[]").replace("?", "[?]"))}
        if not matches:
            raise ValueError(f"exhaustive_variants: no variant matches {pattern!r}. The ids are: {', '.join(ids)}")
        found |= matches
    return found


def mark_variants(variants: Sequence[pytest.Function]) -> None:
    """Mark the variants of one test exhaustive that its ``exhaustive_variants`` names."""
    mark = variants[0].get_closest_marker("exhaustive_variants") if variants else None
    if mark is None:
        return
    ids = [variant.callspec.id if hasattr(variant, "callspec") else "" for variant in variants]
    found = matching(mark.args, ids)
    for variant, one in zip(variants, ids, strict=True):
        if one in found:
            variant.add_marker(pytest.mark.exhaustive)
