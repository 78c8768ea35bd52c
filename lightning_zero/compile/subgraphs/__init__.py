"""Compiles once what repeats: a graph is cut where its layers are, and equal pieces are compiled once."""

from lightning_zero.compile.subgraphs.cut import cut, repeats
from lightning_zero.compile.subgraphs.deferred_kernels import Kernels
from lightning_zero.compile.subgraphs.lower import PieceCache, lower
from lightning_zero.compile.subgraphs.strides import DifferentStrides, settle_strides
from lightning_zero.compile.subgraphs.subgraph import Piece

__all__ = ["DifferentStrides", "Kernels", "Piece", "PieceCache", "cut", "lower", "repeats", "settle_strides"]
