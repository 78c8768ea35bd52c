"""Test which executor of a wheel is used, with a stand-in compiler."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.errors import NativeBuildError
from lightning_zero.native import prebuilt
from lightning_zero.native.build import build, executor_key, is_built, source_directory
from lightning_zero.native.load import _load_library
from lightning_zero.native.prebuilt import KEY, LIBRARY, ExecutorKey, find_prebuilt
from tests.unit.native.stand_in import Compiler

HERE = ExecutorKey("2.13.0+cpu", True, "0123", "x86_64", ("glibc", "2.36"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"libc": ("glibc", "2.9")}, ""),
        ({"libc": ("glibc", "2.36")}, ""),
        ({"libc": ("glibc", "2.100")}, "it needs glibc 2.100 or newer, and this is 2.36"),
        ({"libc": ("musl", "1.2")}, "it was built for the C library musl, and this is glibc"),
        ({"torch": "2.13.0+cu130"}, "it was built for torch 2.13.0+cu130, and this is 2.13.0+cpu"),
        ({"torch": "2.13.1+cpu"}, "it was built for torch 2.13.1+cpu"),
        ({"cxx11_abi": False}, "it was built for the C++11 ABI False, and this is True"),
        ({"machine": "aarch64"}, "it was built for the processor aarch64"),
        ({"sources": "4567"}, "it was built for the C++ sources 4567"),
    ],
)
def test_an_executor_fits_the_torch_and_the_system_that_it_was_built_for(changes: dict[str, Any], words: str) -> None:
    found = replace(HERE, **changes).mismatch(HERE)
    assert found.startswith(words) if words else not found


def carried(folder: Path, key: ExecutorKey) -> Path:
    folder.mkdir()
    (folder / LIBRARY).write_text("carried")
    key.write(folder)
    return folder / LIBRARY


def test_a_key_is_read_as_it_was_written(tmp_path: Path) -> None:
    library = carried(tmp_path / "x", HERE)
    assert ExecutorKey.read(tmp_path / "x") == HERE
    found = find_prebuilt(lambda: HERE, tmp_path / "x")
    assert found is not None
    assert (found.library, found.mismatch) == (library, "")


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"torch": "2"}), json.dumps({"more": 1})])
def test_a_damaged_key_fits_nothing(tmp_path: Path, text: str) -> None:
    carried(tmp_path / "x", HERE)
    (tmp_path / "x" / KEY).write_text(text)
    found = find_prebuilt(lambda: HERE, tmp_path / "x")
    assert found is not None
    assert "x is incomplete or damaged" in found.mismatch


def test_a_library_that_is_cut_off_does_not_load(tmp_path: Path) -> None:
    library = carried(tmp_path / "x", HERE)
    library.write_text("car")
    found = find_prebuilt(lambda: HERE, tmp_path / "x")
    assert found is not None
    assert found.mismatch == f"{tmp_path / 'x'} is incomplete or damaged"


def test_without_an_executor_the_sources_are_not_read(tmp_path: Path) -> None:
    def here() -> ExecutorKey:
        raise AssertionError("read")

    assert find_prebuilt(here, tmp_path) is None


def test_an_executor_that_fits_is_used_without_a_compiler_and_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_CACHE", str(tmp_path / "cache"))
    library = carried(tmp_path / "x", executor_key(source_directory()))
    assert not is_built()
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "x")
    assert is_built()
    assert build(compiler="no-such-compiler") == library
    assert not (tmp_path / "cache").exists()
    own = build(tmp_path / "own", Compiler(tmp_path).path)
    assert own.is_relative_to(tmp_path / "own"), "a folder that the caller names is filled"


def test_an_executor_that_does_not_load_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The key knows the C library, but not the C++ library of conda, for example."""
    loaded: list[Path] = []

    def load_library(path: str) -> None:
        if Path(path).parent == prebuilt.FOLDER:
            raise OSError("version `GLIBCXX_3.4.99' not found")
        loaded.append(Path(path))

    monkeypatch.setenv("LIGHTNING_ZERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", Compiler(tmp_path).path)
    carried(tmp_path / "x", executor_key(source_directory()))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "x")
    monkeypatch.setattr(torch.ops, "load_library", load_library)
    _load_library()
    [library] = loaded
    assert library.is_relative_to(tmp_path / "cache")
    assert "The wheel's C++ executor is not used: version `GLIBCXX_3.4.99' not found." in caplog.text


def test_an_executor_that_does_not_fit_is_replaced_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_CACHE", str(tmp_path / "cache"))
    carried(tmp_path / "x", replace(executor_key(source_directory()), torch="1.0"))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "x")
    lines: list[str] = []

    def report(text: str, *values: object) -> None:
        lines.append(text % values)

    assert not is_built()
    with pytest.raises(NativeBuildError, match="'no-such-compiler' does not run"):
        build(compiler="no-such-compiler", report=report)
    library = build(compiler=Compiler(tmp_path).path, report=report)
    assert library.read_text() == "whole\n"
    assert [
        line for line in lines if line.startswith("The wheel's C++ executor is not used: it was built for torch 1.0")
    ]
    lines.clear()
    assert build(report=report) == library
    assert not lines, "the next start has its own, and nothing to report"
