"""Inductor, asked for a piece of a graph: it takes each for a whole one unless it is told otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch.fx import GraphModule

from lightning_zero.compat.compiler import (
    CompiledFxGraph,
    CompiledFxGraphConstants,
    FxGraphCache,
    TracingContext,
    compile_fx_inner,
    functorch_config,
    inductor_config,
)

__all__ = ["compile_subgraph", "subgraph_context", "pack_subgraph", "report_strides", "unpack_subgraph"]

Compiled = Callable[[list[Any]], Any]


def compile_subgraph(module: GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> Compiled:
    """What a piece does, as code: takes its inputs in a list, which it empties, and returns its outputs.

    Args:
        module: the piece.
        inputs: fake tensors, and symbols.
        settings: for Inductor, as it gives them to what compiles a graph.
    """
    # Pieces are also kept one by one, for another plan of the same layers.
    with subgraph_context(), functorch_config.patch(bundled_autograd_cache=False):
        return compile_fx_inner(module, inputs, **settings)


@contextmanager
def subgraph_context() -> Iterator[None]:
    """Inductor knows nothing of the whole graph: not the strides of its results, which are told once; not the passes
    over it; and not which of its inputs a backward may overwrite, by their numbers: a piece's are others."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    strides = None if context is None else context.output_strides
    donated = None if metadata is None else metadata.bw_donated_idxs
    if context is not None:
        context.output_strides = None
    if metadata is not None:
        metadata.bw_donated_idxs = None
    try:
        passes = ("joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_post_pass")
        with inductor_config.patch(dict.fromkeys(passes)):
            yield
    finally:
        if context is not None:
            context.output_strides = strides
        if metadata is not None:
            metadata.bw_donated_idxs = donated


def report_strides(strides: Sequence[Any]) -> None:
    """Of the whole graph's results, to whoever compiles it; None for those that are as they were traced."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        assert not context.output_strides
        context.output_strides.extend(strides)


def pack_subgraph(subgraph: Any) -> Any:
    """A piece in a form that can be pickled."""
    if isinstance(subgraph, CompiledFxGraph):
        subgraph = copy(subgraph)
        subgraph.prepare_for_serialization()
    return subgraph


def unpack_subgraph(subgraph: Any, settings: Any) -> Compiled:
    """What :func:`pack_subgraph` packed, as code again. ``settings``: as for :func:`compile_subgraph`."""
    if isinstance(subgraph, CompiledFxGraph):
        constants = CompiledFxGraphConstants()
        found, _ = FxGraphCache.cache_hit_post_compile(subgraph, {}, constants)
        if found is None:
            raise RuntimeError("A compiled piece of a graph could not be loaded again. Empty the compiler's cache.")
        with subgraph_context():
            found.post_compile((), constants, settings)
        return found
    return subgraph
