"""Torch writes and reads the keys of ``compat/graphs.py`` in graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from functorch.compile import min_cut_rematerialization_partition as min_cut_partition
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_zero.compat.compiler import aot_autograd
from lightning_zero.compat.graphs import (
    AC_GRAPH_ID,
    CHECKPOINT_POLICY,
    CHECKPOINT_POLICY_HASH,
    CUSTOM,
    DESC,
    EXAMPLE_VALUE,
    GRAPH_ARG,
    MUST_BE_IN_BACKWARD,
    NN_MODULE_STACK,
    NO_VERSION_CHECK,
    PARTITIONER_TAG,
    RECOMPUTE,
    TANGENTS,
    USER_VISIBLE_OUTPUTS,
)

aten = torch.ops.aten
Graphs = dict[str, list[Node]]


def nothing(nodes: list[Node]) -> None:
    pass


def graphs_of(
    module: Callable[..., Any],
    *inputs: Tensor,
    tag: Callable[[list[Node]], None] = nothing,
    look: Callable[[list[Node]], None] = nothing,
) -> Graphs:
    """Return the nodes of Dynamo's graph, of the joint graph, and of forward and backward.

    ``look`` is called with Dynamo's graph, and ``tag`` may mark the joint one.
    """
    found: Graphs = {}

    def partition(module: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        tag(list(module.graph.nodes))
        found["joint"] = list(module.graph.nodes)
        return min_cut_partition(module, inputs, **kwargs)

    def noted(kind: str) -> Callable[..., Any]:
        def compiler(module: GraphModule, inputs: Any) -> Any:
            found[kind] = list(module.graph.nodes)
            return make_boxed_func(module.forward)

        return compiler

    inner = aot_autograd(fw_compiler=noted("forward"), bw_compiler=noted("backward"), partition_fn=partition)

    def backend(module: GraphModule, inputs: Any) -> Any:
        found["dynamo"] = list(module.graph.nodes)
        look(found["dynamo"])
        for node in module.graph.nodes:
            if node.op == "call_function":
                node.meta[CUSTOM] = {**node.meta.get(CUSTOM, {}), "said": node.name}
        return inner(module, inputs)

    torch._dynamo.reset()
    torch.compile(module, backend=backend, fullgraph=True)(*inputs).sum().backward()
    return found


def calls(nodes: list[Node], op: Any) -> list[Node]:
    return [node for node in nodes if node.target is op]


def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w).sin()


@pytest.mark.parametrize(
    ("policy", "in_backward"), [(CheckpointPolicy.MUST_SAVE, 2), (CheckpointPolicy.MUST_RECOMPUTE, 3)]
)
def test_the_partitioner_reads_policies_in_a_region(policy: CheckpointPolicy, in_backward: int) -> None:
    def tag(nodes: list[Node]) -> None:
        for node in nodes:
            if node.op == "call_function":
                node.meta[AC_GRAPH_ID] = 1
        calls(nodes, aten.mm.default)[0].meta[RECOMPUTE] = policy

    x, w = (torch.ones(4, 4, requires_grad=True) for _ in range(2))
    found = graphs_of(product, x, w, tag=tag)
    assert len(calls(found["backward"], aten.mm.default)) == in_backward


def _chosen() -> Any:
    return create_selective_checkpoint_contexts([aten.mm.default])


def test_the_graph_of_a_region_holds_what_users_choose_to_save_of_it() -> None:
    def noted(module: GraphModule, inputs: Any) -> Any:
        found.append({name: part.meta.get(CHECKPOINT_POLICY) for name, part in module.named_children()})
        return module.forward

    found: list[dict[str, Any]] = []
    torch._dynamo.reset()
    run = torch.compile(lambda x, w: checkpoint(product, x, w, use_reentrant=False, context_fn=_chosen), backend=noted)
    run(torch.ones(4, 4), torch.ones(4, 4, requires_grad=True))
    assert [list(policies.values()) for policies in found] == [[_chosen]]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="such a choice has no name there")
def test_torch_calls_that_choice_by_the_name_we_do() -> None:
    from torch._functorch._aot_autograd.autograd_cache import _get_context_fn_cache_hash

    def named() -> Any:
        return _chosen()

    setattr(named, CHECKPOINT_POLICY_HASH, "products")
    assert _get_context_fn_cache_hash(named) == "products"


class _Made(torch.autograd.Function):
    """The gradient does not depend on the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.mm(ctx.saved_tensors[0], ctx.saved_tensors[0])


