"""Check that recipes are short, in one form, and in sentences that can be read once."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

from tests.helpers.readme import DOCS

RECIPES = sorted((DOCS / "recipes").glob("*.md"))
IN_ANOTHER_FORM = {"coming_from.md"}  # a table
LONGEST_PAGE = 110  # lines, code included
LONGEST_SENTENCE = 25  # words
LONGEST_MEDIAN = 16  # words


def sentences(text: str) -> list[str]:
    """Return the sentences of a page and of its tables' cells, without code, addresses and headings."""
    text = re.sub(r"(?ms)^( *)```.*?^\1```$", "\n\n", text)
    text = re.sub(r"<!--.*?-->", "", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = re.split(r"\n\n+|\n(?=[*|#-])", text)
    cells = [cell for block in blocks if not block.startswith("#") for cell in re.split(r"\||^\* ", block)]
    found = [part for cell in cells for part in re.split(r"(?<=[.!?])\s+", cell.replace("\n", " "))]
    return [sentence for sentence in found if len(re.findall(r"\w+", sentence)) > 1]


def words(sentence: str) -> int:
    return len(re.findall(r"[\w'/.-]*\w[\w'/.-]*", sentence))


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.name)
def test_a_recipe_is_read_once(page: Path) -> None:
    found = sentences(page.read_text())
    too_long = [sentence for sentence in found if words(sentence) > LONGEST_SENTENCE]
    assert not too_long, "\n".join(too_long)
    assert median(map(words, found)) <= LONGEST_MEDIAN


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


def test_the_check_counts_words() -> None:
    text = "# Heading of a page\n\nRun `a b c` twice. [A link](there.md) has words.\n\n```python\nx = 1\n```\n| a cell | two words |\n"
    assert sentences(text) == ["Run CODE twice.", "A link has words.", " a cell ", " two words "]
    assert words("A sentence of five words.") == 5
