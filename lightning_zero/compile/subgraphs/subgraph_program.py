"""Run the subgraphs of a graph, and the nodes between them, as generated Python code.

Each value is released before the last subgraph that reads it begins, so that the subgraph can free it. Saved tensors
therefore live no longer than in one graph. Helpers at the end make Inductor compile and serialize subgraphs.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from lightning_zero.compat.compiler import (
    BypassCache,
    CompiledFxGraph,
    CompiledFxGraphConstants,
    FxGraphCache,
    OutputCode,
    TracingContext,
    compile_fx_inner,
    functorch_config,
    inductor_config,
)
from lightning_zero.compat.tensors import OpOverload, draw_seeds
from lightning_zero.compile.fx_utils import output_node
from lightning_zero.compile.subgraphs.subgraph import Subgraph

_numbers = count()
_SUBGRAPH = "lightning_zero_piece"  # no node has this name


class SubgraphProgram(OutputCode):
    """Compiled form of a cut graph for AOTAutograd, whose cache stores it with its subgraphs.

    Args:
        module: the whole graph, for its inputs, outputs and constants.
        compiled: one per subgraph; takes a list of inputs, which it empties, and returns its outputs.

    Attributes:
        calls: number of subgraph calls.
    """

    def __init__(
        self, module: GraphModule, steps: Sequence[Subgraph | Node], compiled: Sequence[Callable[[list[Any]], Any]]
    ) -> None:
        super().__init__()
        writer = _Writer(module, steps)
        self.code = writer.write(compiled)
        self.calls = len(compiled)
        self._boxed_call = True  # on the instance, otherwise wrappers would not have it
        self._subgraphs = {name: value for name, value in writer.names.items() if name.startswith(_SUBGRAPH)}
        self._others = {name: value for name, value in writer.names.items() if name not in self._subgraphs}
        self._link()
        results: Any = output_node(module.graph).args[0]
        report_strides([_strides(result.meta.get("val")) if isinstance(result, Node) else None for result in results])

    def _link(self) -> None:
        file = f"<lightning_zero program {next(_numbers)}>"
        linecache.cache[file] = (len(self.code), None, self.code.splitlines(True), file)  # for tracebacks
        names = {**self._others, **self._subgraphs}
        exec(compile(self.code, file, "exec"), names)
        self._run: Callable[[list[Any]], Any] | None = names["run"]

    def __call__(self, inputs: Any) -> Any:
        assert self._run is not None
        return self._run(inputs)

    def prepare_for_serialization(self) -> None:
        """Make a copy picklable."""
        self._run = None
        self._subgraphs = {name: pack_subgraph(subgraph) for name, subgraph in self._subgraphs.items()}
        self._others = {name: _named(value) for name, value in self._others.items()}

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Restore the program after it was loaded from a cache."""
        if self._run is None:
            self._subgraphs = {
                name: unpack_subgraph(subgraph, graph_kwargs) for name, subgraph in self._subgraphs.items()
            }
            self._others = {n: v.find() if isinstance(v, _Op) else v for n, v in self._others.items()}
            self._link()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Do nothing: each subgraph has its own bundle."""


class _Writer:
    def __init__(self, module: GraphModule, steps: Sequence[Subgraph | Node]) -> None:
        self._graph: Graph = module.graph
        self._steps = steps
        self._last = self._last_reads()
        self.names: dict[str, Any] = {}
        self._name_of: dict[int, str] = {}  # by id of the value, which ``names`` keeps alive
        for node in self._graph.find_nodes(op="get_attr"):
            value = self.names[node.name] = attrgetter(str(node.target))(module)
            self._name_of.setdefault(id(value), node.name)

    def _last_reads(self) -> Mapping[Node, int]:
        last: dict[Node, int] = {}
        for number, step in enumerate(self._steps):
            reads = step.inputs if isinstance(step, Subgraph) else step.all_input_nodes
            last.update(dict.fromkeys(reads, number))
            if isinstance(step, Subgraph):
                for made in step.outputs:
                    last.setdefault(made, number)
            else:
                last.setdefault(step, number)
        last.update(dict.fromkeys(output_node(self._graph).all_input_nodes, len(self._steps)))
        return last

    def write(self, compiled: Sequence[Callable[[list[Any]], Any]]) -> str:
        inputs = [node.name for node in self._graph.find_nodes(op="placeholder")]
        lines = [f"[{', '.join(inputs)}] = inputs", "inputs.clear()"]
        unread = [n.name for n in self._graph.find_nodes(op="placeholder") if n not in self._last]
        lines += [f"del {', '.join(unread)}"] if unread else []
        functions = iter(compiled)
        for number, step in enumerate(self._steps):
            lines += self._call(number, step, functions) if isinstance(step, Subgraph) else self._op(number, step)
        lines.append(f"return {self._text(output_node(self._graph).args[0])}")
        return "def run(inputs):\n" + "".join(f"    {line}\n" for line in lines)

    def _call(self, number: int, subgraph: Subgraph, functions: Any) -> list[str]:
        name = self._name(next(functions), _SUBGRAPH)
        lines = [f"arguments = [{', '.join(node.name for node in subgraph.inputs)}]"]
        lines += self._free(number, subgraph.inputs)
        results = ", ".join(node.name for node in subgraph.outputs)
        lines.append(f"[{results}] = {name}(arguments)" if results else f"{name}(arguments)")
        lines += self._free(number, [node for node in subgraph.outputs if self._last[node] == number])
        return lines

    def _op(self, number: int, node: Node) -> list[str]:
        name = self._name(_seeds if node.target is draw_seeds else node.target, "op")
        arguments = [self._text(value) for value in node.args]
        arguments += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
        return [
            f"{node.name} = {name}({', '.join(arguments)})",
            *self._free(number, [*node.all_input_nodes, *([node] if self._last[node] == number else [])]),
        ]

    def _free(self, number: int, nodes: Sequence[Node]) -> list[str]:
        names = [node.name for node in dict.fromkeys(nodes) if self._last[node] == number and node.op != "get_attr"]
        return [f"del {', '.join(names)}"] if names else []

    def _name(self, value: Any, kind: str) -> str:
        name = self._name_of.setdefault(id(value), f"{kind}_{len(self.names)}")
        self.names[name] = value
        return name

    def _text(self, value: Any) -> str:
        if isinstance(value, Node):
            return value.name
        if type(value) is int:
            return repr(value)
        if isinstance(value, list | tuple):
            inside = "".join(f"{self._text(part)}, " for part in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        return self._name(value, "constant")


@dataclass(frozen=True)
class _Op:
    namespace: str
    name: str
    overload: str

    def find(self) -> OpOverload:
        return getattr(getattr(getattr(torch.ops, self.namespace), self.name), self.overload)


def _strides(value: Any) -> tuple[int | SymInt, ...] | None:
    """Return a result's strides for a backward that reads it; None if they are as traced or not yet known.

    Symbols stay symbols. Numbers would specialize backward to this batch, and missing strides would be those before
    Inductor's padding.
    """
    strides = value.stride() if isinstance(value, Tensor) else ()
    if not [stride for stride in strides if type(stride) is not int]:
        return strides or None
    return None if any(map(free_unbacked_symbols, strides)) else tuple(strides)


def _named(value: Any) -> Any:
    if isinstance(value, Tensor):
        raise BypassCache("a constant of the graph is a tensor")
    if isinstance(value, OpOverload):
        return _Op(value.namespace, value.overloadpacket.__name__, value._overloadname)
    return value


def _seeds(count: int, device: torch.device) -> Tensor:
    """Draw seeds as Inductor does in a graph that stays whole; its own op draws others."""
    return torch.randint(-(2**63), 2**63 - 1, [count], device=device)


Compiled = Callable[[list[Any]], Any]


def compile_subgraph(module: GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> Compiled:
    """Compile a subgraph to code that takes a list of inputs, which it empties, and returns its outputs."""
    # Subgraphs are also cached one by one, for other plans of the same layers.
    with subgraph_context(), functorch_config.patch(bundled_autograd_cache=False):
        return compile_fx_inner(module, inputs, **settings)


@contextmanager
def subgraph_context() -> Iterator[None]:
    """Return a context that hides the whole graph from Inductor.

    Hidden are the strides of its results, which are reported once, its passes, and the indices of donated inputs.
    """
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
    """Report the strides of the whole graph's results to its compiler; None for strides as traced."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        assert not context.output_strides
        context.output_strides.extend(strides)


def pack_subgraph(subgraph: Any) -> Any:
    """Return a picklable form of a subgraph."""
    if isinstance(subgraph, CompiledFxGraph):
        subgraph = copy(subgraph)
        subgraph.prepare_for_serialization()
    return subgraph


def unpack_subgraph(subgraph: Any, settings: Any) -> Compiled:
    """Restore the result of :func:`pack_subgraph`; ``settings`` are those of :func:`compile_subgraph`."""
    if isinstance(subgraph, CompiledFxGraph):
        constants = CompiledFxGraphConstants()
        found, _ = FxGraphCache.cache_hit_post_compile(subgraph, {}, constants)
        if found is None:
            raise RuntimeError("A compiled subgraph could not be loaded again. Empty the compiler's cache.")
        with subgraph_context():
            found.post_compile((), constants, settings)
        return found
    return subgraph