@pytest.mark.parametrize("told", [False, True])
def test_tagged_nodes_are_in_backward(told: bool) -> None:
    def tag(nodes: list[Node]) -> None:
        for node in calls(nodes, aten.mm.default) if told else ():
            node.meta[PARTITIONER_TAG] = MUST_BE_IN_BACKWARD

    found = graphs_of(_Made.apply, torch.ones(4, 4, requires_grad=True), tag=tag)
    assert bool(calls(found["backward"], aten.mm.default)) is told


@pytest.fixture(scope="module")
def of_product() -> Graphs:
    return graphs_of(product, *(torch.ones(4, 4, requires_grad=True) for _ in range(2)))


def test_a_backward_is_known_by_its_inputs(of_product: Graphs) -> None:
    for kind, expected in (("joint", True), ("forward", False), ("backward", True)):
        inputs = [node.name for node in of_product[kind] if node.op == "placeholder"]
        assert any(name.startswith(TANGENTS) for name in inputs) is expected, kind


def test_custom_notes_are_copied_to_later_graphs(of_product: Graphs) -> None:
    [said] = [node.name for node in of_product["dynamo"] if node.target is torch.mm]
    for kind in ("joint", "forward"):
        assert calls(of_product[kind], aten.mm.default)[0].meta[CUSTOM]["said"] == said


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mul_(2)


@pytest.fixture(scope="module")
def of_module() -> tuple[Graphs, list[Any]]:
    """Graphs, and the sources of the inputs of Dynamo's."""
    module, sources = Outer(), []

    def call(x: Tensor) -> Tensor:  # as modules are compiled here
        return module._call_impl(x)

    def look(nodes: list[Node]) -> None:
        sources.extend(node.meta[GRAPH_ARG].source for node in nodes if node.op == "placeholder")

    return graphs_of(call, torch.ones(4, 4), look=look), sources


def test_dynamos_inputs_say_where_they_come_from(of_module: tuple[Graphs, list[Any]]) -> None:
    names = [source.name() if callable(source.name) else source.name for source in of_module[1]]
    assert any("_modules['inner']" in name and "_parameters['weight']" in name for name in names), names


def test_dynamos_values_share_storages_as_tensors_do(of_module: tuple[Graphs, list[Any]]) -> None:
    edited = next(node for node in of_module[0]["dynamo"] if node.target == "mul_")
    made = edited.args[0]
    assert isinstance(made, Node)
    before, after = (node.meta[EXAMPLE_VALUE].untyped_storage()._cdata for node in (made, edited))
    assert before == after


def test_nodes_know_the_modules_they_were_called_in(of_module: tuple[Graphs, list[Any]]) -> None:
    joint = of_module[0]["joint"]
    called = next(node for node in joint if node.target is aten.mm.default and NN_MODULE_STACK in node.meta)
    path, kind = next(reversed(called.meta[NN_MODULE_STACK].values()))
    assert path == "L['module'].inner.0"
    assert kind is nn.Linear


def test_inductor_notes_which_outputs_users_see() -> None:
    import inspect

    from torch._inductor import compile_fx

    assert f'"{USER_VISIBLE_OUTPUTS}"' in inspect.getsource(compile_fx)


def test_aotautograd_describes_results(of_module: tuple[Graphs, list[Any]]) -> None:
    output = of_module[0]["forward"][-1]
    assert len(output.meta[DESC]) == len(output.args[0])  # type: ignore[arg-type]


def test_unchecked_values_follow_other_saved_values() -> None:
    import inspect

    from torch._functorch import partitioners

    assert f'"{NO_VERSION_CHECK}"' in inspect.getsource(partitioners)
