"""The executor is built beside other work, for as long as somebody may want it."""

import gc
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_zero.alone import program_without_lightning
from lightning_zero.errors import NativeBuildError
from lightning_zero.native.ahead import BackgroundBuild
from lightning_zero.native.build import build, is_built
from lightning_zero.native.commands import children
from tests.unit.native.stand_in import WRITE, Compiler

SLOW = "sleep 30"


class Owner:
    """Stands for a strategy."""


@pytest.fixture
def slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return use(tmp_path, monkeypatch, SLOW)


def use(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Compiler:
    compiler = Compiler(folder, body)
    monkeypatch.setenv("CXX", compiler.path)
    monkeypatch.setenv("LIGHTNING_ZERO_CACHE", str(folder / "cache"))
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    return compiler


def wait_for(what: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("build-*")]


def test_what_is_built_ahead_is_there_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = use(tmp_path, monkeypatch, WRITE.format(pause=0))
    owner = Owner()
    with caplog.at_level(logging.WARNING):
        ahead = BackgroundBuild(owner)
        assert ahead._running is not None
        assert ahead.is_pending
        ahead._running._thread.join(60)
        assert ahead.finish() < 5
        assert not ahead.is_pending
        assert ahead.finish() < 0.1, "harmless when repeated"
    calls = len(compiler.calls())
    assert build().read_text() == "whole\n"
    assert len(compiler.calls()) == calls > 1
    assert not caplog.text, "nobody has waited"


def test_who_comes_early_waits_and_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = use(tmp_path, monkeypatch, WRITE.format(pause=0.3))
    owner = Owner()
    with caplog.at_level(logging.WARNING):
        ahead = BackgroundBuild(owner)
        wait_for(compiler.calls)
        assert "Building" not in caplog.text
        assert ahead.finish() > 0.2
    assert caplog.text.count("Building lightning_zero's C++ executor") == 1
    assert caplog.text.count("Built lightning_zero's C++ executor in") == 1
    assert is_built()


def test_errors_come_where_the_executor_is_needed_and_then_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path, monkeypatch, "echo 'ops.cpp:1: error: no such thing' >&2; exit 1")
    owner = Owner()
    ahead = BackgroundBuild(owner)
    with pytest.raises(NativeBuildError) as early:
        ahead.finish()
    with pytest.raises(NativeBuildError) as today:
        build()
    first, second = (str(caught.value).splitlines() for caught in (early, today))
    assert first[:-1] == second[:-1]  # but for the command, which may be another file's
    assert "error: no such thing" in first[1]
    ahead.finish()


@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_other_ranks_of_a_host_build_nothing(slowly: Compiler, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    owner = Owner()
    ahead = BackgroundBuild(owner)
    assert ahead.is_pending, "for the first one"
    assert ahead.finish() < 0.1
    assert not slowly.calls()


def test_what_is_there_is_not_built(slowly: Compiler, tmp_path: Path) -> None:
    build(compiler=Compiler(tmp_path, version="2.0").path)
    owner = Owner()
    assert not BackgroundBuild(owner).is_pending
    assert BackgroundBuild(owner).finish() < 1
    assert not slowly.calls()


def test_an_owner_that_goes_away_takes_the_build_with_it(
    slowly: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(children().get(os.getpid(), []))
    owner = Owner()
    with caplog.at_level(logging.DEBUG):
        ahead = BackgroundBuild(owner)
        wait_for(slowly.calls)
        assert set(children().get(os.getpid(), [])) > before
        del owner
        gc.collect()
        assert set(children().get(os.getpid(), [])) <= before
    assert not caplog.text
    assert not left_behind(tmp_path)
    ahead.finish()
    # Nobody is kept from building it.
    assert build(compiler=Compiler(tmp_path, version="2.0").path, deadline_s=0).read_text() == "whole\n"


def test_a_program_that_ends_does_not_wait_and_leaves_nothing(slowly: Compiler, tmp_path: Path) -> None:
    script = (
        "import time, lightning_zero.native.ahead as a\n"
        "class Owner: pass\n"
        "owner = Owner(); ahead = a.BackgroundBuild(owner)\n"
        f"while not open({str(slowly.log)!r}, 'a+').seek(0, 2) > 200: time.sleep(0.02)\n"
        "print(time.monotonic())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program_without_lightning(script)], capture_output=True, text=True, timeout=120
    )
    # The triton that torch 2.15 brings tells at exit of objects of its own.
    said = [line for line in done.stderr.splitlines() if not re.match(r"nanobind:| - |See https://nanobind", line)]
    assert (done.returncode, said) == (0, [])
    assert time.monotonic() - float(done.stdout) < 20
    assert not left_behind(tmp_path)
    running = [Path(f"/proc/{pid}/cmdline") for pids in children().values() for pid in pids]
    assert not [path for path in running if path.exists() and slowly.path.encode() in path.read_bytes()]


@pytest.mark.exhaustive
def test_a_forked_process_neither_waits_for_the_thread_nor_ends_the_build(slowly: Compiler) -> None:
    owner = Owner()
    ahead = BackgroundBuild(owner)
    wait_for(slowly.calls)
    pid = os.fork()
    if pid == 0:
        took = ahead.finish()
        del owner
        gc.collect()
        os._exit(0 if took < 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert ahead._running is not None
    assert ahead._running._thread.is_alive()
    ahead._running.stop()
