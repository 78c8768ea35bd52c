"""A process that a launcher has started fails.

The one that started it says which, and ends with a status.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from lightning_zero.integrations import processes
from lightning_zero.integrations.processes import ChildWatch, terminate_after_grace


def _started(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", script])


def _ends(tmp_path: Path, *scripts: str, to_end_s: float = 0.2, lives_s: float = 40.0) -> tuple[int, str]:
    """The status and words of a process that has started these, and would end with status 0 after ``lives_s``."""
    said = tmp_path / "said"
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
        ChildWatch([_started(script) for script in scripts], 4, to_end_s).start()
        time.sleep(lives_s)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), said.read_text()


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_the_rank_that_failed_is_named_and_nothing_is_left(tmp_path: Path, script: str, how: str) -> None:
    other = tmp_path / "other"
    lives = f"import os, time; open({str(other)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    waits = f"import os, time\nwhile not (os.path.exists({str(other)!r}) and os.path.getsize({str(other)!r})): time.sleep(0.01)\n"
    code, said = _ends(tmp_path, lives, waits + script)
    assert code == 1
    assert "[lightning_zero, rank 4] The process of rank 6 (number " in said
    assert how in said
    state = Path(f"/proc/{other.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_a_process_that_ends_by_itself_does_so_in_its_own_way(tmp_path: Path) -> None:
    assert _ends(tmp_path, "raise SystemExit(3)", to_end_s=10.0, lives_s=1.0) == (0, "")


def test_children_that_end_well_are_no_failure(tmp_path: Path) -> None:
    assert _ends(tmp_path, "", "", lives_s=1.0) == (0, "")


def test_children_may_end_by_themselves_before_they_are_killed() -> None:
    soon, never = _started("raise SystemExit(5)"), _started("import time; time.sleep(60)")
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        soon.wait(30)
        now += seconds

    with patch.object(processes, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep)):
        terminate_after_grace([soon, never])
    assert processes.GRACE_S <= now < processes.GRACE_S + 1
    assert soon.wait(10) == 5
    assert never.wait(30) == -signal.SIGKILL
