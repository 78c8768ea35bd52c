"""A backend of ``torch.compile``: what Dynamo captured goes to Inductor or to aot_eager, by way of our passes.

Inductor: two custom passes given as options, one on the joint graph and one on each graph after partitioning.
aot_eager: the same functions through ``aot_autograd(partition_fn=...)``; no code is generated, so it is fast to compile
    and exact.

The other places that deal with torch.compile are ``discover.py``, which calls it, and ``frontend.py``, which reads
Dynamo's graphs.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from lightning_zero.budget.curve import Point
from lightning_zero.compat.compiler import (
    BoxedCodeGen,
    CustomGraphPass,
    CustomPartitionerFn,
    aot_autograd,
    compile_fx_inner,
    functorch_config,
    inductor_config,
    lookup_backend,
)
from lightning_zero.compat.graphs import USER_VISIBLE_OUTPUTS
from lightning_zero.compile.active import OPTIMIZATION_COUNTS
from lightning_zero.compile.budget_sweep import chart
from lightning_zero.compile.causal_mask import drop_causal_masks
from lightning_zero.compile.compile_timer import CompileTimer
from lightning_zero.compile.context import PassContext
from lightning_zero.compile.discover import CallInfo
from lightning_zero.compile.fast_compile import speed_up_lowering
from lightning_zero.compile.foreach_checks import check_foreach_on_shards
from lightning_zero.compile.frontend import check_weight_edits, has_collectives, last_read, tag_weight_names
from lightning_zero.compile.graph import output_node
from lightning_zero.compile.joint import JointPasses
from lightning_zero.compile.layer_dedup import DedupFailed, LayerDedup, dedup_layers, joint_tracer
from lightning_zero.compile.listener import CompileListener
from lightning_zero.compile.partition import partition_joint_graph
from lightning_zero.compile.passes import PassSpec, default_passes, offload_limits, run_passes, saved_limits
from lightning_zero.compile.passes.activation_offload import OffloadLimits, insert_offloads
from lightning_zero.compile.pending_compiles import PendingCompile, PendingCompiles
from lightning_zero.compile.plan import CHART
from lightning_zero.compile.plan_book import PlanStore
from lightning_zero.compile.recompile_reason import find_recompile_reason
from lightning_zero.compile.recompute_policy import partitioner_settings
from lightning_zero.compile.selection import PassSelection
from lightning_zero.compile.subgraphs import (
    DeferredKernels,
    StrideMismatch,
    SubgraphCache,
    cut,
    fix_strides,
    lower,
    repeats,
)
from lightning_zero.compile.tagging import tag_activations, tag_gathers
from lightning_zero.config import CompileConfig
from lightning_zero.sharding.shard_tensor import no_shard_dispatch

__all__ = ["Compiler"]

log = logging.getLogger(__name__)

GRAPH_PACKAGES = (
    "compat",
    "compile",
    "native",
    "profiling",
)  # rooms of the package whose code decides what a graph becomes


class Compiler:
    """Makes the arguments of ``torch.compile`` for one engine's modules, for as long as its options stay.

    Torch keeps it for as long as the process lives, so it knows nothing that holds an engine.

    Args:
        context: of every graph, but for what follows from the graph, and from what has been compiled before it.
        selection: which passes graphs go through.
        plans: of the graphs that have run, which later ones follow.
        listener: is told what is compiled.
        wrap: gives what is called instead of a compiled graph.

    Attributes:
        last_weight: the shard that a step's forward reads last: backward follows on the graph that ends with it.
        notes: on the calls that are compiled.
        charts: graphs for training say what they would take under other budgets of activations, too.
    """

    def __init__(
        self,
        context: PassContext,
        selection: PassSelection,
        plans: PlanStore,
        listener: CompileListener,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda compiled: compiled,
    ) -> None:
        self._context = context
        self._selection = selection
        self._plans = plans
        self._listener = listener
        self._wrap = wrap
        self._subgraphs = SubgraphCache()
        self._select_plans()
        self.last_weight: Tensor | None = None
        self.call_info = CallInfo()
        self.sweeps_budgets = False

    def arguments(self, saved_share: float | None = None) -> dict[str, Any]:
        """Keyword arguments for ``torch.compile``; with others for each module, alike ones would not share graphs.
        Others each time: what has been compiled with those before is not used for these.

        Args:
            saved_share: what graphs keep of their weights for backward from now on; None for as much as before.
        """
        if saved_share is not None:
            self._context = replace(self._context, saved_share=saved_share)
        self._select_plans()
        return {"fullgraph": False, "dynamic": self._config.dynamic, "backend": self._backend()}

    def _select_plans(self) -> None:
        """Other passes, and another share of weights that is kept, or of activations, make other groups: plans before
        are not followed."""
        self._plans.select((self._selection.key, self._context.saved_share, self._config.activation_memory_budget))

    def context(self, backward_follows: bool = False) -> PassContext:
        """Of the next graph."""
        return replace(self._context, agreed_plans=self._plans.agreed_plans, backward_follows=backward_follows)

    def passes(self) -> Sequence[PassSpec]:
        """The passes that the next graph goes through."""
        return self._selection.passes(self.default())

    def default(self) -> Sequence[PassSpec]:
        """Those that it goes through where nobody chooses."""
        return default_passes(self.context())

    @property
    def _config(self) -> CompileConfig:
        return self._context.config

    def _backend(self) -> Callable[..., Any]:
        inner = self._aot_eager if self._config.backend == "aot_eager" else self._inductor

        def compile_graph(module: GraphModule, inputs: Any, **kwargs: Any) -> Any:
            names = tag_weight_names(module)
            check_weight_edits(module)
            check_foreach_on_shards(module, inputs)
            if dropped := drop_causal_masks(module):
                log.info("%d masks of attention say no more than is_causal=True, which is faster.", dropped)
            communicates = has_collectives(module)
            last = self.last_weight is not None and last_read(module, inputs) is self.last_weight
            pending_compiles = self.call_info.pending_compiles
            pending_compiles.finish()  # of one that Dynamo threw away
            begun = monotonic()
            timer = CompileTimer(self.call_info.called or "a module", self._listener)
            self._listener.compiling(self._describe(names), True, 0.0)
            if (why := find_recompile_reason()) is not None:
                self._listener.report(f"What was compiled before is for other calls: {why}")
            settings: dict[str, Any] = partitioner_settings(self._config.activation_memory_budget) | {
                "bundled_autograd_cache": not self._config.whole_graphs,  # or it would not keep programs of pieces
            }
            if self.call_info.retains_graph:
                settings["donated_buffer"] = False
            else:
                # Here, where ranks are told that this one compiles, and these settings hold: not in the first
                # backward. One that keeps its graph has to be compiled as that, and only a backward shows it.
                settings["force_non_lazy_backward_lowering"] = True
            rest = PendingCompile(timer.kernels, settings)
            try:
                with functorch_config.patch(settings), speed_up_lowering(), rest:
                    compiled = self._compile_with_layer_dedup(partial(inner, last, timer), module, inputs, **kwargs)
            except BaseException:
                timer.end(monotonic() - begun)
                raise
            pending_compiles.add(rest, monotonic() - begun, timer.end)
            return _without_shard_dispatch(compiled if communicates else self._wrap(compiled), pending_compiles)

        compile_graph.__name__ = "lightning_zero"  # what error messages call it
        return compile_graph

    def _compile_with_layer_dedup(
        self, inner: Callable[..., Any], module: GraphModule, inputs: Any, **kwargs: Any
    ) -> Any:
        """Compiles a graph, of which equal layers are differentiated once where that can be."""
        layers = None if self._config.whole_graphs else dedup_layers(module, joint_tracer(self._config.backend))
        while layers is not None:
            try:
                return inner(layers, module, inputs, **kwargs)
            except DedupFailed as error:
                log.info("The layers are traced once more: %s", error)
                layers = layers.without(error)
        return inner(None, module, inputs, **kwargs)

    def _describe(self, weights: Sequence[str]) -> str:
        training = "training, forward" if self.call_info.retains_graph else "training, forward and backward"
        purpose = training if torch.is_grad_enabled() else "evaluation"
        read = "no weights"
        if weights:
            read = (
                f"{len(weights)} weights, {weights[0]!r} to {weights[-1]!r}" if weights[1:] else f"{weights[0]!r} only"
            )
        return f"{self.call_info.called or 'a module'} for {purpose} (a graph of {read})"

    def _tag(self, last: bool, layers: LayerDedup | None, graph: Graph) -> Graph:
        """``last``: backward follows right after this graph's forward. ``layers``: that were taken out of it."""
        if layers is not None:
            layers.inline(graph)
        self._listener.graph("joint", graph)
        graph, recompute = tag_gathers(graph, saved_limits(self.context(last))), self._config.recompute
        return graph if recompute is None else tag_activations(graph, recompute)

    def _offload_limits(self) -> OffloadLimits | None:
        """Of a graph that is compiled now: where an quota is named for a pass, what is left of that."""
        limits = offload_limits(self._context)
        if limits is None or limits.budget_bytes is None:
            return limits
        return replace(limits, budget_bytes=self.call_info.quota.remaining(limits.budget_bytes))

    def _partition(
        self, limits: OffloadLimits | None, module: GraphModule, inputs: Any, *, num_fwd_outputs: int, **settings: Any
    ) -> Any:
        """A joint graph into forward and backward, between which activations may leave for the host."""
        points = self._sweep_budgets(module, inputs, num_fwd_outputs, settings) if self.sweeps_budgets else ()
        budget = self._config.activation_memory_budget
        forward, backward, changed = partition_joint_graph(module, inputs, num_fwd_outputs, budget, **settings)
        output_node(forward.graph).meta[CHART] = points
        if limits is not None:
            nbytes = insert_offloads(forward.graph, backward.graph, num_fwd_outputs, limits)
            log.info("%.1f MiB of what this graph saves for backward leave for the host", nbytes / 2**20)
            changed = [forward, backward]
        for part in changed:
            part.recompile()
        return forward, backward

    def _sweep_budgets(
        self, module: GraphModule, inputs: Any, outputs: int, settings: dict[str, Any]
    ) -> tuple[Point, ...]:
        begun = monotonic()
        points = chart(module, inputs, outputs, self._context, **settings)
        self._listener.add_metric("chart", monotonic() - begun)
        return points

    def _rewrite(self, graph: Graph) -> Graph:
        begun = monotonic()
        self._listener.graph("before", graph)
        watch = self._listener.pass_ran if self._listener.wants_passes else None
        # Ours are checked one by one in tests; users' passes, and whatever somebody debugs, here.
        graph = run_passes(graph, self.passes(), watch, check_each=watch is not None or self._selection.has_own)
        self._listener.graph("after", graph)
        self._listener.add_metric("passes", monotonic() - begun)
        return graph

    def _inductor(
        self,
        last: bool,
        timer: CompileTimer,
        layers: LayerDedup | None,
        module: GraphModule,
        inputs: Any,
        **kwargs: Any,
    ) -> Any:
        # Observers must see every graph, so they keep graphs out of the cache.
        wanted = self._listener.wants_graphs or self._listener.wants_passes
        unversioned = any(spec.name in self._selection.unversioned for spec in self.passes())
        uncached = wanted or unversioned or self._config.recompute is not None
        uuid = None if uncached else self._digest()
        joint = JointPasses(layers, partial(self._tag, last, layers), first=self._config.recompute is not None)
        options = joint.options(lambda function: _Pass(function, uuid and f"{uuid} {last}")) | {
            "post_grad_custom_post_pass": _Pass(self._rewrite, uuid),
            # Inductor's reordering would sink every gather that was started early back to its use.
            "reorder_for_peak_memory": False,
        }
        limits = self._offload_limits()
        own = uuid and f"{uuid} {limits and limits.budget_bytes} {self.sweeps_budgets}"
        options["custom_partitioner_fn"] = _Partitioner(partial(self._partition, limits), own)
        compile_fx: Any = lookup_backend("inductor")
        lower = partial(self._lower, timer)
        with joint:
            return compile_fx(module, inputs, config_patches=options, inner_compile=lower, **kwargs)

    def _lower(self, timer: CompileTimer, module: GraphModule, inputs: Any, **settings: Any) -> Any:
        with timer.measure(module.graph):
            compiled = self._compile_subgraphs(timer.kernels, module, inputs, **settings)
            if timer.over:
                timer.kernels.finish()  # nobody else would, and AOTAutograd's cache keeps them next
        return compiled

    def _compile_subgraphs(self, kernels: DeferredKernels, module: GraphModule, inputs: Any, **settings: Any) -> Any:
        """A forward or backward graph, which goes through the passes on its way."""
        if self._config.whole_graphs or not repeats(module.graph):
            return compile_fx_inner(module, inputs, **settings)
        fix_strides(module.graph, inputs)  # first: our passes are right about the many views that they make
        self._rewrite(module.graph)
        steps = cut(module.graph)
        begun, known = monotonic(), self._subgraphs.compiled
        try:
            program = None if steps is None else lower(module, self._subgraphs, kernels, steps, **settings)
        except StrideMismatch as error:
            log.info("A graph is compiled whole: %s", error)
            program = None
        if program is None:
            with inductor_config.patch(post_grad_custom_post_pass=None):
                return compile_fx_inner(module, inputs, **settings)
        self._listener.add_metric("pieces", program.calls)
        self._listener.add_metric("pieces compiled", self._subgraphs.compiled - known)
        OPTIMIZATION_COUNTS["pieces"] += program.calls
        OPTIMIZATION_COUNTS["pieces compiled"] += self._subgraphs.compiled - known
        log.info(
            "%d nodes run in %d pieces, of which %d were compiled in %.1f s",
            len(module.graph.nodes),
            program.calls,
            self._subgraphs.compiled - known,
            monotonic() - begun,
        )
        return program

    def _digest(self) -> str:
        """What decides how a graph is rewritten. Not what was measured: it differs from run to run, and a graph that an
        earlier run placed is as right as any."""
        names = [(spec.name, spec.version) for spec in self.passes()]
        context = self.context()
        agreed_plans = [plan.collectives() for plan in context.agreed_plans]
        decides = (names, context.config, context.saved_share, context.world_size, agreed_plans)
        digest = hashlib.sha256(repr(decides).encode())
        for room in GRAPH_PACKAGES:
            for path in sorted(Path(__file__).parent.parent.joinpath(room).rglob("*.py")):
                digest.update(path.read_bytes())
        return digest.hexdigest()

    def _aot_eager(
        self,
        last: bool,
        timer: CompileTimer,
        layers: LayerDedup | None,
        module: GraphModule,
        inputs: Any,
        **kwargs: Any,
    ) -> Any:
        def partition(module: GraphModule, inputs: Any, **kwargs: Any) -> Any:
            self._tag(last, layers, module.graph)
            return self._partition(self._offload_limits(), module, inputs, **kwargs)

        def compiler(module: GraphModule, inputs: Any) -> Any:
            with timer.measure(module.graph):
                self._rewrite(module.graph)
                return _boxed(module)

        compile_fx = aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            inference_compiler=compiler,
            partition_fn=partition,
            # Edits of buffers inside the graph, as Inductor has them: behind it, they would come after what a
            # checkpointed region saves of a buffer, and torch would refuse the backward.
            keep_inference_input_mutations=True,
        )
        return compile_fx(module, inputs, **kwargs)


