"""Parts of torch.compile that a backend is made of: AOTAutograd, Inductor, and settings."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch

from lightning_zero.compat.lookup import module, private
from lightning_zero.compat.patches import Patch

graph_compile = module("torch._functorch._aot_autograd.graph_compile")
_internal = module("torch._logging._internal")

with warnings.catch_warnings():
    # Inductor imports TorchScript modules of torch, which torch 2.13 itself deprecates.
    warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
    module("torch._inductor.compile_fx")

# Builds a backend from a partitioner and two compilers, as "aot_eager" is built. (torch 2.11+)
aot_autograd = private("torch._dynamo.backends.common.aot_autograd")

# Runs Inductor's passes over a joint graph, and partitions it. (torch 2.11+)
inductor_partition = private("torch._inductor.compile_fx.partition_fn")

# Sorts the nodes of a graph after Inductor's passes, which leave them out of order. (torch 2.11+)
stable_topological_sort = private("torch._inductor.pattern_matcher.stable_topological_sort")

# Replaces random ops by seeds that are drawn once per graph. The last of Inductor's joint passes, and the only one that
# "fallback_random" skips. (torch 2.11+)
replace_random_passes = private("torch._inductor.fx_passes.replace_random.replace_random_passes")

# The table of ops that Inductor decomposes. (torch 2.11+)
inductor_decompositions = private("torch._inductor.decomposition.select_decomp_table")

# Base class of Inductor's custom passes; the uuid is part of the key in its cache. (torch 2.11+)
CustomGraphPass = private("torch._inductor.custom_graph_pass.CustomGraphPass")

# Base class of custom partitioners. (torch 2.11+)
CustomPartitionerFn = private("torch._inductor.custom_graph_pass.CustomPartitionerFn")

# Base class of custom solvers that choose the saved nodes within a budget. (torch 2.11+)
CustomKnapsackSolver = private("torch._inductor.custom_graph_pass.CustomKnapsackSolver")

# The default solver. (torch 2.11+)
knapsack = private("torch._functorch._activation_checkpointing.knapsack.dp_knapsack")

# A tensor while its function is traced. (torch 2.11+)
TensorVariable = private("torch._dynamo.variables.TensorVariable")

# The method of TensorVariable that reads an attribute; renamed in torch 2.14. (torch 2.11+)
TENSOR_GETATTR = "tp_getattro_impl" if hasattr(TensorVariable, "tp_getattro_impl") else "var_getattr"

# Restarts the trace of a function. (torch 2.11+)
RestartAnalysis = private("torch._dynamo.exc.SpeculationRestartAnalysis")

# Returns Inductor as a function that takes settings for one graph (config_patches). (torch 2.11+)
lookup_backend = private("torch._dynamo.lookup_backend")

# Raised if Dynamo cannot trace code and must not break the graph. (torch 2.11+)
Unsupported = private("torch._dynamo.exc.Unsupported")

# Generates code that empties the list of inputs, so that saved tensors are freed after their last use. (torch 2.11+)
BoxedCodeGen = private("torch.fx.graph._BoxedCodeGen")

# Compiles a graph without gradients: Inductor calls it for forward and backward, and we for subgraphs. (torch 2.11+)
compile_fx_inner = private("torch._inductor.compile_fx.compile_fx_inner")

# Inductor's settings, some of which apply to a full graph and not to subgraphs. (torch 2.11+)
inductor_config = private("torch._inductor.config")

# The state of one trace, including the strides of outputs. (torch 2.11+)
TracingContext = private("torch._guards.TracingContext")

# Activates another TracingContext. (torch 2.11+)
tracing = private("torch._guards.tracing")

# Seconds of this process's compilations, in lists by phase. (torch 2.11+)
compilation_times = private("torch._dynamo.utils.compilation_time_metrics")

# Base class of compiled graphs; AOTAutograd's cache stores no others. (torch 2.11+)
OutputCode = private("torch._inductor.output_code.OutputCode")

# A graph compiled by Inductor, which can be pickled. (torch 2.11+)
CompiledFxGraph = private("torch._inductor.output_code.CompiledFxGraph")

# The constants of a compiled graph. (torch 2.11+)
CompiledFxGraphConstants = private("torch._inductor.output_code.CompiledFxGraphConstants")

# Prepares an unpickled graph to run. (torch 2.11+)
FxGraphCache = private("torch._inductor.codecache.FxGraphCache")

# Starts the processes that compile kernels. (torch 2.11+)
maybe_warm_pool = private("torch._inductor.async_compile.maybe_warm_pool")

# Returns a hash of Triton's files, computed once per process for Inductor's caches. (torch 2.11+)
triton_key = private("torch._inductor.runtime.triton_compat.triton_key")

# Collects compiled kernels, which are stored with a compiled graph. (torch 2.11+)
TritonBundler = private("torch._inductor.triton_bundler.TritonBundler")

# Dynamo's settings, such as ignore_logging_functions and skip_nnmodule_hook_guards. (torch 2.11+)
dynamo_config = private("torch._dynamo.config")

# Returns notes on the current compilation, such as the "recompile_reason". (torch 2.11+)
metrics_context = private("torch._dynamo.utils.get_metrics_context")

# The reasons why cached code did not fit a call, by code: one for each cached one, at each recompilation. (torch 2.11+)
guard_failures = private("torch._dynamo.utils.guard_failures")

# Raised to keep a graph out of AOTAutograd's cache silently. (torch 2.11+)
BypassCache = private("torch._functorch._aot_autograd.autograd_cache.BypassAOTAutogradCache")

# Raises that error if the name of a node does not identify its function. (torch 2.11+)
check_node_safe = private("torch._functorch._aot_autograd.autograd_cache.check_node_safe")

ATTRIBUTES = {
    # The kernels stored with a compiled graph. (torch 2.11+)
    "torch._inductor.output_code.CompiledFxGraph._triton_bundle",
    # The module that was compiled. (torch 2.11+)
    "torch._dynamo.OptimizedModule._orig_mod",
    # The notes by name. (torch 2.11+)
    "torch._dynamo.metrics_context.MetricsContext._metrics",
    # Marks functions that empty their list of inputs; AOTAutograd reads it. (torch 2.11+)
    "torch._functorch.aot_autograd._boxed_call",
}


def compiled_from(function: FunctionType) -> Callable[..., Any] | None:
    """Return the function that ``torch.compile`` was called with to get this one, or None for any other."""
    # torch.compiler.disable sets the same mark, and a second one. (torch 2.11+)
    marks = vars(function)
    # functools.wraps copies marks to functions that do more.
    copied = function.__code__.co_filename != torch._dynamo.eval_frame.__file__
    return None if copied or "_torchdynamo_disable" in marks else marks.get("_torchdynamo_orig_callable")


def _setattr_variable() -> Any:
    # The class of ``setattr()`` while a function is traced, and of other builtins, which are its ``fn``. Torch 2.13 has
    # a class for setattr only, with ``_fn``. (torch 2.11+)
    plain = private("torch._dynamo.variables.BuiltinVariable")
    kinds = vars(sys.modules[plain.__module__]).values() if isinstance(plain, type) else ()
    return next((kind for kind in kinds if getattr(kind, "_fn", None) is setattr), plain)


# The class of ``setattr()`` while a function is traced.
SetattrVariable = _setattr_variable()

UNUSED_GRADIENTS = Patch(
    "code that asks for gradients that are never read does not break the graph (T5, wav2vec2)",
    {
        # Calls a builtin. (torch 2.11+)
        f"{getattr(SetattrVariable, '__module__', '')}.{getattr(SetattrVariable, '__name__', '')}.call_function": (
            "self, tx, args, kwargs"
        ),
        # Reads an attribute of a tensor. (torch 2.11+)
        f"torch._dynamo.variables.TensorVariable.{TENSOR_GETATTR}": "self, tx, name",
        # Calls a method of a tensor. (torch 2.11+)
        "torch._dynamo.variables.TensorVariable.call_method": "self, tx, name, args, kwargs",
        # Ends a graph. (torch 2.11+)
        "torch._dynamo.output_graph.OutputGraph.compile_and_call_fx_graph": "self, tx, rv, root",
    },
    needs={
        # Restarts the trace of a function. (torch 2.11+)
        "torch._dynamo.exc.SpeculationRestartAnalysis": None,
    },
)
DEFERRED_KERNELS = Patch(
    "kernels are compiled while the next graphs are lowered",
    {
        # Generated code waits for its kernels. (torch 2.11+)
        "torch._inductor.async_compile.AsyncCompile.wait": "self, scope",
        # Writes an entry of the cache. (torch 2.11+)
        "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache.save": "key, entry, remote",
    },
)
_PYTHON_SCALARS = Patch(
    "equal layers that take numbers are compiled once",
    {
        # Makes tensors of a graph's numbers. (torch 2.11+)
        "torch._functorch._aot_autograd.graph_compile._apply_tensorify_python_scalars": "module",
    },
)
_TEXT = Patch(
    "graphs are not printed for logs that are off",
    {
        # Prints the forward and backward graphs for logs and for the cache. (torch 2.11+)
        "torch._functorch._aot_autograd.graph_compile._log_fw_bw_graphs": (
            "fw_module, bw_module, maybe_subclass_meta, fw_metadata, aot_config"
        ),
    },
    needs={
        # The logs of TORCH_LOGS="aot_graphs" and TORCH_TRACE. (torch 2.11+)
        "torch._functorch._aot_autograd.graph_compile.aot_graphs_log": None,
        "torch._logging._internal.trace_log": None,
    },
)


@DEFERRED_KERNELS
@contextmanager
def defer_cache_saves(saves: list[Callable[[], Any]]) -> Iterator[None]:
    """Append the writes to AOTAutograd's cache to a list.

    An entry contains compiled kernels, for which a write would wait.

    Args:
        saves: to be called under the same settings of functorch.
    """

    def defer(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *entry, **named: saves.append(partial(plain, *entry, **named))

    with DEFERRED_KERNELS.replace({"AOTAutogradCache.save": defer}):
        yield


@contextmanager
def report_compiling() -> Iterator[None]:
    """Have ``torch.compiler.is_compiling()`` return True, as in Dynamo.

    A plan traces without Dynamo. Code that runs only if it is not compiled, such as reads of mask values in
    transformers, would end that trace.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@_PYTHON_SCALARS
