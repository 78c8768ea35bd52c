"""Test terminal output with Rich and without."""

import sys

import pytest

from lightning_zero.cli.terminal import format_value, show_section
from lightning_zero.config.text import format_table


@pytest.mark.parametrize(("terminal", "rich"), [(True, True), (True, False), (False, True)])
def test_a_section_shows_names_and_values(
    terminal: bool, rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    if rich:
        pytest.importorskip("rich")
        monkeypatch.setenv("COLUMNS", "100")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    show_section("caches", {"the_path": "[red]/x[/red]", "writable": False})
    shown = capsys.readouterr().out
    assert "caches" in shown
    assert "the path" in shown
    assert "[red]/x[/red]" in shown, "what stands in brackets is no markup"


def test_elsewhere_lines_are_not_wrapped_and_cells_keep_their_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    long = "x" * 90
    show_section("", {"interfaces": ["lo", "eth0"], "built": True, "long": long})
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  interfaces  lo",
        "              eth0",
        "  built       yes",
        f"  long        {long}",
    ]


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    assert format_table(("name", "ms"), [("a", "12.5"), ("longer", "1")]) == [
        "  name    ms",
        "  a       12.5",
        "  longer  1",
    ]
    assert format_table(("", ""), []) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "-"),
        (True, "yes"),
        (0, "0"),
        (3.0907486348041857e-07, "3.091e-07"),
        (23.54, "23.54"),
        (123456.7, "123457"),
        ([], "none"),
        (["a", "b"], "a\nb"),
        ({"open_files": 3, "ok": False}, "open files: 3, ok: no"),
    ],
)
def test_values_in_words(value: object, words: str) -> None:
    assert format_value(value) == words
