"""Test the build of the C++ executor with a stand-in compiler: a real build takes most of a minute."""

import errno
import fcntl
import importlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.errors import NativeBuildError
from lightning_zero.native import build as build_module
from lightning_zero.native.build import build, kernel_source, loaded_runtime, source_directory
from tests.unit.native.stand_in import WRITE, Compiler


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.parent != cache)


def test_without_a_compiler_the_error_names_gpp_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match=r"'no-such-compiler' does not run.*Install g\+\+.*apt-get.*conda.*CXX"):
        build(tmp_path, "no-such-compiler")
    assert not left_behind(tmp_path)


def test_the_compiler_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(tmp_path)
    monkeypatch.setenv("CXX", compiler.path)
    monkeypatch.setenv("LIGHTNING_ZERO_CACHE", str(tmp_path / "cache"))
    library = build()
    assert library.is_relative_to(tmp_path / "cache")
    assert compiler.calls()
    monkeypatch.delenv("LIGHTNING_ZERO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build().is_relative_to(tmp_path / "xdg" / "lightning_zero")


@pytest.mark.parametrize("cores", [2, 64])
def test_every_source_is_compiled_and_linked_once_and_then_never_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    units = build_module.MAX_UNITS * (2 if cores == 64 else 1)
    compiler = Compiler(tmp_path)
    with caplog.at_level(logging.WARNING):
        library = build(tmp_path / "cache", compiler.path)
    assert "C++ executor: building, once for this torch version." in caplog.text
    assert library.read_text() == "whole\n"
    assert left_behind(tmp_path / "cache") == ["built-by", "lightning_zero.so", "lock"]
    assert (library.parent / "built-by").read_text() == f"{compiler.path}\nstand-in 1.0\n"
    sources = sorted(path.name for path in source_directory().rglob("*.cpp"))
    assert sorted(compiler.included()) == sources
    assert len(compiler.calls()) == units + 1
    caplog.clear()
    # Another process may hold the lock: a built library is used without it.
    with open(library.parent / "lock", "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert build(tmp_path / "cache", compiler.path, deadline_s=0) == library
    assert len(compiler.calls()) == units + 1
    assert not caplog.text


def test_another_torch_machine_or_source_gets_a_library_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(tmp_path)
    found = {build(tmp_path, compiler.path)}
    changes: list[tuple[Any, str, Any]] = [
        (torch, "__version__", "9.9.9"),
        (platform, "machine", lambda: "riscv64"),
        (platform, "libc_ver", lambda: ("glibc", "9.9")),
    ]
    for where, name, value in changes:
        with monkeypatch.context() as patched:
            patched.setattr(where, name, value)
            found.add(build(tmp_path, compiler.path))
    edited = tmp_path / "csrc"
    shutil.copytree(source_directory(), edited)
    monkeypatch.setattr(build_module, "source_directory", lambda: edited)
    found.add(build(tmp_path, compiler.path))
    assert len(found) == 4, "the same sources in another folder are the same library"
    (edited / "torch_compat.h").write_text("// a header counts, too")
    found.add(build(tmp_path, compiler.path))
    assert len(found) == 5
    (edited / "torch_compat.h").rename(edited / "transport" / "compat.h")
    found.add(build(tmp_path, compiler.path))
    assert len(found) == 6, "and so does where it lies"


def test_what_is_built_needs_no_compiler_and_does_not_mind_another(tmp_path: Path) -> None:
    first, second = Compiler(tmp_path), Compiler(tmp_path, version="2.0")
    library = build(tmp_path / "cache", first.path)
    assert build(tmp_path / "cache", "no-such-compiler") == library
    assert build(tmp_path / "cache", second.path) == library
    assert not second.calls()


def test_only_a_compiler_of_gnu_is_told_how_much_memory_it_may_fill(tmp_path: Path) -> None:
    gnu, other = Compiler(tmp_path, version="Free Software Foundation"), Compiler(tmp_path)
    build(tmp_path / "gnu", f"'{gnu.path}'")
    build(tmp_path / "other", other.path)
    units = [call for call in gnu.calls() if " -c " in call]
    assert units
    assert all("--param ggc-min-heapsize=" in call for call in units)
    assert not any("--param" in call for call in other.calls())


def test_a_compiler_may_have_a_launcher_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(tmp_path)
    launcher = tmp_path / "a launcher"
    launcher.write_text(f'#!/bin/sh\necho "$2" >> "{tmp_path}/launched"\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{launcher}' {compiler.path} -m64")
    body = Path(compiler.path).read_text().replace('"$1" = --version', '"$2" = --version')
    Path(compiler.path).write_text(body)
    assert build(tmp_path / "cache").read_text() == "whole\n"
    assert set((tmp_path / "launched").read_text().split()) == {"-m64"}


def test_a_compiler_that_is_no_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match=r"CXX=\"g\+\+ '-O2\" is no command.*'ccache g\+\+'"):
        build(tmp_path, "g++ '-O2")


@pytest.mark.skipif(not loaded_runtime(), reason="no C++ library of GNU's is loaded")
def test_the_c_plus_plus_library_of_the_process_is_used_where_a_compiler_would_take_a_static_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "one.cpp").write_text(
        "#include <sstream>\nvoid print(std::ostream& to, long number) { to << number; }\n"
    )
    printing = "_M_insertIlE"  # of std::ostream, which a static library would contain

    def defined(*libraries: str) -> bool:
        target = str(tmp_path / "one.so")
        command = ["g++", "-fPIC", "-shared", "-static-libstdc++", str(tmp_path / "one.cpp"), *libraries, "-o", target]
        subprocess.run(command, check=True)
        symbols = subprocess.run(["nm", "-D", "--defined-only", target], check=True, capture_output=True, text=True)
        return printing in symbols.stdout

    assert not defined(*loaded_runtime())
    assert defined()


def test_nobody_sees_half_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    compiler = Compiler(tmp_path, WRITE.format(pause=0.15))
    seen: set[str] = set()
    results: list[Path] = []
    builders = [
        threading.Thread(target=lambda: results.append(build(tmp_path / "cache", compiler.path))) for _ in range(3)
    ]
    for thread in builders:
        thread.start()
    while any(thread.is_alive() for thread in builders):
        seen |= {path.read_text() for path in (tmp_path / "cache").glob("*/lightning_zero.so")}
        time.sleep(0.005)
    assert seen <= {"whole\n"}
    assert len(results) == 3
    assert len(set(results)) == 1
    assert len(compiler.calls()) == build_module.MAX_UNITS + 1, "built more than once"


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    # Linking fails: the last call, the one without -c.
    body = 'case "$target" in *.so) echo "ld: error: cannot find -lc10" >&2; exit 1;; esac; ' + WRITE.format(pause=0)
    broken = Compiler(tmp_path, body)
    for _ in range(2):
        with pytest.raises(NativeBuildError, match=r"cannot find -lc10"):
            build(tmp_path / "cache", broken.path)
        assert left_behind(tmp_path / "cache") == ["lock"]
    Compiler(tmp_path)  # repaired: the same name, the same version
    assert build(tmp_path / "cache", broken.path).read_text() == "whole\n"


@pytest.mark.parametrize("body", ["exit 0", 'case "$target" in *.so) echo said;; *) echo > "$target";; esac'])
def test_a_compiler_that_makes_nothing_is_an_error(tmp_path: Path, body: str) -> None:
    silent = Compiler(tmp_path, body)
    what = "unit" if body == "exit 0" else "lightning_zero.so"
    said = r"\(nothing\)" if body == "exit 0" else "said"
    with pytest.raises(NativeBuildError, match=rf"(?s)made no {what}.*printed:\n{said}\nSet CXX to a C\+\+20 compiler"):
        build(tmp_path / "cache", silent.path)
    assert left_behind(tmp_path / "cache") == ["lock"]


def test_a_compiler_may_write_any_bytes(tmp_path: Path) -> None:
    broken = Compiler(tmp_path, r"printf 'error: \377\n' >&2; exit 1")
    with pytest.raises(NativeBuildError, match="error: \ufffd"):
        build(tmp_path / "cache", broken.path)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(NativeBuildError, match=r"Cannot write the build cache.*No space left.*LIGHTNING_ZERO_CACHE"):
        build(tmp_path / "cache", Compiler(tmp_path).path)


def test_a_compile_error_is_shown_with_the_versions_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ops.cpp").write_text("int main( { return undeclared; }\n")
    monkeypatch.setattr(build_module, "source_directory", lambda: tmp_path)
    with pytest.raises(NativeBuildError) as caught:
        build(tmp_path / "cache")
    message = str(caught.value)
    assert f"failed with torch {torch.__version__}" in message
    assert "ops.cpp:1" in message
    assert "error:" in message
    assert "C++20 compiler (g++ 10 or newer)" in message
    assert "-std=c++20" in message.splitlines()[-1]


def test_waiting_for_another_builder_ends_with_the_deadline_and_names_the_lock(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path)
    library = build(tmp_path / "cache", compiler.path)
    library.unlink()
    with open(library.parent / "lock", "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(NativeBuildError, match=r"Another process.*lock\).*End that process.*LIGHTNING_ZERO_CACHE"):
            build(tmp_path / "cache", compiler.path, deadline_s=0.2)
    assert build(tmp_path / "cache", compiler.path, deadline_s=0.2) == library


def test_a_killed_builder_blocks_nobody(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path)
    library = build(tmp_path / "cache", compiler.path)
    library.unlink()
    (library.parent / "build-killed").mkdir()
    script = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); time.sleep(60)"
    command = [sys.executable, "-S", "-c", script, str(library.parent / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(NativeBuildError, match="Another process"):
            build(tmp_path / "cache", compiler.path, deadline_s=0)
        holder.kill()
        holder.wait()
        assert build(tmp_path / "cache", compiler.path, deadline_s=0).read_text() == "whole\n"


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path)
    occupied = tmp_path / "a-file"
    occupied.write_text("")
    with pytest.raises(NativeBuildError, match=r"Cannot write the build cache.*a-file.*Set LIGHTNING_ZERO_CACHE to a"):
        build(occupied, compiler.path)
    # The directory is there, but nothing can be put into it. (Permissions would not stop root, who runs many tests.)
    library = build(tmp_path / "cache", compiler.path)
    library.unlink()
    (library.parent / "lock").unlink()
    (library.parent / "lock").mkdir()
    with pytest.raises(NativeBuildError, match=r"Cannot write the build cache.*Set LIGHTNING_ZERO_CACHE to a writable"):
        build(tmp_path / "cache", compiler.path)


def test_missing_sources_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "__file__", str(tmp_path / "package" / "native" / "build.py"))
    with pytest.raises(NativeBuildError, match=r"C\+\+ sources.*package/csrc.*install the package again"):
        source_directory()


def test_a_kernel_is_found_in_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_source("signal_kernels.cu").parent.name == "sync"
    with pytest.raises(NativeBuildError, match=r"0 files in .* are called no-such\.cu, not one.*install it again"):
        kernel_source("no-such.cu")
    for room in ("a", "b"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "twice.cu").touch()
    monkeypatch.setattr(build_module, "source_directory", lambda: tmp_path)
    with pytest.raises(NativeBuildError, match="2 files"):
        kernel_source("twice.cu")


def test_a_library_that_does_not_load_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    garbage = tmp_path / "lightning_zero.so"
    garbage.write_bytes(os.urandom(64))
    # The module's name is taken by the function that the package exports.
    load_module = importlib.import_module("lightning_zero.native.load")
    monkeypatch.setattr(load_module, "build", lambda: garbage)
    with pytest.raises(NativeBuildError, match=rf"{garbage} does not load with torch.*Delete that file"):
        load_module.load.__wrapped__()


def test_a_torch_that_needs_more_than_the_lean_headers_is_given_its_own() -> None:
    class CommandRunner:
        def __init__(self, refuses: str) -> None:
            self.refuses, self.ran = refuses, list[list[str]]()

        def run(self, command: list[str]) -> Any:
            self.ran.append(command)
            code = int(self.refuses in command)
            return subprocess.CompletedProcess(command, code, "", "error: no such member" if code else "")

    lean = [build_module.LEAN_HEADERS, "-I/lean"]
    command = ["g++", *lean, "-I/torch", "-c", "unit.cpp"]
    for refuses, ran in (("nothing", [command]), (lean[0], [command, ["g++", "-I/torch", "-c", "unit.cpp"]])):
        commands: Any = CommandRunner(refuses)
        build_module._compile_unit(commands, lean, command)
        assert commands.ran == ran
    with pytest.raises(NativeBuildError, match="no such member"):
        build_module._compile_unit(CommandRunner("g++"), lean, command)  # type: ignore[arg-type]
