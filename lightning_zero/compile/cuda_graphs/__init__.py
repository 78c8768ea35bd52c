"""Replays what a compiled graph does, forward and backward, as two CUDA graphs."""

from lightning_zero.compile.cuda_graphs.manager import CUDAGraphManager

__all__ = ["CUDAGraphManager"]
