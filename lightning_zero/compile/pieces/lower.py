"""Compiles a graph by its pieces, each of which is compiled once, however often it occurs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Generator, SymFloat, SymInt, Tensor
from torch.fx import GraphModule, Node

from lightning_zero.compat.graphs import SEEN_BY_USERS
from lightning_zero.compile.graph import output_node
from lightning_zero.compile.pieces.inductor import Compiled, compile_piece
from lightning_zero.compile.pieces.kernels import Kernels
from lightning_zero.compile.pieces.piece import Piece
from lightning_zero.compile.pieces.program import Program
from lightning_zero.compile.pieces.strides import check_strides

__all__ = ["PieceCache", "lower"]


class PieceCache:
    """Pieces that have been compiled, for other graphs that have the same: those of a plan that is made again, or of an
    evaluation.

    Attributes:
        compiled: how many.
        found: how often a piece had been compiled before.
    """

    def __init__(self) -> None:
        self._known: dict[str, Compiled] = {}
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._count = count()
        self.compiled = self.found = 0

    def number(self, thing: Any) -> int:
        """Of something that no text describes. Not its id: a later graph's would get that of one that is gone, and run
        its piece."""
        if thing not in self._numbers:
            self._numbers[thing] = next(self._count)
        return self._numbers[thing]

    def get(self, key: str, make: Callable[[], Compiled]) -> Compiled:
        if key in self._known:
            self.found += 1
        else:
            self._known[key] = make()
            self.compiled += 1
        return self._known[key]


def lower(
    module: GraphModule, cache: PieceCache, kernels: Kernels, steps: Sequence[Piece | Node], **settings: Any
) -> Program:
    """What a graph that was cut does, as code.

    Args:
        module: the whole graph.
        cache: of pieces.
        kernels: of the pieces, which have to be finished before they run.
        steps: by :func:`~lightning_zero.compile.pieces.cut.cut`.
        settings: for Inductor, as it gives them to what compiles a graph.

    Raises:
        DifferentStrides: pieces would not go together.
    """
    settings = {**settings, "static_input_idxs": ()}
    with kernels.not_waited_for():
        compiled = [_compiled(module, step, cache, settings, kernels) for step in steps if isinstance(step, Piece)]
    return Program(module, steps, compiled)


def _compiled(
    module: GraphModule, piece: Piece, cache: PieceCache, settings: dict[str, Any], kernels: Kernels
) -> Compiled:
    def make() -> Compiled:
        # What a piece returns is read by others, who were told its strides.
        output_node(piece.graph).meta[SEEN_BY_USERS] = list(range(len(piece.outputs)))
        inputs = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
        compiled = compile_piece(GraphModule(module, piece.graph), inputs, settings)
        kernels.belong_to(compiled)
        check_strides(compiled, [node.meta.get("val") for node in piece.outputs])
        return compiled

    return cache.get(_fingerprint(module, piece, settings, cache.number), make)


def _fingerprint(module: GraphModule, piece: Piece, settings: dict[str, Any], number_of: Callable[[Any], int]) -> str:
    """Equal for pieces that do the same with the same layouts, whatever their nodes are called."""
    lines = [str(sorted((key, settings.get(key)) for key in ("is_backward", "is_inference")))]
    lines += [_value(node.meta.get("val"), number_of) for node in piece.inputs]
    names = {node: _Named(f"%{number}") for number, node in enumerate([*piece.inputs, *piece.steps])}
    for node in piece.steps:
        arguments = torch.fx.map_arg((node.args, node.kwargs), names.__getitem__)
        target = node.target if node.op != "get_attr" else number_of(attrgetter(str(node.target))(module))
        lines.append(f"{node.op} {target} {arguments} {_value(node.meta.get('val'), number_of)}")
    lines.append(str([names[node] for node in piece.outputs]))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Named(str):
    __repr__ = str.__str__


def _value(value: Any, number_of: Callable[[Any], int]) -> str:
    if isinstance(value, Tensor):
        offset: Any = value.storage_offset()
        begins = offset * value.dtype.itemsize % 16 if isinstance(offset, int) else offset
        symbols = _symbolic(value.shape, number_of)
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}{begins}{symbols}"
    if isinstance(value, Generator):
        return f"generator on {value.device}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(part, number_of) for part in value) + "]"
    return f"{value}{_symbolic([value], number_of)}"


def _symbolic(sizes: Sequence[Any], number_of: Callable[[Any], int]) -> str:
    """Symbols of the same name in graphs traced at different times are others."""
    known = {number_of(size.node.shape_env) for size in sizes if isinstance(size, SymInt | SymFloat)}  # type: ignore[union-attr]
    return str(sorted(known)) if known else ""
