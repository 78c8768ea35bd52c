"""Build the C++ executor with g++ into a cache, once per torch version, source and kind of machine.

If the library exists, :func:`build` returns it and needs no compiler. Otherwise it locks the cache entry, compiles into
a temporary directory and renames the result, so that no process loads a partial file. The sources need neither nvcc nor
CUDA headers: they use c10's device-independent interfaces. The compiler is not part of the entry's name, so a machine
without one can use a library that was built elsewhere; ``built-by`` in the entry names it. A wheel may carry a library
(:mod:`lightning_zero.native.prebuilt`), which is used before the cache.

torch.utils.cpp_extension.load is not used: it needs ninja, a killed build leaves a stale lock on which other ranks wait
forever, and it loads libraries from folders that other users may write.

:func:`compile_cuda` compiles CUDA kernels at run time with NVRTC, which torch ships.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from lightning_zero.native.prebuilt import ExecutorKey, find_prebuilt

log = logging.getLogger(__name__)

FLAGS = ("-std=c++20", "-O2", "-fPIC", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-Wno-deprecated-declarations")
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch")
LOCK_DEADLINE_S = 900.0
MAX_UNITS = 8
# headers of process groups, autograd and ops, which take three times as long as those of tensors
SLOW_HEADERS = "#include <torch/"
BINDING_FLAG = "-O1"  # bindings do no work at run time, and are the last to finish at -O2
# Saves a tenth of g++'s time, which it spends on garbage collection; takes 0.8 GB per process instead of 0.7.
GCC_HEAP_FLAGS = ("--param", "ggc-min-heapsize=1500000")
LEAN_HEADERS = "-DAT_PER_OPERATOR_HEADERS"  # for the sources' folder "lean", whose headers replace torch's

Report = Callable[..., Any]  # as a logger's methods: format and arguments


def source_directory() -> Path:
    """Return the directory of the C++ sources: in the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "ops.cpp").is_file():
            return candidate
    raise NativeBuildError(
        f"The C++ sources of lightning_zero are neither in {package / 'csrc'} nor in {package.parent / 'csrc'}. "
        "The installation is incomplete: install the package again."
    )


def kernel_source(name: str) -> Path:
    """Return the source file of this name, such as ``"kernels.cu"``, in any folder of the sources.

    Raises:
        NativeBuildError: There is no such file, or there are no sources.
    """
    found = list(source_directory().rglob(name))
    if len(found) != 1:
        raise NativeBuildError(
            f"{len(found)} files in {source_directory()} are called {name}, not one. The installation lacks some, or "
            "has files of an older version: remove the package and install it again."
        )
    return found[0]


def build(
    cache: Path | None = None,
    compiler: str | None = None,
    deadline_s: float = LOCK_DEADLINE_S,
    report: Report = log.warning,
) -> Path:
    """Return the path of the shared library; build it first if it does not exist.

    Args:
        cache: Directory of built libraries; by default ``$LIGHTNING_ZERO_CACHE`` or ``~/.cache/lightning_zero``. With
            the default, the executor of a wheel is used if it fits.
        compiler: C++20 compiler command, with arguments if any (``"ccache g++"``); by default ``$CXX`` or ``g++``.
        deadline_s: How long to wait while another process builds, in seconds.
        report: Called with a format and arguments when the build begins, waits or ends.

    Raises:
        NativeBuildError: No compiler, a compile error, the deadline passed, or a cache that others can write.
    """
    sources = source_directory()
    prebuilt = find_prebuilt(partial(executor_key, sources)) if cache is None else None
    if prebuilt is not None and not prebuilt.mismatch:
        return prebuilt.library
    cache = resolve_cache(cache or default_cache())
    library = cache / _digest(sources) / "lightning_zero.so"
    if _is_cached(library):
        return library
    if prebuilt is not None:
        report("The wheel's C++ executor is not used: %s.", prebuilt.mismatch)
    command = _command(compiler or os.environ.get("CXX") or "")
    version = _version(command)
    make_private_folder(library.parent)
    with lock_entry(library.parent, deadline_s, report):
        if not _is_cached(library):
            _compile(command, version, library, report)
    return library


