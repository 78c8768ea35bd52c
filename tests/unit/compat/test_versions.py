"""One table has the tested versions. Each other version is warned of, once for a job."""

import re
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from lightning_zero.compat.versions import RANK_VARIABLES, SUPPORTED, is_tested, warn_of_untested

REPO = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("library", ["torch", "lightning"])
def test_the_versions_checked_are_those_that_the_package_allows(library: str) -> None:
    needed = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
    [line] = [line for line in needed if re.match(rf"{library}\b", line)]
    matched = re.search(r">=(\d+\.\d+)", line)
    assert matched, line
    assert matched[1] == SUPPORTED[library][0]


def test_the_table_of_the_readme_names_the_versions_checked() -> None:
    [row] = [line for line in (REPO / "README.md").read_text().splitlines() if line.startswith("| Python, torch")]
    assert all(version in row for versions in SUPPORTED.values() for version in versions)


def test_the_torch_that_is_tested_is_one_of_those_checked() -> None:
    minor = ".".join(str(torch.__version__).split(".")[:2])
    assert minor in SUPPORTED["torch"], "run all tests with it, and say so in compat/versions.py"


def test_the_page_of_supported_versions_names_the_versions_checked() -> None:
    page = (REPO / "examples" / "docs" / "reference" / "supported.md").read_text()
    assert f"| torch | {', '.join(SUPPORTED['torch'])} |" in page
    assert f"| torch newer than {SUPPORTED['torch'][-1]} |" in page


@pytest.mark.parametrize(
    ("installed", "tested"),
    [
        ("2.11.0", True),
        ("2.13.1+cpu", True),
        ("2.15.0a0+git1234567", True),
        ("2.10.0", False),
        ("2.12.1", False),
        ("2.16.0.dev20261120+cu130", False),
        ("3.11.0", False),
        ("2.150.0", False),
        ("main", False),
    ],
)
def test_a_version_counts_as_tested_by_its_first_two_numbers(installed: str, tested: bool) -> None:
    assert is_tested(installed) is tested


@pytest.mark.parametrize("installed", ["2.12.1", "2.16.0.dev20261120+cu130"])
def test_another_torch_is_warned_of_on_the_first_rank_alone(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", installed)
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.warns(UserWarning, match=f"tested with torch 2.11, 2.13, .*this is torch {re.escape(installed)}"):
        warn_of_untested()
    for name in reversed(RANK_VARIABLES):
        monkeypatch.setenv(name, "1")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_untested()
