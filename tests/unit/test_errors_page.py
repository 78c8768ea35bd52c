"""Check that each message on examples/docs/reference/errors.md begins as a message in the source."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "examples" / "docs" / "reference" / "errors.md"
HEADING = re.compile(r"(?m)^### `(.+)`$")
FIELD = "\0"  # stands for a value in a message
LEAST_MESSAGES = 60
LEAST_LETTERS = 6  # of a message, besides its fields


def entries() -> dict[str, str]:
    """Return the text below each message's heading."""
    parts = HEADING.split(PAGE.read_text())
    return dict(zip(parts[1::2], (re.split(r"(?m)^##", text)[0].strip() for text in parts[2::2]), strict=True))


def python_text(node: ast.expr) -> str:
    """Return the text of a string, an f-string or a sum of them; fields are ``FIELD``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdgr]", FIELD, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(python_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return python_text(node.left) + python_text(node.right)
    return FIELD


def python_messages(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            yield python_text(node)


def cpp_messages(source: str) -> Iterator[str]:
    """Yield the literals of each statement from each one on, joined.

    Expressions between them are ``FIELD``.
    """
    literal = r'"((?:[^"\\\n]|\\.)*)"'
    for statement in re.sub(r"(?m)//.*$", "", source).split(";"):
        text, after = "", len(statement)
        for match in reversed(list(re.finditer(literal, statement))):
            gap = statement[match.end() : after] if text else ""
            text, after = match[1] + (FIELD if gap.strip() else "") + text, match.start()
            yield text


@cache
def messages() -> str:
    """Return all texts of the product, each on a line of its own."""
    texts: list[str] = []
    for path in (REPO / "lightning_zero").rglob("*.py"):
        texts += python_messages(path.read_text())
    for path in (REPO / "csrc").rglob("*.cpp"):
        texts += cpp_messages(path.read_text())
    return "\n".join(re.sub(f"{FIELD}+", FIELD, text.replace("\n", " ")) for text in texts)


def begins_a_message(quoted: str) -> bool:
    """Return True if a text of the product begins with ``quoted``, whose ``...`` stand for at least one field."""
    parts = [re.escape(part) for part in quoted.split("...")]
    return re.search("(?m)^" + f"[^\n]{{0,80}}?{FIELD}[^\n]{{0,80}}?".join(parts), messages()) is not None


@pytest.mark.parametrize("quoted", entries())
def test_the_product_has_the_message(quoted: str) -> None:
    assert len(re.findall("[A-Za-z]", quoted)) >= LEAST_LETTERS
    assert begins_a_message(quoted), f"no message in lightning_zero/ or csrc/ begins with {quoted!r}"


@pytest.mark.parametrize("quoted", entries())
def test_the_message_has_a_cause_and_a_fix(quoted: str) -> None:
    found = re.fullmatch(r"(?s)\* Cause: (.+)\n\* Fix: (.+)", entries()[quoted])
    assert found is not None
    for text in found.groups():
        plain = re.sub(r"\[[^\]]*\]\([^)]*\)|`[^`]*`", "X", text)
        assert len(re.findall(r"[.!?](?:\s|$)", plain)) in (1, 2)


def test_the_page_has_the_likely_messages() -> None:
    assert len(entries()) >= LEAST_MESSAGES


def test_a_changed_message_is_found() -> None:
    assert not begins_a_message("... has no options ...")
    assert not begins_a_message("Ranks hold different modules")
    assert not begins_a_message("hold different models")  # not its beginning
    assert list(python_messages("f(f'no {x} here', 'a' + b)"))[:2] == [f"no {FIELD} here", f"a{FIELD}"]
    texts = list(cpp_messages('#include "a.h"\ncheck(x, "the gradient of ", name, " is "\n  "late.");'))
    assert texts[:3] == ["late.", " is late.", f"the gradient of {FIELD} is late."]
