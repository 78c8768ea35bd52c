"""Check README, the quickstart, the chart and the Dockerfile without running their commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_zero.cli.main import COMMANDS, build_parser
from lightning_zero.native.cache import default_cache
from tests.helpers.sentences import blocks

REPO = Path(__file__).parents[2]
EXAMPLES = REPO / "examples"
MEASURED = EXAMPLES / "benchmarks"
README = REPO / "README.md"


def numbers_of(page: Path) -> set[str]:
    return set(re.findall(r"(?<![\d.])\d+(?:\.\d+)?(?![\d.]*\d)", page.read_text()))


def test_each_bar_of_the_chart_was_measured_in_the_table_that_it_names() -> None:
    chart = json.loads((MEASURED / "chart.json").read_text(), parse_float=str, parse_int=str)
    measured = numbers_of(MEASURED / chart["source"])
    bars = [bar for group in chart["groups"] for bar in group["bars"]]
    assert len(bars) == 6
    assert [bar for bar in bars if not {bar["ms"], bar["gib"]} <= measured] == []
    assert f"]({(MEASURED / chart['source']).relative_to(REPO)})" in README.read_text()


MEASURE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?) (?:ms|GiB|s)\b")
TABLE = re.compile(r"\]\((examples/benchmarks/[\w.-]+\.md)\)")


def test_each_measured_number_of_the_readme_is_in_a_table_that_its_paragraph_links() -> None:
    found = {text: MEASURE.findall(text) for _, text, _ in blocks(README.read_text())}
    assert sum(len(numbers) for numbers in found.values()) >= 6
    for text, numbers in found.items():
        measured = {number for table in TABLE.findall(text) for number in numbers_of(REPO / table)}
        assert [number for number in numbers if number not in measured] == [], text


def test_the_readme_has_the_two_commands_in_one_block() -> None:
    [block] = [text for text in re.findall(r"(?s)```bash\n(.*?)```", README.read_text()) if "quickstart" in text]
    commands = [line.split("#")[0].split() for line in block.splitlines()]
    assert commands == [["bash", "examples/quickstart.sh"], ["bash", ".ci/run"]]
    for _, script in commands:
        assert os.access(REPO / script, os.X_OK)
        subprocess.run(["bash", "-n", script], cwd=REPO, check=True, timeout=30)


def test_the_index_links_every_page_or_the_index_of_its_folder() -> None:
    docs = EXAMPLES / "docs"
    linked = {(docs / link).resolve() for link in re.findall(r"\]\(([^)#]+)", (docs / "index.md").read_text())}
    pages = [page for page in docs.rglob("*.md") if page.parent == docs or not (page.parent / "index.md").exists()]
    assert [page.name for page in pages if page not in linked and page != docs / "index.md"] == []


def test_the_readme_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with patch.object(sys, "path", [str(MEASURED), *sys.path]):
        import chart

        chart.draw(json.loads((MEASURED / "chart.json").read_text()), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes()[:4] == b"\x89PNG"


STUB = """#!/usr/bin/env bash
# Stands for Python: notes its arguments.
case "$*" in
  *find_spec*) exit "${TORCH_MISSING:-0}" ;;
  *"index versions"*) echo "Available versions: ${OFFERED:-}"; exit ;;
  *"-e ."*) echo "the last line of pip" ;;
esac
printf '%s\\n' "$*" >>"$NOTED"
exit "${STATUS:-0}"
"""


def run_quickstart(folder: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the quickstart with stubs for Python and uv. Return the process, and the arguments of each call."""
    (folder / "bin").mkdir()
    for name, text in {"python": STUB, "uv": '#!/bin/sh\necho "uv $*" >>"$NOTED"\n'}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    noted = folder / "noted"
    environment = os.environ | {"LZ_VENV": str(folder), "NOTED": str(noted)} | variables
    command = ["bash", str(EXAMPLES / "quickstart.sh"), "--steps", "7"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return ran, noted.read_text().splitlines()


INSTALL = "-m pip install --no-compile --progress-bar off"


def test_the_quickstart_installs_builds_and_trains_by_arguments_that_there_are(tmp_path: Path) -> None:
    ran, [install, build, training] = run_quickstart(tmp_path)
    assert ran.returncode == 0
    assert [install, build] == [f"{INSTALL} -e .[report]", "-m lightning_zero build"]
    program, *arguments = training.split()
    assert program == "examples/train_gpt.py"
    with patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        import train_gpt

        parsed = train_gpt.parse_arguments(arguments)
    assert (parsed.steps, parsed.devices, parsed.accelerator, parsed.report) == (7, 2, "cpu", True)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="a machine with a GPU gets the build with CUDA")
@pytest.mark.parametrize("offered", ["2.14.0, 2.13.0+cpu, 2.13.0", "2.14.0, 2.13.0"], ids=["by-pip", "by-uv"])
def test_a_machine_without_a_gpu_gets_torch_without_cuda(tmp_path: Path, offered: str) -> None:
    ran, [install, *_] = run_quickstart(tmp_path, TORCH_MISSING="1", OFFERED=offered)
    assert ran.returncode == 0
    if "+cpu" in offered:
        assert install == f"{INSTALL} torch==2.13.0"
    else:
        assert install == f"uv pip install --python {tmp_path}/bin/python --torch-backend=cpu torch==2.13.0"


def test_a_failed_install_ends_the_quickstart_and_shows_its_last_lines(tmp_path: Path) -> None:
    ran, noted = run_quickstart(tmp_path, STATUS="3")
    assert ran.returncode == 3
    assert "the last line of pip" in ran.stdout
    assert noted == [f"{INSTALL} -e .[report]"]


def instructions(text: str) -> list[tuple[str, str]]:
    """Return words of a Dockerfile and their arguments, with continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line and not line.startswith("#")]  # type: ignore[misc]


def test_the_dockerfile_names_what_there_is() -> None:
    found = instructions((EXAMPLES / "Dockerfile").read_text())
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    for image in (rest for word, rest in found if word == "FROM"):
        version = re.match(r"python:([\d.]+)-slim", image)
        assert version is not None
        assert version[1] in SpecifierSet(project["requires-python"])
    torch = Requirement(next(rest for word, rest in found if word == "ARG").split('"')[1])
    needed = next(Requirement(text) for text in project["dependencies"] if Requirement(text).name == "torch")
    assert torch.name == "torch"
    assert all(one.version in needed.specifier for one in torch.specifier)
    (name, folder) = next(rest for word, rest in found if word == "ENV").split("=")
    with patch.dict(os.environ, {name: folder}):
        assert default_cache() == Path(folder)
    ran = [
        line.removeprefix("python -m lightning_zero ")
        for word, rest in found
        if word == "RUN"
        for line in rest.split(" && ")
    ]
    commands = [line for line in ran if line.split()[0] in {command.name for command in COMMANDS}]
    assert commands == ["build"]
    build_parser(COMMANDS).parse_args(commands)
    assert f"chmod -R go+rX {folder}" in ran


def test_docker_is_given_all_that_a_wheel_is_made_of() -> None:
    left_out = (EXAMPLES / "Dockerfile.dockerignore").read_text().split()
    assert not {"csrc", "lightning_zero", "pyproject.toml", "setup.py", "README.md", "LICENSE"} & set(left_out)
