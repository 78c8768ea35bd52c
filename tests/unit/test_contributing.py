"""Check that CONTRIBUTING.md names files that exist, and that its path of a gradient is right."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "CONTRIBUTING.md").read_text()
PLACES = (REPO, REPO / "lightning_zero")
FILE = re.compile(r"(?:[\w.-]+/)+(?:[\w-]+\.(?:py|h|cpp|md))?")
STEPS = re.split(r"\n(?=\d+\. )", PAGE.partition("## The path of one gradient")[2].partition("\n## ")[0])[1:]


def found(path: str) -> Path | None:
    return next((place / path for place in PLACES if (place / path).exists()), None)


def code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def missing(step: str) -> list[str]:
    """Return the files of a step that do not exist, and the names that none of its files has."""
    files = {name: found(name) for name in code(step) if FILE.fullmatch(name)}
    texts = "\n".join(file.read_text() for file in files.values() if file is not None and file.is_file())
    names = [name.removesuffix("()").split(".")[-1] for name in code(step) if name not in files]
    return [name for name, file in files.items() if file is None] + [
        name for name in names if not re.search(rf"\b{re.escape(name)}\b", texts)
    ]


def test_the_path_of_a_gradient_has_few_steps_and_each_names_a_file() -> None:
    assert 8 <= len(STEPS) <= 12
    assert all(any(FILE.fullmatch(name) for name in code(step)) for step in STEPS)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.partition(".")[0])
def test_a_step_names_what_its_files_contain(step: str) -> None:
    assert not missing(step)


def test_a_file_or_a_name_that_is_gone_is_found() -> None:
    assert missing("1. `csrc/ops.cpp`: the op `reduce_gone` of `csrc/gone.h`") == ["csrc/gone.h", "reduce_gone"]


def test_all_files_that_the_page_names_exist() -> None:
    named = [name for name in code(PAGE) if FILE.fullmatch(name) and "X." not in name]
    assert len(named) > 40
    assert [name for name in named if found(name) is None and found(f"csrc/{name}") is None] == []
