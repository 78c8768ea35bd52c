"""Test that a process that ends leaves no compilers running, even if a thread is about to start one."""

import subprocess
import sys
import time
from pathlib import Path

from lightning_zero.subprocess_main import program_without_lightning
from tests.unit.native.stand_in import Compiler

PROGRAM = """
import os, subprocess, sys, threading, time
from lightning_zero.native.build import build, kill_compilers

other = subprocess.Popen(["sleep", "60"])
threading.Thread(target=build, daemon=True).start()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
kill_compilers()
time.sleep(0.3)  # the machine may be busy
print(other.poll() is None, flush=True)
other.kill()
os._exit(1)
"""


def test_compilers_end_with_it_and_nothing_else_does(tmp_path: Path) -> None:
    for seconds in ("0.3", "0"):  # while they run, and while they are being started
        folder = tmp_path / seconds
        folder.mkdir()
        compiler = Compiler(folder, "sleep 60")
        program = subprocess.Popen(
            [sys.executable, "-c", program_without_lightning(PROGRAM), str(compiler.log), seconds],
            stdout=subprocess.PIPE,
            text=True,
            env={"CXX": compiler.path, "LIGHTNING_ZERO_CACHE": str(folder / "cache")},
        )
        out, _ = program.communicate(timeout=60)
        assert out == "True\n"
        deadline = time.monotonic() + 30  # a killed process ends when the machine lets it run; the compiler takes 60 s
        while still_running(compiler.path):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def still_running(path: str) -> list[str]:
    running = subprocess.run(["ps", "-eo", "stat=,args="], capture_output=True, text=True).stdout
    return [line for line in running.splitlines() if path in line and line[0] != "Z"]
