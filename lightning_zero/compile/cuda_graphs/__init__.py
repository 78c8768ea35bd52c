"""Replays what a compiled graph does, forward and backward, as two CUDA graphs."""

from lightning_zero.compile.cuda_graphs.policy import CUDAGraphManager

__all__ = ["CUDAGraphManager"]
