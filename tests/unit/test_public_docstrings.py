"""Docstrings of public names, from which the API pages are made."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import lightning_zero

DOCS = Path(__file__).parents[2] / "examples" / "docs" / "api"
NAMES = [name for name in lightning_zero.__all__ if not name.startswith("_")]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(lightning_zero, name))]
WITH_EXAMPLE = [
    *FUNCTIONS,
    *("CommMonitor", "Engine", "EngineConfig", "FabricZeroStrategy", "PassSchedule", "PassSpec", "Plan", "PlanReport"),
    *("Training", "Tuning", "ZeroStrategy"),
]
SECTION = re.compile(r"^(\w+):\n((?:[ ]{4}.*\n?|\n)+)", re.M)


def sections(docstring: str) -> dict[str, str]:
    """The sections of a docstring in Google style, by their title."""
    return {match[1]: match[2] for match in SECTION.finditer(inspect.cleandoc(docstring))}


def entries(section: str) -> list[str]:
    """The names that a section describes."""
    return re.findall(r"^ {4}(\*{0,2}\w+):", section, re.M)


def docstring_of(name: str) -> str:
    value: Any = getattr(lightning_zero, name)
    text = inspect.getdoc(value) or ""
    init = value.__dict__.get("__init__") if inspect.isclass(value) else None
    return f"{text}\n\n{inspect.cleandoc(init.__doc__ or '')}" if init is not None else text


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_docstring_of_its_own(name: str) -> None:
    value = getattr(lightning_zero, name)
    assert (value.__doc__ or "").strip(), name
    assert not inspect.isclass(value) or "__doc__" in value.__dict__, f"{name} inherits its docstring"


@pytest.mark.parametrize("name", NAMES)
def test_all_arguments_are_described(name: str) -> None:
    found = sections(docstring_of(name))
    described = entries(found.get("Args", "")) + entries(found.get("Attributes", ""))
    value = getattr(lightning_zero, name)
    if inspect.isclass(value) and issubclass(value, Exception):
        return
    known = set(described)
    if name == "EngineConfig":  # its docstring refers to that of the strategy for the options
        known |= set(entries(sections(docstring_of("ZeroStrategy"))["Args"]))
    # Lightning passes these to every strategy.
    known |= {
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
        "precision",
    }
    known |= {"fabric_precision"}
    missing = [argument for argument in inspect.signature(value).parameters if argument not in known]
    assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_described(name: str) -> None:
    annotation = inspect.signature(getattr(lightning_zero, name)).return_annotation
    assert ("Returns" in sections(docstring_of(name))) == (annotation != "None"), name


@pytest.mark.parametrize("name", NAMES)
def test_described_names_begin_with_a_capital_letter(name: str) -> None:
    found = sections(docstring_of(name))
    lines = [
        line
        for title in ("Args", "Attributes", "Returns", "Raises")
        for line in re.findall(r"^ {4}\w+: (.+)", found.get(title, ""), re.M)
    ]
    bad = [line for line in lines if re.match(r"[a-z]+\b(?!\()", line)]
    assert not bad, f"{name}: {bad}"


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_main_names_have_an_example_that_is_valid(name: str) -> None:
    text = sections(docstring_of(name)).get("Examples", "")
    assert text, f"{name} has no section Examples"
    if ">>>" in text:
        parsed = doctest.DocTestParser().get_doctest(inspect.cleandoc(text), {}, name, None, None)
        assert parsed.examples
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(parsed).failed == 0
    else:
        code = text.split("::\n", 1)[1]
        compile(inspect.cleandoc(code), name, "exec")


def test_each_public_name_is_on_one_api_page() -> None:
    shown = [
        match
        for page in DOCS.glob("*.md")
        for match in re.findall(r"^::: lightning_zero\.(\w+)", page.read_text(), re.M)
    ]
    assert sorted(shown) == sorted(NAMES)
    index = (DOCS / "index.md").read_text()
    assert not [name for name in NAMES if f"`{name}`" not in index]


def test_the_checks_find_faults() -> None:
    text = "Do it.\n\nArgs:\n    one: The first.\n    two: second.\n\nReturns:\n    It.\n"
    assert sections(text) == {"Args": "    one: The first.\n    two: second.\n\n", "Returns": "    It."}
    assert entries(sections(text)["Args"]) == ["one", "two"]
