"""Commands as users call them, in processes of their own, with a deadline."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ports import free_port
from tests.ranks.pool import REPO

DEADLINE = 120.0


def python_path() -> str:
    """Return ``PYTHONPATH`` of a process that finds this project and the tests' own modules."""
    return os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Return a context at whose end all processes of the command end."""
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTEST_CURRENT_TEST")
    env = {key: value for key, value in os.environ.items() if key not in left_out}
    env.update(PYTHONPATH=python_path(), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MASTER_PORT=str(free_port()))
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        pytest.fail(f"{' '.join(command)} took longer than {DEADLINE:g} s:\n{output}")
    finally:
        _kill(process)
    return subprocess.CompletedProcess(command, process.returncode, output)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