def _without_shard_dispatch(compiled: Callable[..., Any], pending_compiles: PendingCompiles) -> Callable[..., Any]:
    """Graphs read shards by our own ops alone; what users may do to these need not be asked at each of them."""

    def run(*args: Any) -> Any:
        pending_compiles.finish()
        with no_shard_dispatch():
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

    def __init__(self, function: Callable[[Graph], Any], uuid: str | None) -> None:
        self._function = function
        self._uuid = uuid

    def __call__(self, graph: Graph) -> None:
        self._function(graph)
        # Inductor noted before our passes which outputs users see; torch 2.11 stumbles over one that has become None.
        output = output_node(graph)
        seen = output.meta.get(USER_VISIBLE_OUTPUTS)
        if seen is not None and isinstance(output.args[0], tuple | list):
            output.meta[USER_VISIBLE_OUTPUTS] = [i for i in seen if output.args[0][i] is not None]

    def uuid(self) -> str | None:
        return self._uuid


class _Partitioner(CustomPartitionerFn):
    """Our partitioner in Inductor's form. Inductor pickles its settings, and what this does follows from the uuid."""

    def __init__(self, function: Callable[..., Any], uuid: str | None) -> None:
        self._function = function
        self._uuid = uuid

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        return self._function(gm, joint_inputs, **kwargs)

    def uuid(self) -> str | None:
        return self._uuid

    def __getstate__(self) -> dict[str, Any]:
        return {"_function": None, "_uuid": self._uuid}
