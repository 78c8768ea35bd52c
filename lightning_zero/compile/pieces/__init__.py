"""Compiles once what repeats: a graph is cut where its layers are, and equal pieces are compiled once."""

from lightning_zero.compile.pieces.cut import cut, repeats
from lightning_zero.compile.pieces.kernels import Kernels
from lightning_zero.compile.pieces.lower import PieceCache, lower
from lightning_zero.compile.pieces.piece import Piece
from lightning_zero.compile.pieces.strides import DifferentStrides, settle_strides

__all__ = ["DifferentStrides", "Kernels", "Piece", "PieceCache", "cut", "lower", "repeats", "settle_strides"]
