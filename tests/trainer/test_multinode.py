"""Run the scripts of examples/multinode as users do, with this machine as two hosts."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_zero.checkpoint.sharded.folder import MANIFEST
from tests.helpers.command import python_path
from tests.helpers.ports import free_port
from tests.ranks.pool import REPO

SCRIPTS = REPO / "examples" / "multinode"
DEADLINE = 600.0  # seconds for a process to end by itself on a busy machine
TINY = ["--size", "tiny", "--accelerator", "cpu", "--precision", "32-true", "--compile-backend", "aot_eager"]
TINY += ["--batch", "1", "--length", "32", "--every", "2"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("native_library")]
# torch's agents give up on each other after 60 s in which a machine that is busy with other tests gave them no turn.
alone = pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="agents need a machine to themselves: pass -n0")


@contextmanager
def started(script: str, arguments: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """End all processes that the script started, in every case."""
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTEST_CURRENT_TEST", "MASTER_PORT", "MASTER_ADDR")
    own = {name: value for name, value in os.environ.items() if name not in left_out}
    path = os.pathsep.join([environment.pop("BIN", ""), str(Path(sys.executable).parent), own["PATH"]]).lstrip(":")
    own |= {"PATH": path, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environment
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["bash", str(SCRIPTS / script), *arguments],
            cwd=REPO,
            env=own,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun's workers are in sessions of their own, and its agent ends them
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(what: Callable[[], bool], *logs: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not what():
        if time.monotonic() > deadline:
            pytest.fail("\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs))
        time.sleep(0.1)


def ended_well(process: subprocess.Popen[bytes], log: Path) -> str:
    until(lambda: process.poll() is not None, log)
    assert process.returncode == 0, log.read_text()[-4000:]
    return log.read_text()


def agents(nodes: str, **more: str) -> dict[str, str]:
    return {"HEAD": "localhost", "PORT": str(free_port()), "NODES": nodes, "GPUS": "1", "WAIT_S": "1"} | more


@alone
def test_two_agents_train_and_one_with_two_processes_goes_on(tmp_path: Path) -> None:
    arguments, logs = [*TINY, "--out", str(tmp_path / "out")], [tmp_path / name for name in ("a", "b", "c", "d")]
    told = agents("2")
    with (
        started("torchrun.sh", [*arguments, "--steps", "4"], logs[0], **told) as one,
        started("torchrun.sh", [*arguments, "--steps", "4"], logs[1], **told) as other,
    ):
        said = ended_well(one, logs[0]) + ended_well(other, logs[1])
    assert said.count("ended at step 4") == 1, "rank 0 is on one of both"
    assert "goes on" not in said
    assert (tmp_path / "out" / "checkpoints" / "last.ckpt" / MANIFEST).exists()
    with started("torchrun.sh", [*arguments, "--steps", "6"], logs[2], **agents("1", GPUS="2")) as process:
        said = ended_well(process, logs[2])
    assert "goes on after step 4, on 2 processes" in said
    assert "ended at step 6" in said
    with started("torchrun.sh", [*arguments, "--steps", "8"], logs[3], **agents("1")) as process:
        said = ended_well(process, logs[3])
    assert "goes on after step 6, on 1 processes" in said
    assert "ended at step 8" in said


def children(pid: int) -> list[int]:
    """Return the CPU time of all threads, and of their children."""
    found = [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]
    return [*found, *(one for child in found for one in children(child))]


def listening(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", int(port))) == 0


@alone
def test_training_goes_on_without_a_host_that_is_lost(tmp_path: Path) -> None:
    arguments, logs = [*TINY, "--steps", "100000", "--out", str(tmp_path / "out")], [tmp_path / "a", tmp_path / "b"]
    told = agents("1:2", WAIT_S="5")
    with started("torchrun.sh", arguments, logs[0], **told) as one:
        until(lambda: listening(told["PORT"]), logs[0])
        with started("torchrun.sh", arguments, logs[1], **told) as other:
            until((tmp_path / "out" / "checkpoints" / "last.ckpt" / MANIFEST).exists, *logs)
            for pid in [other.pid, *children(other.pid)]:
                os.kill(pid, signal.SIGKILL)
        until(lambda: "on 1 processes" in logs[0].read_text(), *logs)
        assert one.poll() is None
    assert re.search(r"goes on after step \d+, on 1 processes", logs[0].read_text())


SRUN = """#!/usr/bin/env bash
# One task on each of the hosts; once they have trained ten steps a signal, and the end, if it only announces that.
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do
  SLURM_PROCID=$i SLURM_LOCALID=0 SLURM_NODEID=$i SLURM_STEP_NUM_TASKS=$SLURM_NTASKS "$@" &
  tasks+=($!)
