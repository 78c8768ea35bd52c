"""What is on this machine besides the hardware: compiler, executor, caches, variables. Only looks."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from lightning_zero.cli.doctor.machine import asked
from lightning_zero.compat.compiler import default_inductor_cache
from lightning_zero.compat.patches import PATCHES, required_but_absent
from lightning_zero.compat.versions import tested
from lightning_zero.compile.active import left_out
from lightning_zero.errors import NativeBuildError
from lightning_zero.native.build import is_built
from lightning_zero.native.cache import default_cache

__all__ = ["caches", "compilation", "executor", "variables"]

# Which decide how ranks find each other, and how what they send travels.
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_SYMMMEM")
NAMES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def executor() -> dict[str, Any]:
    """Whether the C++ executor is there, and what would build it."""
    compiler = os.environ.get("CXX") or "g++"
    try:
        words = asked(*shlex.split(compiler), "--version").splitlines()
    except ValueError:  # no command
        words = []
    return {"built": is_built(), "compiler": compiler, "compiler_version": words[0] if words else None}


def caches() -> dict[str, dict[str, Any]]:
    """Ours, Inductor's and Triton's: where, and whether this process may write there."""
    try:
        own = _folder(default_cache())
    except NativeBuildError as error:
        own = {"path": None, "writable": False, "error": str(error)}
    inductor = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_inductor_cache())
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or inductor / "triton")
    return {"executor": own, "inductor": _folder(inductor), "triton": _folder(triton)}


def compilation() -> dict[str, Any]:
    """Return which optimizations of compilation fit the installed torch."""
    left = left_out()
    return {
        "tested_with_torch": tested("torch"),
        "optimizations_in_use": len(PATCHES) - len(left),
        "left_out": left,
        "missing": required_but_absent(),
    }


def _folder(path: Path) -> dict[str, Any]:
    path = path.absolute()
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    able = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return {"path": str(path), "writable": able}


def variables() -> dict[str, str]:
    """Those of the environment that matter for communication."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES) or name in NAMES}
