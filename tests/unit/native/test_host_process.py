"""A process that ends leaves no compilers behind, whatever a thread of it is about to start."""

import subprocess
import sys

PROGRAM = """
import os, subprocess, sys, threading, time
from lightning_zero.native.host_process import kill_compilers
from lightning_zero.native.build import MARK

COMPILER = [sys.executable, "-c", "import time; time.sleep(60)", MARK]

def build():  # as a build does: what has failed is tried once more
    for _ in range(2):
        subprocess.Popen(COMPILER).wait()

other = subprocess.Popen(["sleep", "60"])
threads = [threading.Thread(target=build, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
time.sleep(float(sys.argv[1]))
kill_compilers()
time.sleep(0.3)  # a machine that is busy
print(other.poll() is None, flush=True)
other.kill()
os._exit(1)
"""


def left(group: int) -> str:
    found = subprocess.run(["ps", "-o", "stat=,args=", "-g", str(group)], capture_output=True, text=True)
    return "\n".join(line for line in found.stdout.splitlines() if not line.startswith("Z"))


def test_compilers_end_with_it_and_nothing_else_does() -> None:
    for seconds in ("0.3", "0"):  # while they run, and while they are being started
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, seconds], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        out, _ = program.communicate(timeout=60)
        assert out == "True\n"
        assert left(program.pid) == ""
