"""A page shows what it is given, as text and never as markup."""

import re
from html.parser import HTMLParser

from lightning_zero.compile.plan import Gather, GraphPlan, Plan, Reduce
from lightning_zero.report.page import Section, Table, page

NASTY = "<script src='x'>&amp;\"</pre>"
VOID = {"meta", "img"}


class Reader(HTMLParser):
    """Collects the text, and checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_everything_that_is_given_is_shown_as_text() -> None:
    gather = Gather((NASTY + "w",), NASTY + "d", 1 << 20, 1, NASTY + "b", 2, NASTY + "u", NASTY + "k")
    plan = Plan((GraphPlan("forward", 3, (gather,), (Reduce((NASTY + "r",), "float32", 1 << 21, 2),)),))
    table = Table(NASTY + "caption", (NASTY + "head",), ((NASTY + "cell", 7, 0.5),))
    section = Section(NASTY + "section", (table,), ((NASTY + "picture", b"png"),), ((NASTY + "name", NASTY + "text"),))
    html = page(NASTY + "title", plan, [section])
    read = Reader(html)
    assert "script" not in read.seen
    for word in ("title", "section", "caption", "head", "cell", "name", "text", "w", "d", "b", "u", "k", "r"):
        assert NASTY + word in read.text, word
    assert html.count("<img ") == len(re.findall(r'<img alt="[^"<>]*" src="data:image/png;base64,cG5n">', html)) == 1


def test_numbers_are_rounded_and_whole_ones_are_left() -> None:
    html = page("t", Plan(), [Section("s", (Table("c", ("h",), ((7, 1234.56789),)),))])
    assert '<td class="number">7</td><td class="number">1,234.568</td>' in html


def test_an_empty_plan_says_so() -> None:
    assert "Nothing compiled yet." in Reader(page("t", Plan(), [])).text
