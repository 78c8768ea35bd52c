"""Backend of ``torch.compile``: passes Dynamo's graphs through our passes to Inductor or aot_eager.

Inductor gets two custom passes as options, on the joint graph and on each partitioned graph. aot_eager gets the same
functions through ``aot_autograd(partition_fn=...)``: it generates no code, compiles fast and is exact.

``capture/discovery.py`` calls torch.compile, and ``capture/dynamo_graph.py`` reads Dynamo's graphs.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from functorch.compile import config as functorch_config
from torch import Tensor
from torch.fx import Graph, GraphModule

from lightning_zero.compat.compiler import (
    BoxedCodeGen,
    CustomGraphPass,
    CustomPartitionerFn,
    aot_autograd,
    compilation_times,
    compile_fx_inner,
    inductor_config,
    lookup_backend,
    replace_random_passes,
    speed_up_lowering,
    stable_topological_sort,
)
from lightning_zero.compat.graphs import USER_VISIBLE_OUTPUTS
from lightning_zero.compat.lookup import Absent
from lightning_zero.compile.async_compile import PendingCompile, PendingCompiles
from lightning_zero.compile.capture.causal_mask import drop_causal_masks
from lightning_zero.compile.capture.discovery import CallInfo
from lightning_zero.compile.capture.dynamo_graph import (
    check_foreach_on_shards,
    check_weight_edits,
    has_collectives,
    last_read,
    tag_weights,
)
from lightning_zero.compile.capture.masked_writes import replace_masked_writes
from lightning_zero.compile.capture.recompile_reason import find_recompile_reason
from lightning_zero.compile.context import PassContext
from lightning_zero.compile.events import OPTIMIZATION_COUNTS, CompileProgress, CompileTimer
from lightning_zero.compile.fp8 import convert_products
from lightning_zero.compile.fx_utils import draws_random, graph_kind, output_node
from lightning_zero.compile.graph_plan import PlanStore
from lightning_zero.compile.layer_dedup import DedupFailed, LayerDedup, dedup_layers, joint_tracer
from lightning_zero.compile.partitioner.partition import partition_joint_graph, tag_activations, tag_gathers
from lightning_zero.compile.partitioner.recompute_policy import partitioner_settings
from lightning_zero.compile.passes import PassSpec, default_passes, offload_limits, run_passes, saved_limits
from lightning_zero.compile.passes.activation_offload import OffloadLimits, insert_offloads
from lightning_zero.compile.passes.dequantize import expand_dequantized
from lightning_zero.compile.passes.selection import PassSelection
from lightning_zero.compile.subgraphs import (
    DeferredKernels,
    StrideMismatch,
    SubgraphCache,
    cut,
    fix_strides,
    is_worth_cutting,
    lower_subgraphs,
)
from lightning_zero.compile.thin_products import merge_thin_products
from lightning_zero.config import CompileConfig
from lightning_zero.sharding.shard_tensor import no_shard_dispatch

log = logging.getLogger(__name__)

# Packages whose code decides how graphs are rewritten.
GRAPH_PACKAGES = ("compat", "compile", "native", "profiling")


class Compiler:
    """Create the arguments of ``torch.compile`` for one engine's modules while its options stay the same.

    torch keeps it for the life of the process, so it must not reference the engine.

    Args:
        context: of every graph, except for what follows from the graph itself and from earlier compilations.

    Attributes:
        last_weight: shard that forward reads last; backward follows right after the graph that ends with it.
    """

    def __init__(
        self,
        context: PassContext,
        selection: PassSelection,
        plans: PlanStore,
        listener: CompileProgress,
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

    def arguments(self, saved_share: float | None = None) -> dict[str, Any]:
        """Return keyword arguments for ``torch.compile``.

        All modules share them, so that equal ones share graphs. New arguments invalidate earlier compilations.

        Args:
            saved_share: share of weights that graphs keep for backward; None to leave it unchanged.
        """
        if saved_share is not None:
            self._context = replace(self._context, saved_share=saved_share)
        self._select_plans()
        return {"fullgraph": False, "dynamic": self._config.dynamic, "backend": self._backend()}

    def _select_plans(self) -> None:
        """Select the plans of the same passes and budgets; others have other groups."""
        self._plans.select((self._selection.key, self._context.saved_share, self._config.activation_memory_budget))

    def context(self, backward_follows: bool = False) -> PassContext:
        """Return the context of the next graph."""
        return replace(self._context, agreed_plans=self._plans.agreed_plans, backward_follows=backward_follows)

    def passes(self) -> Sequence[PassSpec]:
        return self._selection.passes(self.default())

    def default(self) -> Sequence[PassSpec]:
        """Return the passes that the next graph has by default."""
        return default_passes(self.context())

    @property
    def _config(self) -> CompileConfig:
        return self._context.config

    def _backend(self) -> Callable[..., Any]:
        inner = self._aot_eager if self._config.backend == "aot_eager" else self._inductor

        def compile_graph(module: GraphModule, inputs: Any, **kwargs: Any) -> Any:
            names = tag_weights(module, inputs)
            check_weight_edits(module)
            check_foreach_on_shards(module, inputs)
            if replaced := replace_masked_writes(module):
                log.debug("Compile: masked writes replaced by torch.where (writes=%d)", replaced)
            if dropped := drop_causal_masks(module):
                log.debug("Compile: replaced attention masks by is_causal=True (masks=%d)", dropped)
            communicates = has_collectives(module)
            last = self.last_weight is not None and last_read(module, inputs) is self.last_weight
            pending_compiles = self.call_info.pending_compiles
            pending_compiles.finish()  # of a graph that Dynamo discarded
            begun = monotonic()
            timer = CompileTimer(self.call_info.called or "a module", self._listener)
            purpose = self._describe()
            if (reason := find_recompile_reason(self.call_info.argument_names)) is not None:
                log.debug("Compile: a guard failed (guard=%s)", reason.guard)
                if not reason.expected:
                    self._listener.report(f"Recompiling {purpose}: {reason.text}.")
            self._listener.compiling(purpose, True, 0.0)
            log.debug("Compile: weights of the graph (names=%s)", names)
            self._listener.tasks.stage("differentiating" if torch.is_grad_enabled() else "tracing")
            settings: dict[str, Any] = partitioner_settings(self._config.activation_memory_budget) | {
                # otherwise programs of subgraphs would not be cached
                "bundled_autograd_cache": not self._config.whole_graphs,
            }
            if self.call_info.retains_graph:
                settings["donated_buffer"] = False
            else:
                # Compile backward now, while ranks know that this one compiles and while these settings hold. A graph
                # that is kept for another backward must be compiled for that, which only a backward shows.
                settings["force_non_lazy_backward_lowering"] = True
            rest = PendingCompile(timer.kernels, settings, self._listener.tasks.stage)
            joint_s = _joint_seconds()
            try:
                with functorch_config.patch(settings), speed_up_lowering(), rest:
                    compiled = self._compile_with_layer_dedup(partial(inner, last, timer), module, inputs, **kwargs)
            except BaseException:
                timer.end(monotonic() - begun)
                raise
            finally:
                self._listener.add_metric("joint", _joint_seconds() - joint_s)
            pending_compiles.add(rest, monotonic() - begun, timer.end)
            return _without_shard_dispatch(compiled if communicates else self._wrap(compiled), pending_compiles)

        compile_graph.__name__ = "lightning_zero"  # its name in error messages
        return compile_graph

    def _compile_with_layer_dedup(
        self, inner: Callable[..., Any], module: GraphModule, inputs: Any, **kwargs: Any
    ) -> Any:
        layers = None if self._config.whole_graphs else dedup_layers(module, joint_tracer(self._config.backend))
        while layers is not None:
            try:
                return inner(layers, module, inputs, **kwargs)
            except DedupFailed as error:
                log.debug("Layer deduplication: failed, retrying without that layer (reason=%s)", error)
                layers = layers.without(error)
        return inner(None, module, inputs, **kwargs)

    def _describe(self) -> str:
        purpose = "training" if torch.is_grad_enabled() else "evaluation"
        return f"{self.call_info.called or 'a module'} for {purpose}"

    def _tag(self, last: bool, layers: LayerDedup | None, graph: Graph) -> Graph:
        """Tag weights and activations in a joint graph, after expanding its layers.

        Args:
            last: True if backward follows right after this graph's forward.
        """
        if layers is not None:
            layers.expand(graph)
        self._listener.graph("joint", graph)
        graph, recompute = tag_gathers(graph, saved_limits(self.context(last))), self._config.recompute
        if recompute is not None:
            graph = tag_activations(graph, recompute)
        return self._change_products(graph)

    def _change_products(self, graph: Graph) -> Graph:
        """Convert products of a tagged joint graph, or of an inference graph, and merge thin ones."""
        return merge_thin_products(convert_products(graph, self._config, self._context.fp8_shards))

    def _offload_limits(self) -> OffloadLimits | None:
        limits = offload_limits(self._context)
        if limits is None or limits.budget_bytes is None:
            return limits
        return replace(limits, budget_bytes=self.call_info.quota.remaining(limits.budget_bytes))

    def _partition(
        self, limits: OffloadLimits | None, module: GraphModule, inputs: Any, *, num_fwd_outputs: int, **settings: Any
    ) -> Any:
        """Split a joint graph into forward and backward, and offload activations between them."""
        budget = self._config.activation_memory_budget
        forward, backward, changed = partition_joint_graph(module, inputs, num_fwd_outputs, budget, **settings)
        if limits is not None:
            nbytes = insert_offloads(forward.graph, backward.graph, num_fwd_outputs, limits)
            log.debug("Offload: activations of a graph (mib=%.1f)", nbytes / 2**20)
            changed = [forward, backward]
        for part in changed:
            part.recompile()
        return forward, backward

    def _rewrite(self, graph: Graph) -> Graph:
        begun = monotonic()
        self._listener.graph("before", graph)
        watch = self._listener.pass_ran if self._listener.wants_passes else None
        # Tests check our passes one by one. User passes and observed ones are checked here.
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
        # Observers need every graph, so graphs must not come from the cache.
        observed = self._listener.wants_graphs or self._listener.wants_passes
        unversioned = any(spec.name in self._selection.unversioned for spec in self.passes())
        uncached = observed or unversioned or self._config.recompute is not None
        uuid = None if uncached else self._digest()
        joint = JointPasses(layers, partial(self._tag, last, layers), first=self._config.recompute is not None)
        options = joint.options(lambda function: _Pass(function, uuid and f"{uuid} {last}")) | {
            "post_grad_custom_post_pass": _Pass(lambda graph: expand_dequantized(self._rewrite(graph)), uuid),
            # Inductor's reordering would move early gathers back to their use.
            "reorder_for_peak_memory": False,
        }
        limits = self._offload_limits()
        own = uuid and f"{uuid} {limits and limits.budget_bytes}"
        options["custom_partitioner_fn"] = _Partitioner(partial(self._partition, limits), own)
        compile_fx: Any = lookup_backend("inductor")
        lower = partial(self._lower, timer)
        with joint:
            return compile_fx(module, inputs, config_patches=options, inner_compile=lower, **kwargs)

    def _lower(self, timer: CompileTimer, module: GraphModule, inputs: Any, **settings: Any) -> Any:
        with timer.measure(module.graph):
            compiled = self._compile_subgraphs(timer.kernels, module, inputs, **settings)
            if timer.over:
                timer.kernels.finish()  # AOTAutograd's cache stores them next
        return compiled

    def _compile_subgraphs(self, kernels: DeferredKernels, module: GraphModule, inputs: Any, **settings: Any) -> Any:
        """Compile a forward or backward graph by its subgraphs, after running the passes on it."""
        if self._config.whole_graphs or not is_worth_cutting(module.graph):
            return compile_fx_inner(module, inputs, **settings)
        fix_strides(module.graph, inputs)  # before our passes, whose many views have correct strides
        self._rewrite(module.graph)
        steps = cut(module.graph)
        begun, known = monotonic(), self._subgraphs.compiled
        try:
            program = (
                None
                if steps is None
                else lower_subgraphs(module, self._subgraphs, kernels, steps, self._show_subgraph(module), **settings)
            )
        except StrideMismatch as error:
            log.debug("Subgraphs: the graph is compiled as a whole (reason=%s)", error)
            program = None
        if program is None:
            expand_dequantized(module.graph)
            with inductor_config.patch(post_grad_custom_post_pass=None):
                return compile_fx_inner(module, inputs, **settings)
        self._listener.add_metric("subgraphs", program.calls)
        self._listener.add_metric("subgraphs compiled", self._subgraphs.compiled - known)
        OPTIMIZATION_COUNTS["subgraphs"] += program.calls
        OPTIMIZATION_COUNTS["subgraphs compiled"] += self._subgraphs.compiled - known
        log.debug(
            "Subgraphs: compiled (nodes=%d, calls=%d, new=%d, seconds=%.1f)",
            len(module.graph.nodes),
            program.calls,
            self._subgraphs.compiled - known,
            monotonic() - begun,
        )
        return program

    def _show_subgraph(self, module: GraphModule) -> Callable[[int, int], None]:
        kind = graph_kind(module.graph)
        return lambda number, total: self._listener.tasks.stage(f"{kind}: subgraph {number} of {total}")

    def _digest(self) -> str:
        """Return a digest of all that decides how a graph is rewritten.

        Measured costs are not part of it: they differ from run to run, and every placement is correct.
        """
        names = [(spec.name, spec.version) for spec in self.passes()]
        context = self.context()
        agreed_plans = [plan.collectives() for plan in context.agreed_plans]
        rewritten = context.config, context.saved_share, context.world_size, context.fp8_shards
        decides = (names, *rewritten, agreed_plans)
        digest = hashlib.sha256(repr(decides).encode())
        for package in GRAPH_PACKAGES:
            for path in sorted(Path(__file__).parent.parent.joinpath(package).rglob("*.py")):
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

        def inference_compiler(module: GraphModule, inputs: Any) -> Any:
            # Inductor runs joint passes here, too.
            self._change_products(module.graph)
            return compiler(module, inputs)

        compile_fx = aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            inference_compiler=inference_compiler,
            partition_fn=partition,
            # Mutate buffers inside the graph, as Inductor does. Mutations after the graph would change buffers that a
            # checkpointed region saved, and torch would refuse the backward.
            keep_inference_input_mutations=True,
        )
        return compile_fx(module, inputs, **kwargs)


def _joint_seconds() -> float:
    """Return the seconds in which this process has traced joint graphs, the user's own included."""
    return 0.0 if isinstance(compilation_times, Absent) else sum(compilation_times.get("aot_trace_joint_graph", ()))