done
if [[ -n $SIGNAL ]]; then
  until grep -q "to the end of step 10:" "$LOG"; do kill -0 "${tasks[@]}" || exit 1; sleep 0.1; done
  kill -"$SIGNAL" "${tasks[@]}"
  if [[ $SIGNAL == USR1 ]]; then
    until [[ -e $REQUEUED ]]; do kill -0 "${tasks[@]}" || break; sleep 0.1; done
    kill -KILL "${tasks[@]}"
  fi
fi
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
"""
# As train.py, of a model that compiles in a second.
PYTHON = """#!/usr/bin/env bash
export PYTHONPATH=examples:$PYTHONPATH
exec "$PYTHON" -c "
import runpy, sys
from gpt.model import SHAPES, GPTShape
SHAPES['tiny'] = GPTShape(32, 1, 2, 48)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name='__main__')" "$@"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$REQUEUED"
"""


@pytest.mark.exhaustive  # test_requeue.py saves at a signal and goes on
def test_a_job_of_slurm_saves_at_each_signal_and_goes_on_from_the_newest(tmp_path: Path) -> None:
    out, commands, requeued = tmp_path / "out", tmp_path / "bin", tmp_path / "requeued"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    told = {"JOB_ID": "17", "JOB_NAME": "gpt", "NTASKS_PER_NODE": "1"}
    told |= {"NODELIST": "127.0.0.1", "SUBMIT_DIR": str(REPO)}
    job = {f"SLURM_{name}": value for name, value in told.items()}
    job |= {"BIN": str(commands), "REQUEUED": str(requeued), "PYTHON": sys.executable}
    # No step saves on its own: the next job resumes from the save at the signal.
    arguments = [*TINY, "--every", "100000", "--out", str(out)]

    def ran(restart: int, hosts: int, announced: str, saved: str) -> tuple[int, str]:
        """Return the step of the checkpoint ``saved``, and the job's output."""
        log = tmp_path / str(restart)
        own = {"MASTER_PORT": str(free_port()), "SIGNAL": announced, "LOG": str(log)}
        own |= {"SLURM_RESTART_COUNT": str(restart), "SLURM_NTASKS": str(hosts), "SLURM_NNODES": str(hosts)}
        with started("slurm.sh", [*arguments, "--steps", "100000"], log, **job, **own) as process:
            until(lambda: process.poll() is not None, log)
        assert (out / saved).exists(), log.read_text()[-4000:]
        meta = torch.load(out / saved / "meta.pt", weights_only=False)
        return meta["global_step"], log.read_text()

    newest = runpy.run_path(str(SCRIPTS / "train.py"))["newest"]
    over, _ = ran(0, 2, "USR1", "hpc_ckpt_1.ckpt")
    assert over >= 10
    assert requeued.read_text() == "requeue 17\n"
    assert newest(out) == "hpc"
    preempted, said = ran(1, 1, "TERM", "checkpoints/last.ckpt")
    assert f"goes on after step {over}, on 1 processes" in said
    assert preempted >= over + 10
    assert newest(out) == "last"