def is_built() -> bool:
    """Return True if :func:`build` has nothing to do, or would raise without building."""
    try:
        sources = source_directory()
        prebuilt = find_prebuilt(partial(executor_key, sources))
        if prebuilt is not None and not prebuilt.mismatch:
            return True
        return _is_cached(resolve_cache(default_cache()) / _digest(sources) / "lightning_zero.so")
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
            "C++20 compiler. nvcc and CUDA headers are not needed. Or build it on a machine that has one: with "
            "LIGHTNING_ZERO_CACHE set to a directory that both can read, or as a wheel with `python -m lightning_zero "
            "build --wheel`."
        ) from error


def _abi() -> str:
    return f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"


def executor_key(sources: Path) -> ExecutorKey:
    """Return the key of an executor that is built here from ``sources``."""
    return ExecutorKey.here(torch.__version__, torch.compiled_with_cxx11_abi(), _hash(sources, ()))


def _digest(sources: Path) -> str:
    # The C library's version is included because machines of several ages may share a home: a library built on the
    # newest does not load on the others.
    return _hash(sources, (torch.__version__, platform.machine(), *platform.libc_ver()))


def _hash(sources: Path, machine: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join((*machine, _abi(), *FLAGS, BINDING_FLAG)).encode())
    for path in sorted(sources.rglob("*.[ch]*")):
        digest.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _compile(compiler: list[str], version: str, library: Path, report: Report) -> None:
    start, sources = time.monotonic(), source_directory()
    report(
        "C++ executor: building, once for this torch version. `python -m lightning_zero build` does it ahead of time."
    )
    torch_directory = Path(torch.__file__).parent
    include = torch_directory / "include"
    # Sources include each other by folder.
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
            [
                *compiler,
                *flags,
                *_optimization_flags(sources),
                _abi(),
                *lean,
                *includes,
                "-c",
                str(unit),
                "-o",
                str(target),
            ]
            for (unit, sources), target in zip(units.items(), objects, strict=True)
        ]
        compilers = _Compilers()
        compilers.run_all(each, partial(_compile_unit, compilers, lean))
        libraries = torch_directory / "lib"
        linked = temporary / library.name
        _run(
            compilers,
            [*compiler, "-shared", *map(str, objects), *loaded_runtime()]
            + [f"-L{libraries}", f"-Wl,-rpath,{libraries}", *LIBRARIES, "-o", str(linked)],
        )
        linked.chmod(0o755)  # for any umask: check_owner rejects a library that others can write
        (temporary / "built-by").write_text(f"{shlex.join(compiler)}\n{version}")
        os.replace(temporary / "built-by", library.parent / "built-by")
        os.replace(linked, library)
    except OSError as error:  # such as a full disk
        raise unwritable_error(library.parent, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    report("C++ executor: built (seconds=%.0f, path=%s)", time.monotonic() - start, library)


def loaded_runtime() -> list[str]:
    """Return the path of the loaded C++ standard library, as a list; empty if there is none.

    The executor is linked with this path. If a compiler finds only a static library, parts of it would be copied into
    the executor, and two copies in one process crash when either prints a number.
    """
    try:
        paths = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:  # not Linux
        return []
    return sorted(path for path in paths if re.search(r"/libstdc\+\+\.so[.\d]*$", path))[:1]


class _Compilers:
    """Runs the compilers of one build, and kills them on demand."""

    current: _Compilers | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()  # process groups that are running
        self._killed = False
        _Compilers.current = self

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        pipe = subprocess.PIPE
        with self._lock:
            if self._killed:
                raise NativeBuildError("The build of lightning_zero's C++ executor was stopped.")
            # A process group of its own: kill() then also ends the processes that the compiler starts.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                text=True,
                errors="replace",
                process_group=0,
            )
            self._groups.add(process.pid)
        try:
            out, err = process.communicate()
        finally:
            with self._lock:
                self._groups.discard(process.pid)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def run_all(self, commands: Iterable[list[str]], run: Callable[[list[str]], None]) -> None:
        """Call ``run`` with each command, one per core at a time. Kill the others after the first error."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            futures = [pool.submit(run, command) for command in commands]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:  # also Ctrl-C, which does not reach other process groups
                pool.shutdown(wait=False, cancel_futures=True)
                self.kill()
                raise

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            for group in self._groups:
                with suppress(OSError):
                    os.killpg(group, signal.SIGKILL)


def kill_compilers() -> None:
    """Kill the compilers that this process has started.

    Call it before ``os._exit``, which would leave them running.
    """
    if _Compilers.current is not None:
        _Compilers.current.kill()


def _compile_unit(compilers: _Compilers, lean: Sequence[str], command: list[str]) -> None:
    """Compile one unit; use torch's own headers if the lean ones lack a declaration."""
    try:
        _run(compilers, command)
    except NativeBuildError as error:
        log.debug("C++ executor: a unit needs torch's own headers (reason=%s)", error)
        _run(compilers, [flag for flag in command if flag not in lean])


