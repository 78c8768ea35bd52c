"""Jobs end with all that they started, and say why they failed."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_zero.cli import local_ranks
from lightning_zero.cli.local_ranks import run_ranks
from lightning_zero.subprocess_main import program_without_lightning
from tests.helpers.command import python_path


def test_ranks_know_who_they_are_and_import_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "8")
    script = """
import importlib.util, os
assert "SLURM_NTASKS" not in os.environ
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["X"], importlib.util.find_spec("lightning_zero").name)
"""
    end = run_ranks(["-c", script], 2, 30.0, {"X": "x"})
    assert end.failed == ""
    assert [output.split() for output in end.outputs] == [[str(rank), "2", "x", "lightning_zero"] for rank in range(2)]


def test_ranks_meet_where_this_process_listens() -> None:
    """A port that was free a second ago was taken when rank 0 wanted it.

    Others start jobs on the machine, too.
    """
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print("met", int(ones), flush=True)
dist.destroy_process_group()
"""
    end = run_ranks(["-c", script], 2, 60.0, {"GLOO_SOCKET_IFNAME": "lo"})
    assert end.failed == ""
    assert all("met 2" in output for output in end.outputs)


def test_a_rank_that_fails_is_quoted_and_those_who_wait_for_it_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.cli.local_ranks.EXIT_GRACE_S", 0.2)
    script = """
import os, time
if os.environ["RANK"] == "1":
    raise SystemExit("the disk is full")
time.sleep(60)
"""
    end = run_ranks(["-c", script], 2, 50.0)
    assert end.seconds < 45
    assert end.status == (None, 1)
    assert end.failed == "rank 1 ended with status 1: the disk is full"


def test_nothing_outlives_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, begun = tmp_path / "child", time.monotonic()

    def since_it_waits() -> float:
        return time.monotonic() if file.exists() and file.read_text() else begun

    monkeypatch.setattr(local_ranks, "time", SimpleNamespace(monotonic=since_it_waits, sleep=time.sleep))
    script = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("waiting", flush=True)
pathlib.Path({str(file)!r}).write_text(str(child.pid))
time.sleep(600)
"""
    end = run_ranks(["-c", script], 1, 3.0)
    assert end.status == (None,)
    assert end.failed == "waiting\nnot over after 3 s (ranks 0)"
    _gone(int(file.read_text()))


def test_nothing_outlives_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def interrupt(processes: list, deadline: float) -> None:
        begun.extend(process.pid for process in processes)
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_zero.cli.local_ranks._wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(["-c", "import time; time.sleep(600)"], 2, 50.0)
    assert len(begun) == 2
    for pid in begun:
        _gone(pid)


@pytest.mark.exhaustive
def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    rank = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path("rank" + os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
    parent = f"from lightning_zero.cli.local_ranks import run_ranks; run_ranks(['-c', {rank!r}], 2, 500.0)"
    files = [tmp_path / f"rank{number}" for number in range(2)]
    job = subprocess.Popen(
        [sys.executable, "-c", program_without_lightning(parent)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": python_path()},
    )
    try:
        deadline = time.monotonic() + 90
        while not all(file.exists() and len(file.read_text().split()) == 2 for file in files):
            assert time.monotonic() < deadline
            assert job.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)  # until who survives it is there, too
    finally:
        job.kill()
        job.wait()
    for pid in (int(word) for file in files for word in file.read_text().split()):
        _gone(pid)


def _gone(pid: int) -> None:
    """A zombie without a parent that collects it, as in a container, counts as gone."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                time.sleep(0.05)
                continue
        return
    os.kill(pid, 9)
    pytest.fail(f"process {pid} outlived its job")
