"""Triton's names for the package's kernels, None without Triton. Imports Triton."""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for CPUs come without Triton
    triton = tl = None

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # old versions have no descriptors
    TensorDescriptor = None

__all__ = ["TensorDescriptor", "jit", "tl", "triton"]


def jit(kernel: Any) -> Any:
    """Return the kernel for Triton; the function unchanged without Triton."""
    return kernel if triton is None else triton.jit(kernel)
