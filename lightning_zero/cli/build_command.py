"""Build the C++ executor ahead of time, and a wheel that carries it: the command ``build``."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from lightning_zero.cli.command import UsageError
from lightning_zero.cli.terminal import print_progress
from lightning_zero.errors import NativeBuildError
from lightning_zero.native.build import LOCK_DEADLINE_S, build, executor_key, is_built, source_directory
from lightning_zero.native.prebuilt import LIBRARY

PREBUILT = "LIGHTNING_ZERO_PREBUILT"  # for setup.py: the folder whose files the wheel carries
LAST_LINES = 20


def run(arguments: Namespace) -> int:
    """Run the command, and return the exit status."""
    root = _checkout() if arguments.wheel is not None else None
    begin, was_built = time.monotonic(), arguments.cache is None and is_built()
    deadline_s = LOCK_DEADLINE_S if arguments.timeout is None else arguments.timeout
    path = build(arguments.cache, deadline_s=deadline_s, report=print_progress)
    wheel = None if root is None else build_wheel(root, path, arguments.wheel)
    seconds = round(time.monotonic() - begin, 1)
    if arguments.json:
        found = {"path": str(path), "seconds": seconds, "was_built_before": was_built}
        print(json.dumps(found | {"wheel": None if wheel is None else str(wheel)}))
    else:
        print(wheel or path)
    return 0


def _checkout() -> Path:
    """Return the folder of ``setup.py``. Raise ``UsageError`` for an installed package, which has none."""
    root = source_directory().parent
    if not all((root / name).is_file() for name in ("setup.py", "pyproject.toml")):
        raise UsageError(
            f"argument --wheel: a wheel is built from a checkout, and {root} is an installed package. Clone the "
            "repository, and run `python -m lightning_zero build --wheel` in it."
        )
    return root


def build_wheel(root: Path, library: Path, folder: Path) -> Path:
    """Return the path of a new wheel of the package that carries the executor.

    setuptools builds it by ``setup.py`` in a process of its own. The checkout is not written.

    Args:
        folder: Where the wheel is written; made if it does not exist.

    Raises:
        NativeBuildError: setuptools is missing, or fails.
    """
    folder = folder.absolute()
    print_progress("Building a wheel of lightning_zero with the C++ executor.")
    with tempfile.TemporaryDirectory(prefix="lightning_zero-wheel-") as name:
        temporary = Path(name)
        carried, made = temporary / "prebuilt", temporary / "dist"
        carried.mkdir()
        shutil.copyfile(library, carried / LIBRARY)
        executor_key(source_directory()).write(carried)
        command = [
            *(sys.executable, "setup.py", "--quiet"),
            *("egg_info", "--egg-base", str(temporary)),
            *("build", "--build-base", str(temporary / "build")),
            *("bdist_wheel", "--bdist-dir", str(temporary / "wheel"), "--dist-dir", str(made)),
        ]
        environment = os.environ | {PREBUILT: str(carried)}
        ended = subprocess.run(
            command, cwd=root, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        wheels = list(made.glob("*.whl"))
        if ended.returncode != 0 or len(wheels) != 1:
            output = "\n".join((ended.stdout + ended.stderr).splitlines()[-LAST_LINES:])
            raise NativeBuildError(
                f"setuptools could not build the wheel in {root}:\n{output}\nIt needs setuptools 77 or newer: "
                f"pip install 'setuptools>=77'. The command was:\n{PREBUILT}=... {shlex.join(command)}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheels[0], folder))
