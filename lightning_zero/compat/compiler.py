"""The parts of torch.compile that a backend is made of."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

from lightning_zero.compat.lookup import module, private
from lightning_zero.compat.patches import Patch, swap_attribute

graph_compile = module("torch._functorch._aot_autograd.graph_compile")

with warnings.catch_warnings():
    # Inductor imports modules of torch's own that are written in TorchScript, which torch 2.13 calls deprecated: nobody
    # but torch can do anything about that.
    warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
    module("torch._inductor.compile_fx")

# Makes a backend of a partitioner and a compiler for each half: the way of "aot_eager". (torch 2.11+)
aot_autograd = private("torch._dynamo.backends.common.aot_autograd")

# The partitioner that honours our tags; Inductor's own default. (torch 2.11+)
min_cut_partition = private("torch._functorch.partitioners.min_cut_rematerialization_partition")

# Traces a function and its derivative as one graph, with no Dynamo before it. (torch 2.11+)
aot_function = private("torch._functorch.aot_autograd.aot_function")

# What Inductor partitions a joint graph by, after its own passes over it. (torch 2.11+)
inductor_partition = private("torch._inductor.compile_fx.partition_fn")

# Puts the nodes of a graph behind what they read; Inductor's passes leave others behind. (torch 2.11+)
stable_topological_sort = private("torch._inductor.pattern_matcher.stable_topological_sort")

# Gives a graph's random numbers the seeds that Inductor's code draws for the whole of it, at once; the last of its
# passes over joint graphs, and the only one that "fallback_random" leaves out. (torch 2.11+)
replace_random_passes = private("torch._inductor.fx_passes.replace_random.replace_random_passes")

# The table of ops that Inductor takes apart. (torch 2.11+)
inductor_decompositions = private("torch._inductor.decomposition.select_decomp_table")

# Settings of the partitioner (activation_memory_budget) and of what a backward may overwrite (donated_buffer).
# (torch 2.11+)
functorch_config = private("torch._functorch.config")

# The form in which Inductor takes passes; its uuid lets Inductor's cache recognise them. (torch 2.11+)
CustomGraphPass = private("torch._inductor.custom_graph_pass.CustomGraphPass")

# The form in which it takes partitioners, likewise. (torch 2.11+)
CustomPartitionerFn = private("torch._inductor.custom_graph_pass.CustomPartitionerFn")

# The form in which the partitioner takes whoever chooses what is saved within a budget. (torch 2.11+)
CustomKnapsackSolver = private("torch._inductor.custom_graph_pass.CustomKnapsackSolver")

# Whom it takes by itself. (torch 2.11+)
knapsack = private("torch._functorch._activation_checkpointing.knapsack.dp_knapsack")

# Writes where a node of Dynamo's graph comes from by its global `traceback`. (torch 2.11+)
output_graph = private("torch._dynamo.output_graph")

FRAMES_ONCE = Patch(
    "the lines of code that a node comes from are written once for each frame",
    {
        # The module that Dynamo writes frames with. (torch 2.11+)
        "torch._dynamo.output_graph.traceback": None,
    },
)

# One function's graph in the making, which compile_and_call_fx_graph() ends with the values that are returned.
# (torch 2.11+)
OutputGraph = private("torch._dynamo.output_graph.OutputGraph")

# A tensor while its function is traced. (torch 2.11+)
TensorVariable = private("torch._dynamo.variables.TensorVariable")

# The method of TensorVariable that Dynamo reads an attribute by; another one before torch 2.14. (torch 2.11+)
TENSOR_GETATTR = "tp_getattro_impl" if hasattr(TensorVariable, "tp_getattro_impl") else "var_getattr"

# Has Dynamo trace a function from its beginning. (torch 2.11+)
RestartAnalysis = private("torch._dynamo.exc.SpeculationRestartAnalysis")

# Inductor as a function of a graph, which takes settings for one graph (config_patches); torch.compile takes them for
# all graphs of a module. (torch 2.11+)
lookup_backend = private("torch._dynamo.lookup_backend")

# Compiles the optimizer's update from a graph that we have traced: no guards at each step. (torch 2.11+)
inductor_compile = private("torch._inductor.compile")

# What torch.compile(module) returns: a user's own, which is taken apart. (torch 2.11+)
OptimizedModule = private("torch._dynamo.OptimizedModule")

# Dynamo cannot trace something, and must not break its graph there. (torch 2.11+)
Unsupported = private("torch._dynamo.exc.Unsupported")

# A graph's code that empties its list of inputs, so that saved tensors are freed after their last use. (torch 2.11+)
BoxedCodeGen = private("torch.fx.graph._BoxedCodeGen")

# Compiles one graph of ops, without gradients: what Inductor calls for each half of a graph, and we for pieces of one.
# (torch 2.11+)
compile_fx_inner = private("torch._inductor.compile_fx.compile_fx_inner")

# Inductor's settings, some of which hold for a whole graph, and not for its pieces. (torch 2.11+)
inductor_config = private("torch._inductor.config")

# What is known while a graph is traced; strides of results are told there once. (torch 2.11+)
TracingContext = private("torch._guards.TracingContext")

# Inside, another one holds. (torch 2.11+)
tracing = private("torch._guards.tracing")

# Seconds of this process's compilations so far, in lists by what they went into. (torch 2.11+)
compilation_times = private("torch._dynamo.utils.compilation_time_metrics")

# What compiles a graph returns one of these; AOTAutograd's cache keeps no others. (torch 2.11+)
OutputCode = private("torch._inductor.output_code.OutputCode")

# A graph that Inductor has compiled, which can be pickled. (torch 2.11+)
CompiledFxGraph = private("torch._inductor.output_code.CompiledFxGraph")

# The constants of one: none that we hold. (torch 2.11+)
CompiledFxGraphConstants = private("torch._inductor.output_code.CompiledFxGraphConstants")

# Makes one run again once it has been unpickled. (torch 2.11+)
FxGraphCache = private("torch._inductor.codecache.FxGraphCache")

# What generated code hands its kernels to, and waits for at its end; we wait for those of many pieces together.
# (torch 2.11+)
AsyncCompile = private("torch._inductor.async_compile.AsyncCompile")

# Starts the processes that compile kernels, which Inductor does when it is first called. (torch 2.11+)
maybe_warm_pool = private("torch._inductor.async_compile.maybe_warm_pool")

# A sum of all of Triton's files, made once in a process, which each of Inductor's caches asks for. (torch 2.11+)
triton_key = private("torch._inductor.runtime.triton_compat.triton_key")

# Collects the kernels that have been waited for, which are kept with a compiled graph. (torch 2.11+)
TritonBundler = private("torch._inductor.triton_bundler.TritonBundler")

# Dynamo's settings: calls of loggers that it may leave out (ignore_logging_functions), and whether it sees that modules
# get hooks or lose them (skip_nnmodule_hook_guards). (torch 2.11+)
dynamo_config = private("torch._dynamo.config")

# What is noted of the compilation that goes on: why Dynamo compiles again ("recompile_reason"). (torch 2.11+)
metrics_context = private("torch._dynamo.utils.get_metrics_context")

# Keeps what has been compiled out of AOTAutograd's cache, without a word. (torch 2.11+)
BypassCache = private("torch._functorch._aot_autograd.autograd_cache.BypassAOTAutogradCache")

# Raises that where a node's name does not say what it does. (torch 2.11+)
check_node_safe = private("torch._functorch._aot_autograd.autograd_cache.check_node_safe")

ATTRIBUTES = {
    # The kernels that are kept with it. (torch 2.11+)
    "torch._inductor.output_code.CompiledFxGraph._triton_bundle",
    # What it was made from. (torch 2.11+)
    "torch._dynamo.OptimizedModule._orig_mod",
    # The notes themselves. (torch 2.11+)
    "torch._dynamo.metrics_context.MetricsContext._metrics",
    # A mark on functions that take their inputs as a list which they empty; AOTAutograd asks for it. (torch 2.11+)
    "torch._functorch.aot_autograd._boxed_call",
}


def compiled_from(function: FunctionType) -> Callable[..., Any] | None:
    """What ``torch.compile`` was given when it returned this function; None of any other."""
    # torch.compiler.disable leaves the same mark, and one of its own. (torch 2.11+)
    marks = vars(function)
    # functools.wraps copies marks onto functions that do more.
    copied = function.__code__.co_filename != torch._dynamo.eval_frame.__file__
    return None if copied or "_torchdynamo_disable" in marks else marks.get("_torchdynamo_orig_callable")


def _setattr_variable() -> Any:
    # The class that stands for ``setattr()`` while a function is traced, and for other builtins, too, which are its
    # ``fn`` then. Torch 2.13 has another one for setattr alone, whose ``_fn`` tells. (torch 2.11+)
    plain = private("torch._dynamo.variables.BuiltinVariable")
    kinds = vars(sys.modules[plain.__module__]).values() if isinstance(plain, type) else ()
    return next((kind for kind in kinds if getattr(kind, "_fn", None) is setattr), plain)


# Stands for ``setattr()`` while a function is traced.
SetattrVariable = _setattr_variable()

# Ends a graph with the values that are returned.
COMPILE_GRAPH = "compile_and_call_fx_graph"

UNUSED_GRADIENTS = Patch(
    "code that asks for gradients that are never read does not end a graph (T5, wav2vec2)",
    {
        # Calls of builtins. (torch 2.11+)
        f"{getattr(SetattrVariable, '__module__', '')}.{getattr(SetattrVariable, '__name__', '')}.call_function": (
            "self, tx, args, kwargs"
        ),
        # Reading an attribute of a tensor. (torch 2.11+)
        f"torch._dynamo.variables.TensorVariable.{TENSOR_GETATTR}": "self, tx, name",
        # Calling a method of a tensor. (torch 2.11+)
        "torch._dynamo.variables.TensorVariable.call_method": "self, tx, name, args, kwargs",
        # Ending a graph. (torch 2.11+)
        f"torch._dynamo.output_graph.OutputGraph.{COMPILE_GRAPH}": "self, tx, rv, root",
    },
    needs=(
        # Has Dynamo trace a function from its beginning. (torch 2.11+)
        "torch._dynamo.exc.SpeculationRestartAnalysis",
    ),
)


@contextmanager
def report_compiling() -> Iterator[None]:
    """Inside, ``torch.compiler.is_compiling()`` is true, as Dynamo has it: a plan traces without Dynamo, and what code
    does only where it is not compiled (transformers reads values of masks) would end that."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


_NUMBERS = Patch(
    "layers that are alike are compiled once where they are given numbers",
    {
        # Makes tensors of a graph's numbers. (torch 2.11+)
        "torch._functorch._aot_autograd.graph_compile._apply_tensorify_python_scalars": "module",
    },
)


@_NUMBERS
@contextmanager
def keep_python_scalars() -> Iterator[None]:
    """Inside, what AOTAutograd traces keeps the numbers that it is given, where it makes tensors of them otherwise and
    ends with an error if they are inputs of a larger graph. The setting of Dynamo's that would say so is read once in
    a process, and is Dynamo's, too."""
    with swap_attribute(graph_compile, "_apply_tensorify_python_scalars", lambda module: None):
        yield
