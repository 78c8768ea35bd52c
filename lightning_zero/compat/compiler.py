"""The parts of torch.compile that a backend is made of."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.output_graph
import torch._dynamo.utils
import torch._functorch.aot_autograd
import torch._functorch.config
import torch._functorch.partitioners
from torch._dynamo.backends import common
from torch._functorch._activation_checkpointing import knapsack as knapsacks
from torch._functorch._aot_autograd import autograd_cache, graph_compile

with warnings.catch_warnings():
    # Inductor imports modules of torch's own that are written in TorchScript, which torch 2.13 calls deprecated: nobody
    # but torch can do anything about that.
    warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
    from torch._inductor import (
        async_compile,
        codecache,
        compile_fx,
        custom_graph_pass,
        decomposition,
        output_code,
        pattern_matcher,
        triton_bundler,
    )
    from torch._inductor.fx_passes import replace_random
    from torch._inductor.runtime import cache_dir_utils, triton_compat

# Makes a backend of a partitioner and a compiler for each half: the way of "aot_eager". (torch 2.11+)
aot_autograd = common.aot_autograd

# The partitioner that honours our tags; Inductor's own default. (torch 2.11+)
min_cut_partition = torch._functorch.partitioners.min_cut_rematerialization_partition

# Traces a function and its derivative as one graph, with no Dynamo before it. (torch 2.11+)
aot_function = torch._functorch.aot_autograd.aot_function

# What Inductor partitions a joint graph by, after its own passes over it. (torch 2.11+)
inductor_partition = compile_fx.partition_fn

# Puts the nodes of a graph behind what they read; Inductor's passes leave others behind. (torch 2.11+)
stable_topological_sort = pattern_matcher.stable_topological_sort

# Gives a graph's random numbers the seeds that Inductor's code draws for the whole of it, at once; the last of its
# passes over joint graphs, and the only one that "fallback_random" leaves out. (torch 2.11+)
replace_random_passes = replace_random.replace_random_passes

# The table of ops that Inductor takes apart. (torch 2.11+)
inductor_decompositions = decomposition.select_decomp_table

# Settings of the partitioner (activation_memory_budget) and of what a backward may overwrite (donated_buffer).
# (torch 2.11+)
functorch_config = torch._functorch.config

# The form in which Inductor takes passes; its uuid lets Inductor's cache recognise them. (torch 2.11+)
CustomGraphPass = custom_graph_pass.CustomGraphPass

# The form in which it takes partitioners, likewise. (torch 2.11+)
CustomPartitionerFn = custom_graph_pass.CustomPartitionerFn

# The form in which the partitioner takes whoever chooses what is saved within a budget. (torch 2.11+)
CustomKnapsackSolver = custom_graph_pass.CustomKnapsackSolver

# Whom it takes by itself. (torch 2.11+)
knapsack = knapsacks.dp_knapsack

# Writes where a node of Dynamo's graph comes from by its global `traceback`. (torch 2.11+)
output_graph = torch._dynamo.output_graph

# One function's graph in the making, which compile_and_call_fx_graph() ends with the values that are returned.
# (torch 2.11+)
OutputGraph = torch._dynamo.output_graph.OutputGraph

# A tensor while its function is traced. (torch 2.11+)
TensorVariable = torch._dynamo.variables.TensorVariable

# Has Dynamo trace a function from its beginning. (torch 2.11+)
TraceAgain = torch._dynamo.exc.SpeculationRestartAnalysis

# Inductor as a function of a graph, which takes settings for one graph (config_patches); torch.compile takes them for
# all graphs of a module. (torch 2.11+)
lookup_backend = torch._dynamo.lookup_backend

# Compiles the optimizer's update from a graph that we have traced: no guards at each step. (torch 2.11+)
inductor_compile = torch._inductor.compile

# What torch.compile(module) returns: a user's own, which is taken apart. (torch 2.11+)
OptimizedModule = torch._dynamo.OptimizedModule

# Dynamo cannot trace something, and must not break its graph there. (torch 2.11+)
Unsupported = torch._dynamo.exc.Unsupported

# A graph's code that empties its list of inputs, so that saved tensors are freed after their last use. (torch 2.11+)
BoxedCodeGen = torch.fx.graph._BoxedCodeGen

# Compiles one graph of ops, without gradients: what Inductor calls for each half of a graph, and we for pieces of one.
# (torch 2.11+)
compile_fx_inner = compile_fx.compile_fx_inner

# Inductor's settings, some of which hold for a whole graph, and not for its pieces. (torch 2.11+)
inductor_config = torch._inductor.config

# What is known while a graph is traced; strides of results are told there once. (torch 2.11+)
TracingContext = torch._guards.TracingContext

# Inside, another one holds. (torch 2.11+)
tracing = torch._guards.tracing

# Seconds of this process's compilations so far, in lists by what they went into. (torch 2.11+)
compilation_times = torch._dynamo.utils.compilation_time_metrics

# What compiles a graph returns one of these; AOTAutograd's cache keeps no others. (torch 2.11+)
OutputCode = output_code.OutputCode

# A graph that Inductor has compiled, which can be pickled. (torch 2.11+)
CompiledFxGraph = output_code.CompiledFxGraph

# The constants of one: none that we hold. (torch 2.11+)
CompiledFxGraphConstants = output_code.CompiledFxGraphConstants

# Makes one run again once it has been unpickled. (torch 2.11+)
FxGraphCache = codecache.FxGraphCache

# What generated code hands its kernels to, and waits for at its end; we wait for those of many pieces together.
# (torch 2.11+)
AsyncCompile = async_compile.AsyncCompile

# Starts the processes that compile kernels, which Inductor does when it is first called. (torch 2.11+)
maybe_warm_pool = async_compile.maybe_warm_pool

# A sum of all of Triton's files, made once in a process, which each of Inductor's caches asks for. (torch 2.11+)
triton_key = triton_compat.triton_key

# Collects the kernels that have been waited for, which are kept with a compiled graph. (torch 2.11+)
TritonBundler = triton_bundler.TritonBundler

# Dynamo's settings: calls of loggers that it may leave out (ignore_logging_functions), and whether it sees that modules
# get hooks or lose them (skip_nnmodule_hook_guards). (torch 2.11+)
dynamo_config = torch._dynamo.config

# What is noted of the compilation that goes on: why Dynamo compiles again ("recompile_reason"). (torch 2.11+)
metrics_context = torch._dynamo.utils.get_metrics_context

# Keeps what has been compiled out of AOTAutograd's cache, without a word. (torch 2.11+)
BypassCache = autograd_cache.BypassAOTAutogradCache

# Raises that where a node's name does not say what it does. (torch 2.11+)
check_node_safe = autograd_cache.check_node_safe

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

# Where Inductor keeps what it has compiled unless TORCHINDUCTOR_CACHE_DIR says otherwise. What torch itself asks makes
# the folder, and sets the variable, which somebody who only looks should not. (torch 2.11+)
default_inductor_cache = cache_dir_utils.default_cache_dir


def compiled_from(function: FunctionType) -> Callable[..., Any] | None:
    """What ``torch.compile`` was given when it returned this function; None of any other."""
    # torch.compiler.disable leaves the same mark, and one of its own. (torch 2.11+)
    marks = vars(function)
    # functools.wraps copies marks onto functions that do more.
    copied = function.__code__.co_filename != torch._dynamo.eval_frame.__file__
    return None if copied or "_torchdynamo_disable" in marks else marks.get("_torchdynamo_orig_callable")


def setattr_variable() -> Any:
    """The class of what stands for ``setattr()`` while a function is traced; of other builtins, too, which are its
    ``fn`` then."""
    # What stands for builtins; torch 2.13 has another for this one beside it, whose ``_fn`` tells. (torch 2.11+)
    plain = torch._dynamo.variables.BuiltinVariable
    kinds = vars(sys.modules[plain.__module__]).values()
    return next((kind for kind in kinds if getattr(kind, "_fn", None) is setattr), plain)


@contextmanager
def as_compiled() -> Iterator[None]:
    """Inside, ``torch.compiler.is_compiling()`` is true, as Dynamo has it: a plan traces without Dynamo, and what code
    does only where it is not compiled (transformers reads values of masks) would end that."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def numbers_stay_numbers() -> Iterator[None]:
    """Inside, what AOTAutograd traces keeps the numbers that it is given, where it makes tensors of them otherwise and
    ends with an error if they are inputs of a larger graph. The setting of Dynamo's that would say so is read once in
    a process, and is Dynamo's, too."""
    # Makes tensors of a graph's numbers. (torch 2.11+)
    with patch.object(graph_compile, "_apply_tensorify_python_scalars", lambda module: None):
        yield
