"""Check the length of sentences in README and examples/docs/.

`python -m tests.helpers.sentences PAGE` shows them.
"""

from pathlib import Path

import pytest

from tests.helpers.sentences import LONG_WORDS, MEDIAN_WORDS, problems, sentences

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "examples" / "docs"
PAGES = [REPO / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPO)))
def test_sentences_are_short(page: Path) -> None:
    found = problems(page.read_text())
    assert not found, "\n".join(found)


def counted(page: str) -> list[int]:
    return [sentence.words for sentence in sentences(page)]


def test_prose_is_split_at_the_ends_of_sentences() -> None:
    assert counted("One fact here. Two facts are\nhere, e.g. in torch 2.13! Three?\n\nA paragraph\n") == [3, 8, 1, 2]
    assert counted('He said "it works." Then (as planned.) it ended.') == [4, 3, 2]


def test_list_items_and_cells_end_a_sentence() -> None:
    assert counted("* one item\n* two\n  lines\n1. three\n") == [2, 2, 1]
    table = "| option | meaning |\n|:---|---|\n| `a|b` | shards the weights. It gathers them again |\n"
    assert counted(table) == [3, 4]


def test_code_headings_comments_and_addresses_are_left_out() -> None:
    page = "# A heading\n<!-- a\nlong comment -->\n```bash\nnot counted. At all\n```\n![alt](x.png)\n"
    assert counted(page) == []
    assert counted("See [the options](reference/options.md#a b c) and `a b c d`.") == [5]


def test_a_sentence_has_the_line_of_its_paragraph() -> None:
    assert [sentence.line for sentence in sentences("# Title\n\nOne.\n\n```\ncode\n```\n* two\n")] == [3, 8]


def test_long_pages_fail_and_short_ones_pass() -> None:
    short, long = "word " * 10 + ".\n\n", "word " * (LONG_WORDS + 1) + ".\n\n"
    assert not problems("")
    assert not problems(short * 49 + long)
    assert "1 of 49 sentences" in problems(short * 48 + long)[0]
    assert "the median sentence" in problems(("word " * (MEDIAN_WORDS + 1) + ".\n\n") * 3)[0]
