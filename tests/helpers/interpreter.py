"""Runs Triton kernels on a CPU, in Triton's interpreter."""

import os
import subprocess
import sys

import pytest


def run_interpreted(code: str) -> None:
    """Run a program that launches kernels on CPU tensors; it must print "all equal" at its end.

    In a process of its own: Triton reads TRITON_INTERPRET when it is imported. The interpreter cuts off digits of
    bfloat16 instead of rounding, and multiplies its bits as integers, so programs use float16 and float32.
    """
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    if "can be converted to Python scalars" in done.stderr:
        pytest.skip("this Triton's interpreter and this NumPy do not fit each other")
    assert done.stdout == "all equal\n", done.stderr