@contextmanager
def keep_python_scalars() -> Iterator[None]:
    """Keep the numbers of a graph that AOTAutograd traces.

    AOTAutograd makes tensors of them, and fails if they are inputs of a larger graph. Dynamo's setting for this is read
    once per process.
    """
    with _PYTHON_SCALARS.replace({"_apply_tensorify_python_scalars": lambda plain: lambda module: None}):
        yield


@_TEXT
@contextmanager
def skip_debug_text() -> Iterator[None]:
    """Print graphs only if a log is on: 0.6 CPU seconds for 48 layers with torch 2.13, 1.4 with 2.15."""

    def skip(plain: Callable[..., Any]) -> Callable[..., Any]:
        def log_graphs(*args: Any, **kwargs: Any) -> Any:
            is_on = graph_compile.aot_graphs_log.isEnabledFor(20) or _internal.trace_log.handlers
            return plain(*args, **kwargs) if is_on else (None, None)

        return log_graphs

    with _TEXT.replace({"_log_fw_bw_graphs": skip}):
        yield


# Collections of the youngest generation between two of an older one: more than a compilation has.
NEVER = 1_000_000


@contextmanager
def speed_up_lowering() -> Iterator[None]:
    """Compile a graph without collections of old objects and without printed graphs."""
    with collect_young_only(), skip_debug_text():
        yield


@contextmanager
def collect_young_only() -> Iterator[None]:
    """Have Python's garbage collector search the youngest objects only.

    Objects of a compilation live until its end or die young. Full collections take 2.6 of 24 CPU seconds at 48 layers.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0], *(max(threshold, NEVER) for threshold in before[1:]))
    try:
        yield
    finally:
        gc.set_threshold(*before)
