"""Test ``build``: the path that it prints, and a wheel that carries the executor."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lightning_zero.cli import build_command
from lightning_zero.cli.build_command import build_wheel
from lightning_zero.cli.main import main
from lightning_zero.errors import NativeBuildError
from lightning_zero.native.build import build, source_directory
from lightning_zero.native.prebuilt import KEY, LIBRARY
from lightning_zero.subprocess_main import program_without_lightning
from lightning_zero.version import __version__
from tests.unit.native.stand_in import Compiler

REPO = Path(__file__).parents[3]


def test_build_prints_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def build(cache: Path | None, deadline_s: float, report: object) -> Path:
        asked.append((cache, deadline_s))
        return tmp_path / "lightning_zero.so"

    monkeypatch.setattr("lightning_zero.cli.build_command.build", build)
    assert main(["build", "--cache", str(tmp_path), "--timeout", "7"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'lightning_zero.so'}\n"
    assert main(["build", "--cache", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(tmp_path / "lightning_zero.so")
    assert found["was_built_before"] is False
    assert found["wheel"] is None
    assert asked == [(tmp_path, 7.0), (tmp_path, 900.0)]


def test_a_wheel_needs_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_command, "source_directory", lambda: tmp_path / "lightning_zero" / "csrc")
    assert main(["build", "--wheel", str(tmp_path)]) == 2
    assert "is an installed package. Clone the repository" in capsys.readouterr().err


def test_a_wheel_that_setuptools_cannot_build_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "lightning_zero.so").touch()
    with pytest.raises(
        NativeBuildError, match=r"(?s)could not build the wheel.*setup\.py.*pip install 'setuptools>=77'"
    ):
        build_wheel(tmp_path, tmp_path / "lightning_zero.so", tmp_path / "wheels")
    assert not (tmp_path / "wheels").exists()


LOADS = """
from lightning_zero.native.load import load
load()
import torch
print(torch.ops.loaded_libraries)
"""


def loaded(installed: Path, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Load the executor of an installed wheel in a process that finds no compiler."""
    program = program_without_lightning(LOADS).replace(str(REPO / "lightning_zero"), str(installed / "lightning_zero"))
    assert str(REPO) not in program
    (home / "empty").mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "PYTHONPATH")}
    kept |= {"PATH": str(home / "empty"), "LIGHTNING_ZERO_CACHE": str(home / "cache")}
    return subprocess.run(
        [sys.executable, "-c", program], env=kept | environment, cwd=home, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_an_installed_wheel_loads_its_executor_without_a_compiler(native_library: None, tmp_path: Path) -> None:
    before = subprocess.check_output(["git", "status", "--short", "--ignored"], cwd=REPO)
    wheel = build_wheel(source_directory().parent, build(), tmp_path / "wheels")
    assert subprocess.check_output(["git", "status", "--short", "--ignored"], cwd=REPO) == before
    assert wheel.name.startswith("lightning_zero-")
    assert "-py3-none-linux_" in wheel.name
    installed = tmp_path / "installed"
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(installed)]
    subprocess.run([sys.executable, *pip, str(wheel)], check=True)
    script = [sys.executable, str(installed / "bin" / "lightning-zero"), "--version"]
    version = subprocess.check_output(script, env=os.environ | {"PYTHONPATH": str(installed)}, cwd=tmp_path, text=True)
    assert version == f"lightning_zero {__version__}\n"
    folder = installed / "lightning_zero" / "native" / "prebuilt_executor"
    ended = loaded(installed, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert str(folder / LIBRARY) in ended.stdout
    assert not (tmp_path / "cache").exists()

    key = json.loads((folder / KEY).read_text())
    (folder / KEY).write_text(json.dumps(key | {"torch": "1.0"}))
    ended = loaded(installed, tmp_path)
    assert ended.returncode == 1
    assert "The wheel's C++ executor is not used: it was built for torch 1.0" in ended.stderr
    assert "Install g++ 10 or newer" in ended.stderr
    # The stand-in copies the carried library to the place of the one that a compiler would link.
    stand_in = Compiler(
        tmp_path, f'case "$target" in *.so) cp "{folder / LIBRARY}" "$target";; *) echo > "$target";; esac'
    )
    ended = loaded(installed, tmp_path, CXX=stand_in.path, PATH=os.environ["PATH"])
    assert ended.returncode == 0, ended.stderr
    assert str(tmp_path / "cache") in ended.stdout


@pytest.mark.slow
def test_a_wheel_without_an_executor_is_pure_python(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)),
        *("build", "--build-base", str(tmp_path / "build")),
        *("bdist_wheel", "--bdist-dir", str(tmp_path / "wheel"), "--dist-dir", str(tmp_path)),
    ]
    subprocess.run(command, cwd=REPO, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "lightning_zero/csrc/ops.cpp" in names
    assert not [name for name in names if LIBRARY in name]
