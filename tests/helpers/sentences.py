"""Measure the sentences of a page in Markdown: words for each, their median, and the long ones.

``python -m tests.helpers.sentences PAGE...`` prints each page's numbers, and its sentences over 25 words.

Fenced code, headings, comments, images and the addresses of links are left out. Code between backticks is one word.
A paragraph, a list item and a table cell each end their last sentence. A cell of one or two words is a label, and is
left out too: labels would lower the median.
"""

import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEDIAN_WORDS, LONG_WORDS, LONG_SHARE = 16, 30, 0.02  # the limits of tests/unit/test_docs_language.py
ADVISED_WORDS = 25  # the style guide's limit for one sentence
LABEL_WORDS = 2
FENCE = re.compile(r"^\s*(```|~~~)")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
SEPARATOR = re.compile(r"^\s*\|?[\s:|-]+\|?\s*$")
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|No|Fig)\.(?=\s)")
END = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+")


@dataclass(frozen=True)
class Sentence:
    line: int
    text: str

    @property
    def words(self) -> int:
        return sum(1 for word in self.text.split() if re.search(r"\w", word))


def without_markup(text: str) -> str:
    """Replace code by one word, and links by their text."""
    text = re.sub(r"(`+)(.+?)\1", "CODE", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<?https?://\S+", "ADDRESS", text)
    return re.sub(r"\*\*|__|<[^>]+>", "", text)


def blocks(page: str) -> Iterator[tuple[int, str, bool]]:
    """Yield each paragraph, list item and table cell: its first line, its text, and True for a cell."""
    page = re.sub(r"(?s)<!--.*?-->", lambda found: "\n" * found[0].count("\n"), page)
    page = re.sub(r"\A---\n(?s:.*?)\n---\n", lambda found: "\n" * found[0].count("\n"), page)
    collected: list[str] = []
    first, fenced = 0, False
    for number, line in enumerate([*page.split("\n"), ""], 1):
        marker = FENCE.match(line)
        row = line.lstrip().startswith("|") and not fenced
        if marker or fenced or row or ITEM.match(line) or not line.strip() or line.startswith("#"):
            if collected:
                yield first, " ".join(collected), False
            collected = []
        if marker:
            fenced = not fenced
        elif fenced or line.startswith("#") or not line.strip():
            continue
        elif row:
            if not SEPARATOR.match(line):
                cells = re.sub(r"`[^`]*`", lambda code: code[0].replace("|", " "), line.replace(r"\|", " "))
                for cell in cells.strip().strip("|").split("|"):
                    yield number, cell, True
        else:
            first = first if collected else number
            collected.append(ITEM.sub("", line).lstrip("> ").strip())


def sentences(page: str) -> list[Sentence]:
    found = []
    for line, text, cell in blocks(page):
        plain = ABBREVIATIONS.sub(r"\1", without_markup(text))
        parts = [Sentence(line, part.strip()) for part in END.split(plain)]
        if cell and len(parts) == 1 and parts[0].words <= LABEL_WORDS:
            continue
        found += [part for part in parts if part.words]
    return found


def problems(page: str) -> list[str]:
    """Return the limits that a page exceeds, with the sentences to shorten; empty if it passes."""
    found = sentences(page)
    if not found:
        return []
    median = statistics.median(one.words for one in found)
    long = [one for one in found if one.words > LONG_WORDS]
    said = [f"the median sentence has {median:g} words, more than {MEDIAN_WORDS}"] if median > MEDIAN_WORDS else []
    if len(long) > LONG_SHARE * len(found):
        said.append(f"{len(long)} of {len(found)} sentences have more than {LONG_WORDS} words:")
        said += [f"  line {one.line}, {one.words} words: {one.text}" for one in long]
    return said


def summary(path: Path) -> str:
    page = path.read_text()
    found = sentences(page)
    counts = [one.words for one in found]
    long = sum(1 for count in counts if count > LONG_WORDS)
    median = statistics.median(counts) if counts else 0
    result = "FAILS" if problems(page) else "passes"
    return f"{path}: {result}; {len(found)} sentences, median {median:g} words, {long} over {LONG_WORDS}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(summary(Path(name)))
        for one in sentences(Path(name).read_text()):
            if one.words > ADVISED_WORDS:
                print(f"  line {one.line}, {one.words} words: {one.text}")