def _units(sources: Path, directory: Path) -> dict[Path, list[Path]]:
    """Write files that include the sources; return the sources of each file.

    torch's headers take most of the compile time. So a source with the slow headers has a file of its own, and the
    others share files of equal size. With fewer cores, two files are joined. ``ops.cpp`` and the bindings are last in
    this order.
    """
    paths = sorted(sources.rglob("*.cpp"), key=lambda path: (-path.stat().st_size, path))
    separate = [path for path in paths if path.parent.name == "bindings" or SLOW_HEADERS in path.read_text()]
    separate.sort(key=lambda path: (path.name == "ops.cpp", path.parent.name == "bindings"))
    groups = [[path] for path in separate]
    groups += _split([path for path in paths if path not in separate], max(1, 2 * MAX_UNITS - len(separate)))
    if (os.cpu_count() or 1) < 2 * MAX_UNITS:
        groups = [sum(groups[at : at + 2], []) for at in range(0, len(groups), 2)]
    units = {directory / f"unit{number}.cpp": group for number, group in enumerate(filter(None, groups))}
    for unit, group in units.items():
        unit.write_text("".join(f'#include "{path}"\n' for path in group))
    return units


def _optimization_flags(sources: Sequence[Path]) -> list[str]:
    return [BINDING_FLAG] if all(source.parent.name == "bindings" for source in sources) else []


def _split(paths: Sequence[Path], count: int) -> list[list[Path]]:
    """Distribute the paths, largest first, over ``count`` lists of equal size."""
    groups: list[list[Path]] = [[] for _ in range(count)]
    for path in paths:
        min(groups, key=_bytes).append(path)
    return groups


def _bytes(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _run(compilers: _Compilers, command: list[str]) -> None:
    result = compilers.run(command)
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
        output = "\n".join((result.stdout + result.stderr).splitlines()[-20:])
        raise NativeBuildError(
            "Building lightning_zero's C++ executor failed: the compiler ended without an error, and made no "
            f"{Path(made).name}. It printed:\n{output or '(nothing)'}\nSet CXX to a C++20 compiler (g++ 10 or newer), "
            f"or unset it. The command was:\n{shlex.join(command)}"
        )


def compile_cuda(source: Path, capability: tuple[int, int], options: Sequence[str] = ()) -> Tensor:
    """Return the CUBIN for a device of this compute capability, as bytes on the CPU. Needs no device.

    Raises:
        RuntimeError: There is no NVRTC, or it rejects the source; the message holds its log.
    """
    nvrtc = _library()
    architecture = "--gpu-architecture=sm_{}{}".format(*capability)
    include_path = f"--include-path={source.parent}"
    flags = [option.encode() for option in (architecture, "--std=c++17", include_path, *options)]
    program = ctypes.c_void_p()
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    _check(nvrtc, made)
    try:
        if nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags)) != 0:
            log = _read(nvrtc, program, "ProgramLog")
            raise RuntimeError(f"NVRTC cannot compile {source}:\n{bytes(log.tolist()).decode(errors='replace')}")
        return _read(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _library() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise RuntimeError("torch was built without CUDA and ships no NVRTC")
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    # Wheels put it next to torch, where the loader may not look.
    candidates = (Path(torch.__file__).parent.parent / "nvidia").glob(f"*/lib/{name}")
    for path in (name, *map(str, candidates)):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise RuntimeError(f"{name} of NVRTC is neither in the loader's path nor next to torch")


def _check(nvrtc: ctypes.CDLL, result: int) -> None:
    if result != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result).decode()}")


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> Tensor:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    out = torch.empty(size.value, dtype=torch.uint8)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, ctypes.c_void_p(out.data_ptr())))
    return out
