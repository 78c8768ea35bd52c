"""Compile CUDA code at run time with NVRTC, which torch ships. No toolkit is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["compile_cuda"]


def compile_cuda(source: Path, capability: tuple[int, int], options: Sequence[str] = ()) -> Tensor:
    """Return the CUBIN for a device of this compute capability, as bytes on the CPU. Needs no device.

    Raises:
        RuntimeError: There is no NVRTC, or it rejects the source; the message holds its log.
    """
    nvrtc = _library()
    architecture = "--gpu-architecture=sm_{}{}".format(*capability)
    beside = f"--include-path={source.parent}"
    flags = [option.encode() for option in (architecture, "--std=c++17", beside, *options)]
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
    places = (Path(torch.__file__).parent.parent / "nvidia").glob(f"*/lib/{name}")
    for path in (name, *map(str, places)):
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
