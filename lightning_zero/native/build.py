"""Builds the C++ executor with g++ into a cache, once per torch version, source and compiler.

Protocol: take the lock of the cache entry (an OS lock, so a killed builder releases it); if the library is there, done;
otherwise compile into a temporary directory and rename the result into place, so that nobody ever loads half a file.
Neither nvcc nor CUDA headers are needed: the sources use c10's device-independent interfaces.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import torch

from lightning_zero.errors import NativeBuildError

__all__ = ["build", "source_directory"]

log = logging.getLogger(__name__)

FLAGS = ("-std=c++20", "-O2", "-fPIC", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-Wno-deprecated-declarations")
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch")
LOCK_DEADLINE_S = 900.0


def source_directory() -> Path:
    """The directory of the C++ sources: inside the installed package, or next to it in a checkout.

    Raises:
        NativeBuildError: neither exists.
    """
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "ops.cpp").is_file():
            return candidate
    raise NativeBuildError(
        f"The C++ sources of lightning_zero are neither in {package / 'csrc'} nor in {package.parent / 'csrc'}. "
        "The installation is incomplete: install the package again."
    )


def build(cache: Path | None = None, compiler: str | None = None, deadline_s: float = LOCK_DEADLINE_S) -> Path:
    """Returns the path of the shared library, building it first if this is the first use.

    Args:
        cache: directory for built libraries; by default ``$LIGHTNING_ZERO_CACHE`` or ``~/.cache/lightning_zero``.
        compiler: a C++20 compiler; by default ``$CXX`` or ``g++``.
        deadline_s: how long to wait, in seconds, while another process builds.

    Raises:
        NativeBuildError: no compiler, a compile error, or the deadline passed.
    """
    compiler = compiler or os.environ.get("CXX") or "g++"
    sources = source_directory()
    directory = (cache or _default_cache()) / _digest(sources, _version(compiler))
    library = directory / "lightning_zero.so"
    if library.is_file():
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / "lock", "w")  # noqa: SIM115 - closed below, which releases it
    except OSError as error:
        raise NativeBuildError(
            f"Cannot write the build cache {directory} ({error}). Set LIGHTNING_ZERO_CACHE to a writable directory."
        ) from error
    with lock:
        _acquire(lock, deadline_s)
        if not library.is_file():
            _compile(compiler, sources, library)
    return library


def _default_cache() -> Path:
    explicit = os.environ.get("LIGHTNING_ZERO_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_zero"


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NativeBuildError(
            f"lightning_zero builds its C++ executor at first use, and the compiler {compiler!r} does not run "
            f"({error}). "
            "Install g++ 10 or newer (Debian, Ubuntu: apt-get install g++; conda: conda install gxx), or set CXX to a "
            "C++20 compiler. nvcc and CUDA headers are not needed."
        ) from error


def _digest(sources: Path, compiler_version: str) -> str:
    digest = hashlib.sha256("\0".join((torch.__version__, compiler_version, *FLAGS)).encode())
    for path in sorted(sources.glob("*.[ch]*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _acquire(lock: TextIO, deadline_s: float) -> None:
    start = time.monotonic()
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            waited = time.monotonic() - start
            if waited > deadline_s:
                raise NativeBuildError(
                    f"Another process has been building lightning_zero's C++ executor for {waited:.0f} s (it holds "
                    f"{lock.name}). End that process, or set LIGHTNING_ZERO_CACHE to another directory."
                ) from None
            if not told and waited > 2:
                log.warning("Waiting while another process builds the C++ executor (%s).", lock.name)
                told = True
            time.sleep(0.1)


def _compile(compiler: str, sources: Path, library: Path) -> None:
    start = time.monotonic()
    log.warning("Building lightning_zero's C++ executor (once for this torch version; takes up to a minute).")
    torch_directory = Path(torch.__file__).parent
    include = torch_directory / "include"
    includes = [f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    temporary = Path(tempfile.mkdtemp(dir=library.parent, prefix="build-"))
    try:
        files = sorted(sources.glob("*.cpp"))
        objects = [temporary / f"{path.stem}.o" for path in files]
        commands = [
            [compiler, *FLAGS, abi, *includes, "-c", str(path), "-o", str(target)]
            for path, target in zip(files, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
            list(workers.map(_run, commands))
        libraries = torch_directory / "lib"
        linked = temporary / library.name
        _run(
            [compiler, "-shared", *map(str, objects), f"-L{libraries}", f"-Wl,-rpath,{libraries}", *LIBRARIES]
            + ["-o", str(linked)]
        )
        os.replace(linked, library)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log.warning("Built lightning_zero's C++ executor in %.0f s (%s).", time.monotonic() - start, library)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line.lower()][:20]
        raise NativeBuildError(
            f"Building lightning_zero's C++ executor failed with torch {torch.__version__}:\n"
            + "\n".join(errors or result.stderr.splitlines()[-20:])
            + "\nA C++20 compiler (g++ 10 or newer) and torch 2.11 to 2.13 are needed. The command was:\n"
            + " ".join(command)
        )
