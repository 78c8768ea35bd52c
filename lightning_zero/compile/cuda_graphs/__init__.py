"""CUDA graphs of compiled forwards and backwards."""

from lightning_zero.compile.cuda_graphs.manager import CUDAGraphManager

__all__ = ["CUDAGraphManager"]
