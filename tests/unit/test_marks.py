"""Variants of tests that run with ``--exhaustive`` alone."""

import pytest

from tests.helpers.marks import matching

IDS = ["W=2-eager", "W=2-aot_eager", "W=3-eager", "[odd]"]


def test_patterns_match_whole_ids_and_brackets_are_plain() -> None:
    assert matching(["W=2-eager", "W=3*"], IDS) == {"W=2-eager", "W=3-eager"}
    assert matching(["[odd]"], IDS) == {"[odd]"}
    assert matching([], IDS) == set()


def test_a_pattern_without_a_variant_is_an_error() -> None:
    with pytest.raises(ValueError, match="no variant matches 'W=4'"):
        matching(["W=3-eager", "W=4"], IDS)


@pytest.mark.exhaustive_variants("left out")
@pytest.mark.parametrize("name", ["runs", "left out"])
def test_named_variants_are_exhaustive(request: pytest.FixtureRequest, name: str) -> None:
    assert (request.node.get_closest_marker("exhaustive") is not None) == (name == "left out")
