"""Faults: ``ACTIONS[name](where, fault)`` acts on the rank and thread that call it."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from tests.faults.model import DEPTH, Net, Trained
from tests.faults.spec import Fault

__all__ = ["ACTIONS", "Planned", "Skip", "Stuck"]

FOREVER_S = 3600
FAR_TOO_MUCH = 1 << 50  # bytes; more than any device has


class Planned(Exception):
    """The exception that a rank raises on request.

    No RuntimeError: some of these are handled, as when a graph cannot be captured.
    """


class Skip(BaseException):
    """For the injector: skip the call."""


class Stuck(BaseException):
    """A rank that should hang for ever did not, and was not ended."""


def _raise(where: str, fault: Fault) -> NoReturn:
    raise Planned(f"planned, {where}")


def _raise_cuda_error(where: str, fault: Fault) -> NoReturn:
    """Stands in for a device that is lost; see ``device_assert`` for a real one."""
    kind: Any = getattr(torch, "AcceleratorError", RuntimeError)
    raise kind(f"CUDA error: an illegal memory access was encountered (planned, {where})")


def _signal(number: int) -> Callable[[str, Fault], None]:
    def send(where: str, fault: Fault) -> None:
        os.kill(os.getpid(), number)

    return send


def _exit(where: str, fault: Fault) -> NoReturn:
    sys.exit(3)


def _exit_at_once(where: str, fault: Fault) -> NoReturn:
    os._exit(3)


def _exit_well(where: str, fault: Fault) -> NoReturn:
    os._exit(0)


def _stop(where: str, fault: Fault) -> None:
    """Stop all threads, the watchdog's too, until another process continues this one."""
    script = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(
        ["bash", "-c", script], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.kill(os.getpid(), signal.SIGSTOP)


def _exhaust(where: str, fault: Fault) -> NoReturn:
    """This rank has fewer batches than the others."""
    raise StopIteration


def _reorder(where: str, fault: Fault) -> None:
    """From now on this rank runs two blocks, which are alike, in the other order."""
    Net.order = (1, 0, *range(2, DEPTH))


def _nan(where: str, fault: Fault) -> None:
    """From now on this rank's losses, and with them its gradients, are no numbers."""
    Trained.scale = float("nan")


def _sleep(where: str, fault: Fault) -> None:
    time.sleep(fault.seconds)


def _hang(where: str, fault: Fault) -> NoReturn:
    """Other threads run, signals are handled."""
    end = time.monotonic() + FOREVER_S
    while time.monotonic() < end:
        time.sleep(0.05)
    raise Stuck(where)


def _hang_busily(where: str, fault: Fault) -> NoReturn:
    """Takes the GIL whenever it can be had."""
    end = time.monotonic() + FOREVER_S
    while time.monotonic() < end:
        pass
    raise Stuck(where)


def _hang_in_c(where: str, fault: Fault) -> NoReturn:
    """Other threads run; no signal's handler in Python does on this one."""
    _sleep_in_c(ctypes.CDLL(None))
    raise Stuck(where)


def _hang_holding_the_gil(where: str, fault: Fault) -> NoReturn:
    """No thread of this process runs Python any more."""
    _sleep_in_c(ctypes.PyDLL(None))
    raise Stuck(where)


def _sleep_in_c(libc: Any) -> None:
    left = FOREVER_S
    while left > 0:  # a signal ends it early, and returns the rest
        left = libc.sleep(left)


def _out_of_memory(where: str, fault: Fault) -> NoReturn:
    if torch.cuda.is_initialized():
        torch.empty(FAR_TOO_MUCH, dtype=torch.uint8, device="cuda")
    raise torch.OutOfMemoryError(f"planned, {where}: tried to allocate {FAR_TOO_MUCH} bytes")


def _device_assert(where: str, fault: Fault) -> None:
    """Goes on: the host hears of it when it next asks the device."""
    values = torch.zeros(4, device="cuda")
    values[torch.full((1,), 99, device="cuda")]


def _skip(where: str, fault: Fault) -> NoReturn:
    raise Skip


def _fill_shared_memory(where: str, fault: Fault) -> None:
    """From now on this process cannot claim memory that others could read."""

    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = full


ACTIONS: dict[str, Callable[[str, Fault], None]] = {
    "raise": _raise,
    "cuda_error": _raise_cuda_error,
    "sigkill": _signal(signal.SIGKILL),
    "sigterm": _signal(signal.SIGTERM),
    "sigint": _signal(signal.SIGINT),
    "exit": _exit,
    "exit_at_once": _exit_at_once,
    "exit_well": _exit_well,
    "stop": _stop,
    "exhaust": _exhaust,
    "reorder": _reorder,
    "nan": _nan,
    "sleep": _sleep,
    "hang": _hang,
    "hang_busily": _hang_busily,
    "hang_in_c": _hang_in_c,
    "hang_holding_the_gil": _hang_holding_the_gil,
    "out_of_memory": _out_of_memory,
    "device_assert": _device_assert,  # on a GPU only
    "skip": _skip,  # the wrapped object
    "full_shared_memory": _fill_shared_memory,
}
