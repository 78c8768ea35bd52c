"""Subgraphs: cut graphs into repeated parts, and compile each distinct part once."""

from lightning_zero.compile.async_compile import DeferredKernels
from lightning_zero.compile.subgraphs.compile_subgraphs import (
    StrideMismatch,
    SubgraphCache,
    fix_strides,
    lower_subgraphs,
)
from lightning_zero.compile.subgraphs.cut import cut, is_worth_cutting
from lightning_zero.compile.subgraphs.subgraph import Subgraph

__all__ = [
    "StrideMismatch",
    "DeferredKernels",
    "Subgraph",
    "SubgraphCache",
    "cut",
    "lower_subgraphs",
    "is_worth_cutting",
    "fix_strides",
]
