"""All touch points with torch.compile: its public hooks, and nothing else.

Inductor: two custom passes given as options, one on the joint graph and one on each graph after partitioning.
aot_eager: the same functions through ``aot_autograd(partition_fn=...)``; no code is generated, so it is fast to compile
    and exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from lightning_zero.compile.edits import refuse_edits
from lightning_zero.compile.graph import output_node
from lightning_zero.compile.passes import PassSpec, default_passes, run_passes
from lightning_zero.compile.tagging import tag_gathers
from lightning_zero.config import CompileConfig

__all__ = ["GraphObserver", "compile_arguments"]

GraphObserver = Callable[[str, Graph], None]  # (what: "joint", "before" or "after" passes, graph)


def compile_arguments(
    config: CompileConfig,
    world_size: int,
    passes: Sequence[PassSpec] | None = None,
    observe: GraphObserver | None = None,
) -> dict[str, Any]:
    """Keyword arguments for ``torch.compile``. ``observe`` sees every graph; a test or a report may keep what it
    sees."""
    arguments: dict[str, Any] = {"fullgraph": False, "dynamic": config.dynamic}
    chosen = default_passes(config, world_size) if passes is None else passes
    rewrite = _observed(lambda graph: run_passes(graph, chosen), observe)
    tag = _observed(tag_gathers, observe, joint=True)
    if config.backend == "aot_eager":
        return arguments | {"backend": _aot_eager(tag, rewrite)}
    key = _source_digest([spec.name for spec in chosen], config, world_size)
    # Observers must see every graph, so they keep graphs out of the cache.
    uuid = None if observe is not None else key
    return arguments | {
        "backend": "inductor",
        "options": {
            "pre_grad_custom_pass": _Check(key),
            "joint_custom_pre_pass": _Pass(tag, uuid),
            "post_grad_custom_post_pass": _Pass(rewrite, uuid),
            # Inductor's reordering would sink every gather that was started early back to its use.
            "reorder_for_peak_memory": False,
        },
    }


def _observed(
    function: Callable[[Graph], Graph], observe: GraphObserver | None, joint: bool = False
) -> Callable[[Graph], Graph]:
    def run(graph: Graph) -> Graph:
        if observe is not None:
            observe("joint" if joint else "before", graph)
        graph = function(graph)
        if observe is not None and not joint:
            observe("after", graph)
        return graph

    return run


class _Pass(CustomGraphPass):
    """A pass in Inductor's form. The uuid lets Inductor's cache recognise it in another process."""

    def __init__(self, function: Callable[[Graph], Graph], uuid: str | None) -> None:
        self._function = function
        self._uuid = uuid

    def __call__(self, graph: Graph) -> None:
        self._function(graph)
        # Inductor noted before our passes which outputs users see; torch 2.11 stumbles over one that has become None.
        output = output_node(graph)
        seen = output.meta.get("user_visible_output_idxs")
        if seen is not None and isinstance(output.args[0], tuple | list):
            output.meta["user_visible_output_idxs"] = [i for i in seen if output.args[0][i] is not None]

    def uuid(self) -> str | None:
        return self._uuid


class _Check(CustomGraphPass):
    """Looks at Dynamo's graph before it is differentiated. Changes nothing, so a cached graph has passed it."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    def __call__(self, graph: Graph) -> None:
        refuse_edits(graph)

    def uuid(self) -> str:
        return self._uuid


def _source_digest(names: Sequence[str], config: CompileConfig, world_size: int) -> str:
    digest = hashlib.sha256(repr((list(names), config, world_size)).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _aot_eager(tag: Callable[[Graph], Graph], rewrite: Callable[[Graph], Graph]) -> Any:
    def partition(module: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        tag(module.graph)
        return min_cut_rematerialization_partition(module, inputs, **kwargs)

    def compiler(module: GraphModule, inputs: Any) -> Any:
        rewrite(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    compile_graph = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler, partition_fn=partition
    )

    def check_and_compile(module: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        refuse_edits(module.graph)
        return compile_graph(module, inputs, **kwargs)

    return check_and_compile
