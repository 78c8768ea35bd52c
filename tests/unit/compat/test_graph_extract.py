"""A joint graph that is partitioned with fewer copies, against torch's partitioner as it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from lightning_zero.compat import graph_extract
from lightning_zero.compat.compiler import aot_autograd, min_cut_partition
from lightning_zero.compat.graph_extract import skip_graph_copies

Loss = Callable[[Tensor, Tensor], Tensor]


def layers(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(3):
        x = x + nn.functional.gelu((x * x.square().mean(-1, keepdim=True).rsqrt()) @ weight) @ weight.t()
    return x.square().mean()


def drawn(x: Tensor, weight: Tensor) -> Tensor:
    unread = torch.rand_like(x)  # what is drawn and read by nobody is drawn all the same
    del unread
    return nn.functional.dropout(x @ weight, 0.5).sin().sum() + torch.rand(3, device=x.device).sum()


def unread_in_backward(x: Tensor, weight: Tensor) -> Tensor:
    noise = torch.bernoulli(torch.full_like(x, 0.5))
    return ((x + noise) @ weight).sum() + (noise * 3).sum().detach()


def checkpointed(x: Tensor, weight: Tensor) -> Tensor:
    made: Tensor = checkpoint(lambda x: (x @ weight).sin().cos(), x, use_reentrant=False)
    return (made @ weight.t()).square().sum()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)  # edits its buffers

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        made: Tensor = self.norm((x @ weight)[:, :8]).sin()
        return made.sum()


LOSSES: dict[str, Callable[[], Loss]] = {
    "layers": lambda: layers,
    "random numbers": lambda: drawn,
    "not read in backward": lambda: unread_in_backward,
    "checkpointed": lambda: checkpointed,
    "buffers": Normed,
}


def partitioned(loss: Loss, inside: AbstractContextManager[None], x: Tensor) -> tuple[list[str], list[int], Any]:
    """Both halves as text, how often nodes were copied and code was written, and what they compute."""
    found: list[str] = []
    copies = [0, 0]
    plain, recompile = Graph.node_copy, GraphModule.recompile

    def counted(*args: Any) -> Any:
        copies[0] += 1
        return plain(*args)

    def written(module: GraphModule) -> Any:
        copies[1] += 1
        return recompile(module)

    def partition(module: Any, inputs: Any, **settings: Any) -> Any:
        with pytest.MonkeyPatch.context() as patched, inside:
            patched.setattr(Graph, "node_copy", counted)
            patched.setattr(GraphModule, "recompile", written)
            halves = min_cut_partition(module, inputs, **settings)
        found.extend(str(half.graph) for half in halves)
        return halves

    torch._dynamo.reset()
    torch.manual_seed(0)
    x = x.clone()  # torch 2.14 notes at a tensor which of its sizes were symbols, and its next graph has more of them
    weight = torch.linspace(-1, 1, 16 * 24).view(16, 24).requires_grad_()
    backend = aot_autograd(fw_compiler=_boxed, bw_compiler=_boxed, partition_fn=partition)
    result = torch.compile(loss, backend=backend, dynamic=x.shape[0] > 4 or None)(x, weight)
    return found, copies, (result, torch.autograd.grad(result, weight)[0], torch.rand(1))


def _boxed(module: Any, inputs: Any) -> Any:
    def run(given: list[Any]) -> Any:
        return module.forward(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("rows", [4, 6], ids=["fixed", "any length"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.exhaustive_variants("buffers-any length", "layers-fixed", "checkpointed-any length")
def test_halves_are_the_same_and_fewer_nodes_are_copied(name: str, rows: int) -> None:
    x = torch.linspace(-1, 1, rows * 16).view(rows, 16)
    expected, before, results = partitioned(LOSSES[name](), nullcontext(), x)
    found, after, same = partitioned(LOSSES[name](), skip_graph_copies(), x)
    assert found == expected
    assert len(found) == 2
    assert 0 < after[0] < before[0]
    assert after[1] < before[1]
    assert all(torch.equal(one, other) for one, other in zip(results, same, strict=True))


@pytest.mark.parametrize("draws", [False, True], ids=["computed", "drawn"])
def test_a_backward_loses_what_it_does_not_read_but_draws_what_is_not_given(draws: bool) -> None:
    aten, plain = torch.ops.aten, graph_extract.partitioners._extract_graph_with_inputs_outputs
    copies: list[Graph] = []

    def counted(*args: Any, **how: Any) -> Graph:
        copies.append(plain(*args, **how))
        return copies[-1]

    joint = Graph()
    x, tangent = joint.placeholder("primals_1"), joint.placeholder("tangents_1")
    saved = joint.call_function(aten.sin.default, (x,))
    unread = joint.call_function(aten.rand.default, ([3],)) if draws else joint.call_function(aten.cos.default, (x,))
    gradient = joint.call_function(aten.mul.Tensor, (saved, tangent))
    joint.output((unread, gradient))
    asked = joint, [saved, unread, tangent], [gradient], [None], "backward"
    fewer = joint, [saved, tangent], [gradient], [None], "backward"
    again = graph_extract._Backwards(counted)
    again(*asked)
    made = again(*fewer)
    assert str(made) == str(plain(*fewer))
    assert made.find_nodes(op="placeholder")[0].meta is not saved.meta, "what is noted of a forward stays there"
    assert len(copies) == 1 + draws
    again(*asked)
    assert str(again(joint, [tangent, saved], [gradient], [None], "backward")) != str(copies[-2])
    assert len(copies) == 3 + draws, "in another order"


def test_a_backward_is_brought_in_order_where_it_is() -> None:
    """Recomputed work comes where it is read, and what nobody reads is gone, as in the copy that torch makes."""
    aten, reorder = torch.ops.aten, graph_extract.partitioners.reordering_to_mimic_autograd_engine

    def backward() -> GraphModule:
        graph = Graph()
        x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
        early = graph.call_function(aten.sin.default, (x,))
        graph.call_function(aten.cos.default, (x,))
        late = graph.call_function(aten.exp.default, (x,))
        first = graph.call_function(aten.mul.Tensor, (tangent, late))
        graph.output((graph.call_function(aten.mul.Tensor, (first, early)),))
        return GraphModule(nn.Module(), graph)

    expected, made = reorder(backward()), backward()
    with skip_graph_copies():
        assert graph_extract.partitioners.reordering_to_mimic_autograd_engine(made) is made
    made.graph.lint()
    assert str(made.graph) == str(expected.graph)
    assert made.code == expected.code
    assert "cos" not in made.code
    assert len(made.graph.find_nodes(op="call_function", target=aten.mul.Tensor)) == 2


def test_torch_has_its_own_functions_back() -> None:
    names = ("_extract_graph_with_inputs_outputs", "classify_nodes", "reordering_to_mimic_autograd_engine")
    before = [getattr(graph_extract.partitioners, name) for name in names]
    with pytest.raises(ZeroDivisionError), skip_graph_copies():
        assert not any(
            getattr(graph_extract.partitioners, name) is one for name, one in zip(names, before, strict=True)
        )
        raise ZeroDivisionError
    assert [getattr(graph_extract.partitioners, name) for name in names] == before
