"""Compiles once what repeats: a graph is cut where its layers are, and equal pieces are compiled once."""

from lightning_zero.compile.pieces.cut import cut, repeats
from lightning_zero.compile.pieces.lower import PieceCache, lower
from lightning_zero.compile.pieces.piece import Piece

__all__ = ["Piece", "PieceCache", "cut", "lower", "repeats"]
