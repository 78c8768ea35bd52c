"""How calls and results travel between pytest and the ranks."""

import importlib
import io
from collections.abc import Callable
from typing import Any

import torch


def dumps(value: Any) -> bytes:
    """torch.save rather than pickle: it keeps strides and storages shared between tensors."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Everything lands on the CPU, since pytest's own process should never hold a CUDA context."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def reference(fn: Callable[..., Any]) -> tuple[str, str]:
    """Name `fn` so that another process can import it."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        raise TypeError(f"ranks can only run functions importable by name, not {fn!r}")
    if resolve((module, name)) is not fn:
        raise TypeError(f"{module}:{name} names something other than {fn!r}")
    return module, name


def resolve(ref: tuple[str, str]) -> Any:
    found: Any = importlib.import_module(ref[0])
    for part in ref[1].split("."):
        found = getattr(found, part)
    return found
