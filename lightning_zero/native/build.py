"""Builds the C++ executor with g++ into a cache, once per torch version, source and kind of machine.

Protocol: if the library is there, done, and nobody needs a compiler; otherwise take the lock of the cache entry,
compile into a temporary directory and rename the result into place, so that nobody ever loads half a file. Neither nvcc
nor CUDA headers are needed: the sources use c10's device-independent interfaces.

The compiler is not part of an entry's name: a library that another compiler built does the same, and a machine without
any may use what was built elsewhere. ``built-by`` in the entry tells which it was.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_zero.compat.versions import tested
from lightning_zero.errors import NativeBuildError
from lightning_zero.native.cache import (
    check_owner,
    check_parents,
    default_cache,
    lock_entry,
    make_private_folder,
    resolve_cache,
    unwritable_error,
)
from lightning_zero.native.commands import CommandRunner

__all__ = ["build", "is_built", "kernel_source", "loaded_runtime", "source_directory"]

log = logging.getLogger(__name__)

MARK = "-DLIGHTNING_ZERO"  # by which our compilers are known among the processes that a rank has started
FLAGS = (MARK, "-std=c++20", "-O2", "-fPIC", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-Wno-deprecated-declarations")
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch")
LOCK_DEADLINE_S = 900.0
MAX_UNITS = 8
SLOW_HEADERS = "#include <torch/"  # those of process groups, autograd and ops: three times the seconds of tensors'
BINDING_FLAG = "-O1"  # for bindings, which do no work, and are what all others of a build wait for
# g++ looks for garbage in its memory again and again, a tenth of its seconds; like this each takes 0.8 GB, not 0.7.
GCC_HEAP_FLAGS = ("--param", "ggc-min-heapsize=1500000")
LEAN_HEADERS = "-DAT_PER_OPERATOR_HEADERS"  # with the folder "lean" of the sources, whose headers come before torch's

Report = Callable[..., Any]  # as a logger's methods: a format, and what belongs into it


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


def kernel_source(name: str) -> Path:
    """The file of that name, as in ``"kernels.cu"``, wherever it lies among the sources.

    Raises:
        NativeBuildError: there is none, or no sources.
    """
    found = list(source_directory().rglob(name))
    if len(found) != 1:
        raise NativeBuildError(
            f"{len(found)} files in {source_directory()} are called {name}, not one. The installation lacks some, or "
            "holds what an older version left behind: remove the package and install it again."
        )
    return found[0]


def build(
    cache: Path | None = None,
    compiler: str | None = None,
    deadline_s: float = LOCK_DEADLINE_S,
    report: Report = log.warning,
    commands: CommandRunner | None = None,
) -> Path:
    """Returns the path of the shared library, building it first if this is the first use.

    Args:
        cache: directory for built libraries; by default ``$LIGHTNING_ZERO_CACHE`` or ``~/.cache/lightning_zero``.
        compiler: command of a C++20 compiler, with arguments if it has some (``"ccache g++"``); by default ``$CXX`` or
            ``g++``.
        deadline_s: how long to wait, in seconds, while another process builds.
        say: shows the user what takes long.
        commands: run the compiler, and may be stopped by another thread.

    Raises:
        NativeBuildError: no compiler, a compile error, the deadline passed, or a cache that others can write.
        Stopped: ``commands`` were stopped.
    """
    commands = commands or CommandRunner()
    cache = resolve_cache(cache or default_cache())
    sources = source_directory()
    library = cache / _digest(sources) / "lightning_zero.so"
    if _is_cached(library):
        return library
    command = _command(compiler or os.environ.get("CXX") or "")
    version = _version(command)
    make_private_folder(library.parent)
    with lock_entry(library.parent, deadline_s, report, commands.check):
        if not _is_cached(library):
            _compile(command, version, library, report, commands)
    return library


def is_built() -> bool:
    """Whether :func:`build` has nothing to do; or will not do it, and say why."""
    try:
        return _is_cached(resolve_cache(default_cache()) / _digest(source_directory()) / "lightning_zero.so")
    except NativeBuildError:
        return True


def _is_cached(library: Path) -> bool:
    cache = library.parent.parent
    try:
        check_parents(cache)
        for path in (cache, library.parent, library):
            check_owner(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _command(compiler: str) -> list[str]:
    try:
        return shlex.split(compiler) or ["g++"]
    except ValueError as error:
        raise NativeBuildError(
            f"CXX={compiler!r} is no command ({error}). Set it to a C++20 compiler, such as 'g++' or 'ccache g++'."
        ) from error


def _version(command: list[str]) -> str:
    try:
        return subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NativeBuildError(
            f"lightning_zero builds its C++ executor at first use, and the compiler {shlex.join(command)!r} does not "
            f"run ({error}). "
            "Install g++ 10 or newer (Debian, Ubuntu: apt-get install g++; conda: conda install gxx), or set CXX to a "
            "C++20 compiler. nvcc and CUDA headers are not needed. Or build it on a machine that has one, with "
            "LIGHTNING_ZERO_CACHE set to a directory that both can read."
        ) from error


def _abi() -> str:
    return f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"


def _digest(sources: Path) -> str:
    # The C library's version: homes are shared by machines of several ages, and what the newest builds would load on
    # no other.
    machine = (platform.machine(), *platform.libc_ver())
    digest = hashlib.sha256("\0".join((torch.__version__, *machine, _abi(), *FLAGS, BINDING_FLAG)).encode())
    for path in sorted(sources.rglob("*.[ch]*")):
        digest.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _compile(compiler: list[str], version: str, library: Path, report: Report, commands: CommandRunner) -> None:
    start, sources = time.monotonic(), source_directory()
    report("Building lightning_zero's C++ executor (once for this torch version; takes up to a minute).")
    torch_directory = Path(torch.__file__).parent
    include = torch_directory / "include"
    # Sources name each other by their rooms.
    includes = [f"-I{sources}", f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    try:
        temporary = Path(tempfile.mkdtemp(dir=library.parent, prefix="build-"))
    except OSError as error:
        raise unwritable_error(library.parent, error) from error
    try:
        units = _units(sources, temporary)
        objects = [unit.with_suffix(".o") for unit in units]
        lean = [LEAN_HEADERS, f"-I{sources / 'lean'}"]
        flags = [*FLAGS, *(GCC_HEAP_FLAGS if "Free Software Foundation" in version else ())]
        each = [
            [*compiler, *flags, *_optimization_flags(sources), _abi(), *lean, *includes, "-c", str(unit), "-o", str(target)]
            for (unit, sources), target in zip(units.items(), objects, strict=True)
        ]
        commands.all(each, partial(_compile_unit, commands, lean))
        libraries = torch_directory / "lib"
        linked = temporary / library.name
        _run(
            commands,
            [*compiler, MARK, "-shared", *map(str, objects), *loaded_runtime()]
            + [f"-L{libraries}", f"-Wl,-rpath,{libraries}", *LIBRARIES, "-o", str(linked)],
        )
        linked.chmod(0o755)  # whatever the umask: others would be refused a library that more than its owner can write
        (temporary / "built-by").write_text(f"{shlex.join(compiler)}\n{version}")
        os.replace(temporary / "built-by", library.parent / "built-by")
        os.replace(linked, library)
    except OSError as error:  # such as a full disk
        raise unwritable_error(library.parent, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    report("Built lightning_zero's C++ executor in %.0f s (%s).", time.monotonic() - start, library)


def loaded_runtime() -> list[str]:
    """Return the path of the C++ standard library that this process has loaded, as a list; empty if there is none.

    The executor is linked with it by its path. Where a compiler finds only a static one, parts of that would become
    parts of the executor, and two copies in one process crash when either prints a number.
    """
    try:
        paths = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:  # not Linux
        return []
    return sorted(path for path in paths if re.search(r"/libstdc\+\+\.so[.\d]*$", path))[:1]


def _compile_unit(commands: CommandRunner, lean: Sequence[str], command: list[str]) -> None:
    """A torch whose headers need more than the lean ones have is given its own."""
    try:
        _run(commands, command)
    except NativeBuildError as error:
        log.debug("With torch's own headers: %s", error)
        _run(commands, [part for part in command if part not in lean])


def _units(sources: Path, directory: Path) -> dict[Path, list[Path]]:
    """Files that include the sources, with these: most of a source's time goes into torch's headers, so one that needs
    those that take longest is alone, and the others share files, about as much of them each. With fewer cores two files
    are one, of sources that need the same headers: what goes together on any machine has been tried on those of
    tests."""
    paths = sorted(sources.rglob("*.cpp"), key=lambda path: (-path.stat().st_size, path))
    alone = [path for path in paths if path.parent.name == "bindings" or SLOW_HEADERS in path.read_text()]
    alone.sort(key=lambda path: (path.name == "ops.cpp", path.parent.name == "bindings"))
    parts = [[path] for path in alone]
    parts += _split([path for path in paths if path not in alone], max(1, 2 * MAX_UNITS - len(alone)))
    if (os.cpu_count() or 1) < 2 * MAX_UNITS:
        parts = [sum(parts[at : at + 2], []) for at in range(0, len(parts), 2)]
    units = {directory / f"unit{number}.cpp": part for number, part in enumerate(filter(None, parts))}
    for unit, part in units.items():
        unit.write_text("".join(f'#include "{path}"\n' for path in part))
    return units


def _optimization_flags(sources: Sequence[Path]) -> list[str]:
    return [BINDING_FLAG] if all(source.parent.name == "bindings" for source in sources) else []


def _split(paths: Sequence[Path], count: int) -> list[list[Path]]:
    """The largest come first."""
    parts: list[list[Path]] = [[] for _ in range(count)]
    for path in paths:
        min(parts, key=_bytes).append(path)
    return parts


def _bytes(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _run(commands: CommandRunner, command: list[str]) -> None:
    result = commands.run(command)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line.lower()][:20]
        raise NativeBuildError(
            f"Building lightning_zero's C++ executor failed with torch {torch.__version__}:\n"
            + "\n".join(errors or result.stderr.splitlines()[-20:])
            + f"\nA C++20 compiler (g++ 10 or newer) and torch {tested('torch')} are supported. The command was:\n"
            + shlex.join(command)
        )
    made = command[command.index("-o") + 1] if "-o" in command else None
    if made is not None and not Path(made).is_file():
        said = "\n".join((result.stdout + result.stderr).splitlines()[-20:])
        raise NativeBuildError(
            "Building lightning_zero's C++ executor failed: the compiler ended without an error, and made no "
            f"{Path(made).name}. It printed:\n{said or '(nothing)'}\nSet CXX to a C++20 compiler (g++ 10 or newer), "
            f"or unset it. The command was:\n{shlex.join(command)}"
        )