def _without_shard_dispatch(compiled: Callable[..., Any], pending_compiles: PendingCompiles) -> Callable[..., Any]:
    """Graphs read shards only through our ops, so dispatch of user-visible shards is unnecessary."""

    def run(*args: Any) -> Any:
        pending_compiles.finish()
        with no_shard_dispatch():
            return compiled(*args)

    return run


def _boxed(module: GraphModule) -> Callable[[list[Any]], Any]:
    """Run the graph on a list of inputs and empty it, so that saved tensors are freed early."""
    module.graph.set_codegen(BoxedCodeGen())
    module.recompile()

    def run(inputs: list[Any]) -> Any:
        return module.forward(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Pass(CustomGraphPass):
    """A pass in Inductor's form; the uuid identifies it in Inductor's cache."""

    def __init__(self, function: Callable[[Graph], Any], uuid: str | None) -> None:
        self._function = function
        self._uuid = uuid

    def __call__(self, graph: Graph) -> None:
        self._function(graph)
        # Inductor recorded user-visible outputs before our passes. torch 2.11 fails on one that is None now.
        output = output_node(graph)
        seen = output.meta.get(USER_VISIBLE_OUTPUTS)
        if seen is not None and isinstance(output.args[0], tuple | list):
            output.meta[USER_VISIBLE_OUTPUTS] = [i for i in seen if output.args[0][i] is not None]

    def uuid(self) -> str | None:
        return self._uuid


class _Partitioner(CustomPartitionerFn):
    """Our partitioner in Inductor's form. Inductor pickles its settings; the uuid identifies this one."""

    def __init__(self, function: Callable[..., Any], uuid: str | None) -> None:
        self._function = function
        self._uuid = uuid

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        return self._function(gm, joint_inputs, **kwargs)

    def uuid(self) -> str | None:
        return self._uuid

    def __getstate__(self) -> dict[str, Any]:
        return {"_function": None, "_uuid": self._uuid}


class JointPasses(ExitStack):
    """Run our joint-graph passes before or after Inductor's; a context in which one graph is compiled.

    Inductor's passes try hundreds of patterns per node. If they may see one layer of each kind, layers are expanded
    afterwards.

    Args:
        first: always run before Inductor's passes. Nodes made by these have no module path, which a user's recompute
            policy may need.
    """

    def __init__(self, layers: LayerDedup | None, finish: Callable[[Graph], Graph], first: bool = False) -> None:
        super().__init__()
        self._layers = None if first else layers
        self._finish = finish
        self._finished = False

    def options(self, form: Callable[[Callable[[Graph], Any]], Any]) -> dict[str, Any]:
        """Return Inductor options; ``form`` converts a function to Inductor's pass type."""
        options = {"joint_custom_pre_pass": form(self.before)}
        # A user's own pass expects expanded layers.
        if self._layers is not None and inductor_config.joint_custom_post_pass is None:
            options["joint_custom_post_pass"] = form(self.after)
        else:
            self._layers = None
        return options

    def before(self, graph: Graph) -> None:
        """Run before Inductor's passes."""
        if self._layers is None or not self._layers.passes_done(graph):
            self._finish(graph)
            self._finished = True
        else:
            self.enter_context(inductor_config.patch(fallback_random=True))

    def after(self, graph: Graph) -> None:
        """Run after Inductor's passes."""
        if not self._finished:
            self.close()
            stable_topological_sort(graph)  # Inductor sorts after all passes; ours need the order now
            self._finish(graph)
            assert graph.owning_module is not None
            if any(map(draws_random, graph.nodes)):  # otherwise each node would be tried in vain
                # after expansion, so that the seeds of all layers are drawn at once
                replace_random_passes(graph.owning_module)
