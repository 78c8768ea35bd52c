"""Check that recipes are short, in one form, and in sentences that can be read once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.readme import DOCS
from tests.helpers.sentences import ADVISED_WORDS, sentences

RECIPES = sorted((DOCS / "recipes").glob("*.md"))
IN_ANOTHER_FORM = {"coming_from.md"}  # a table
LONGEST_PAGE = 130  # lines, code included


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.name)
def test_a_recipe_is_read_once(page: Path) -> None:
    too_long = [f"line {one.line}: {one.text}" for one in sentences(page.read_text()) if one.words > ADVISED_WORDS]
    assert not too_long, "\n".join(too_long)


@pytest.mark.parametrize(
    "page", [page for page in RECIPES if page.name not in IN_ANOTHER_FORM], ids=lambda page: page.name
)
def test_a_recipe_has_a_question_a_block_a_result_and_pitfalls(page: Path) -> None:
    text = page.read_text()
    lines = text.splitlines()
    assert len(lines) <= LONGEST_PAGE
    assert lines[0].startswith("# ")
    assert re.search(r"^\*\*.+\?", lines[2]) or '"**' in lines[2], "the question comes first"
    assert "```python" in text
    assert re.search(r"(?m)^## What you see", text)
    assert "\n## What can go wrong\n" in text
