"""Our backend for torch.compile.

Inductor: two custom passes given as options, one on the joint graph and one on each graph after partitioning.
aot_eager: the same functions through ``aot_autograd(partition_fn=...)``; no code is generated, so it is fast to compile
    and exact.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from lightning_zero.compat.compiler import (
    BoxedCodeGen,
    CustomGraphPass,
    aot_autograd,
    functorch_config,
    lookup_backend,
    min_cut_partition,
)
from lightning_zero.compat.graphs import SEEN_BY_USERS
from lightning_zero.compile.discover import CallNotes
from lightning_zero.compile.frontend import has_collectives, last_read, name_weights, refuse_edits
from lightning_zero.compile.graph import output_node
from lightning_zero.compile.passes import MINIMAL_PASSES, PassSpec, default_passes, keeping, run_passes
from lightning_zero.compile.plan import GraphPlan
from lightning_zero.compile.tagging import tag_activations, tag_gathers
from lightning_zero.config import CompileConfig
from lightning_zero.profiling.estimate import NOMINAL, Costs
from lightning_zero.sharding.refusals import plainly

__all__ = ["Compiler", "Events", "GraphObserver"]

GraphObserver = Callable[[str, Graph], None]  # (what: "joint", "before" or "after" passes, graph)


class Events(Protocol):
    """Who is told what the compiler does."""

    def graph(self, what: str, graph: Graph) -> None:
        """A graph, "joint" or "before" or "after" the passes; valid during the call only."""

    def compiling(self, what: str, busy: bool, seconds: float) -> None:
        """A graph, described in words, begins to be compiled (``busy``), or has been, in so many seconds."""

    @property
    def wants_graphs(self) -> bool:
        """Whether every graph must be seen, even one that could come out of a cache."""


class Compiler:
    """Makes the arguments of ``torch.compile`` for one engine's modules.

    Args:
        costs: estimates by which passes place transfers; the same on every rank.
        wrap: gives what is called instead of a compiled graph.

    Attributes:
        registered: users' passes, by name.
        chosen: names of the passes that graphs go through; None for the default ones.
        last_weight: the shard that a step's forward reads last: backward follows on the graph that ends with it.
        notes: on the calls that are compiled.
        share: of the weights that a graph gathers twice, how much it keeps for backward besides a budget in bytes.
    """

    def __init__(
        self,
        config: CompileConfig,
        world_size: int,
        events: Events,
        costs: Costs = NOMINAL,
        hold: bool = False,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self._wrap = wrap or (lambda compiled: compiled)
        self._config = config
        self._world_size = world_size
        self._events = events
        self._costs = costs
        self._hold = hold
        self._agreed: dict[tuple[tuple[str, ...] | None, float], list[GraphPlan]] = {}
        self.registered: dict[str, PassSpec] = {}  # users' own
        self.chosen: tuple[str, ...] | None = None
        self.last_weight: Tensor | None = None
        self.notes = CallNotes()
        self.share = 0.0

    @property
    def agreed(self) -> list[GraphPlan]:
        """Plans of the graphs that have run with the chosen passes and what is kept now, the same on every rank; later
        graphs follow them."""
        return self._agreed.setdefault((self.chosen, self.share), [])

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``torch.compile``; with others for each module, alike ones would not share graphs."""
        return {"fullgraph": False, "dynamic": self._config.dynamic, "backend": self._backend()}

    def passes(self) -> Sequence[PassSpec]:
        """The passes that the next graph goes through: the chosen ones, or the default ones."""
        if self.chosen is None:
            return self._default()
        known = self.known()
        return [known[name] for name in self.chosen]

    def known(self) -> dict[str, PassSpec]:
        """All passes that can be chosen, by name."""
        return {spec.name: spec for spec in (*MINIMAL_PASSES, *self._default())} | self.registered

    def _default(self) -> tuple[PassSpec, ...]:
        return default_passes(self._config, self._world_size, self.agreed, self._costs, self._hold)

    def _backend(self) -> Callable[..., Any]:
        inner = self._aot_eager if self._config.backend == "aot_eager" else self._inductor

        def compile_graph(module: GraphModule, inputs: Any, **kwargs: Any) -> Any:
            names = name_weights(module.graph)
            refuse_edits(module.graph)
            communicates = has_collectives(module)
            last = self.last_weight is not None and last_read(module.graph, inputs) is self.last_weight
            begun = time.monotonic()
            what = self._describe(names)
            self._events.compiling(what, True, 0.0)
            try:
                settings: dict[str, Any] = {"activation_memory_budget": self._config.activation_memory_budget}
                if self.notes.keeps_graphs:
                    settings["donated_buffer"] = False
                with functorch_config.patch(settings):
                    compiled = inner(last, module, inputs, **kwargs)
            finally:
                self._events.compiling(what, False, time.monotonic() - begun)
            return _plain(compiled if communicates else self._wrap(compiled))

        compile_graph.__name__ = "lightning_zero"  # what error messages call it
        return compile_graph

    def _describe(self, weights: Sequence[str]) -> str:
        purpose = "training" if torch.is_grad_enabled() else "evaluation"
        read = "no weights"
        if weights:
            read = (
                f"{len(weights)} weights, {weights[0]!r} to {weights[-1]!r}" if weights[1:] else f"{weights[0]!r} only"
            )
        return f"{self.notes.called or 'a module'} for {purpose} (a graph of {read})"

    def _tag(self, last: bool, graph: Graph) -> Graph:
        """``last``: backward follows right after this graph's forward."""
        self._events.graph("joint", graph)
        config = self._config
        graph = tag_gathers(graph, *keeping(config, last, self.share))
        return graph if config.recompute is None else tag_activations(graph, config.recompute)

    def _rewrite(self, graph: Graph) -> Graph:
        self._events.graph("before", graph)
        graph = run_passes(graph, self.passes())
        self._events.graph("after", graph)
        return graph

    def _inductor(self, last: bool, module: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        # Observers must see every graph, so they keep graphs out of the cache.
        unversioned = any(spec.name in self.registered and spec.version is None for spec in self.passes())
        uncached = self._events.wants_graphs or unversioned or self._config.recompute is not None
        uuid = None if uncached else self._digest()
        options = {
            "joint_custom_pre_pass": _Pass(partial(self._tag, last), uuid and f"{uuid} {last}"),
            "post_grad_custom_post_pass": _Pass(self._rewrite, uuid),
            # Inductor's reordering would sink every gather that was started early back to its use.
            "reorder_for_peak_memory": False,
        }
        compile_fx: Any = lookup_backend("inductor")
        return compile_fx(module, inputs, config_patches=options, **kwargs)

    def _digest(self) -> str:
        """What decides how a graph is rewritten. Not what was measured: it differs from run to run, and a graph that an
        earlier run placed is as right as any."""
        names = [(spec.name, spec.version) for spec in self.passes()]
        agreed = [plan.collectives() for plan in self.agreed]
        digest = hashlib.sha256(repr((names, self._config, self.share, self._world_size, agreed)).encode())
        for path in sorted(Path(__file__).parent.rglob("*.py")):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def _aot_eager(self, last: bool, module: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        def partition(module: GraphModule, inputs: Any, **kwargs: Any) -> Any:
            self._tag(last, module.graph)
            return min_cut_partition(module, inputs, **kwargs)

        def compiler(module: GraphModule, inputs: Any) -> Any:
            self._rewrite(module.graph)
            return _boxed(module)

        compile_fx = aot_autograd(
            fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler, partition_fn=partition
        )
        return compile_fx(module, inputs, **kwargs)


def _plain(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Graphs read shards by our own ops alone; what users may do to these need not be asked at each of them."""

    def run(*args: Any) -> Any:
        with plainly():
            return compiled(*args)

    return run


def _boxed(module: GraphModule) -> Callable[[list[Any]], Any]:
    """Runs the graph on a list of inputs, which it empties: what a forward saved is freed after its last use, and not
    at the end of the backward."""
    module.graph.set_codegen(BoxedCodeGen())
    module.recompile()

    def run(inputs: list[Any]) -> Any:
        return module.forward(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
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
        seen = output.meta.get(SEEN_BY_USERS)
        if seen is not None and isinstance(output.args[0], tuple | list):
            output.meta[SEEN_BY_USERS] = [i for i in seen if output.args[0][i] is not None]

    def uuid(self) -> str | None:
        return self._uuid
