"""Residual sums are saved in place of their summands if backward would recompute all of them at once."""

from typing import Any

import pytest
import torch
from functorch.compile import aot_function
from functorch.compile import config as functorch_config
from functorch.compile import min_cut_rematerialization_partition as min_cut_partition
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compat.graphs import DESC, NO_VERSION_CHECK, RECOMPUTE
from lightning_zero.compile.fx_utils import results
from lightning_zero.compile.partitioner.recompute_policy import partitioner_settings
from lightning_zero.compile.partitioner.residual_sums import save_residual_sums

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
LAYERS, WIDTH = 12, 32


class Layer(nn.Module):
    """Like a transformer layer under autocast: narrow products and a wide sum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Linear(*shape, dtype=torch.bfloat16) for shape in ((WIDTH, 96), (96, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return x + self.outer(torch.tanh(self.inner(normed.bfloat16())))


class Run:
    """One pass of these layers, partitioned."""

    def __init__(self, budget: float, prepare: Any = None, saves: bool = True) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        names = [name for name, _ in layers.named_parameters()]
        self.chained = 0
        self.graphs: list[Graph] = []

        def loss(params: list[Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(layers, dict(zip(names, params, strict=True)), x).square().mean()

        def partition(module: Any, inputs: Any, *, num_fwd_outputs: int, **settings: Any) -> Any:
            parts = min_cut_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **settings)
            self.graphs = [part.graph for part in parts]
            self.outputs = num_fwd_outputs
            if prepare is not None:
                prepare(*self.graphs)
            if saves:
                self.chained = save_residual_sums(*self.graphs, num_fwd_outputs)
            for part in parts:
                part.graph.lint()
                part.recompile()
            return parts

        run: Any = aot_function(loss, fw_compiler=lambda m, _: m, bw_compiler=lambda m, _: m, partition_fn=partition)
        with functorch_config.patch(partitioner_settings(budget)):
            found = run([*layers.parameters()], torch.randn(64, WIDTH))
            found.backward()
        self.loss, self.gradients = found.detach(), [parameter.grad for parameter in layers.parameters()]

    def saved(self) -> list[Node]:
        return [node for node in results(self.graphs[0])[self.outputs :] if isinstance(node, Node)]

    def sums(self) -> int:
        """Return the sums that backward recomputes before any gradient of a weight."""
        count = 0
        for node in self.graphs[1].nodes:
            if node.target is torch.ops.aten.mm.default:
                break
            wide = isinstance(node.meta.get("val"), Tensor) and node.meta["val"].shape == (64, WIDTH)
            count += node.target is torch.ops.aten.add.Tensor and wide and node.meta["val"].dtype == torch.float32
        return count


def size(nodes: list[Node]) -> int:
    return sum(node.meta["val"].nbytes for node in nodes if node.op != "placeholder")


@pytest.fixture(scope="module")
def now() -> Run:
    return Run(0.5)


def test_sums_are_saved_in_place_of_their_parts(now: Run) -> None:
    before = Run(0.5, saves=False)
    assert before.sums() > LAYERS / 2 > 3 > now.sums()
    assert now.chained > LAYERS / 2
    gone = {node.name for node in before.saved()} - {node.name for node in now.saved()}
    assert len(gone) > LAYERS / 2
    held = size(before.saved()) + before.sums() * 64 * WIDTH * 4
    assert size(now.saved()) < held - LAYERS / 2 * 64 * WIDTH * 2
    torch.testing.assert_close(now.loss, before.loss, rtol=0, atol=0)
    for ours, theirs in zip(now.gradients, before.gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_graphs_agree_about_what_crosses(now: Run) -> None:
    forward, backward = now.graphs
    given = [node for node in backward.find_nodes(op="placeholder") if not node.name.startswith("tangents")]
    assert [node.name for node in given] == [node.name for node in now.saved()]
    assert all(node.users for node in given)
    for ours, theirs in zip(now.saved(), given, strict=True):
        assert (ours.meta["val"].shape, ours.meta["val"].dtype) == (theirs.meta["val"].shape, theirs.meta["val"].dtype)
    output = next(iter(reversed(forward.nodes)))
    assert len(output.meta[DESC]) == len(results(forward))


@pytest.mark.exhaustive  # values saved by a custom function prevent it
def test_what_computes_nothing_again_is_left_alone() -> None:
    assert Run(1.0).chained == 0


@pytest.mark.exhaustive  # values saved by a custom function prevent it
def test_what_users_want_computed_again_is() -> None:
    def checkpoint(forward: Graph, backward: Graph) -> None:
        for node in backward.nodes:
            node.meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE

    assert Run(0.5, checkpoint).chained == 0


def test_what_a_custom_function_keeps_stays_where_torch_looks_for_it() -> None:
    def keep(forward: Graph, backward: Graph) -> None:
        results(forward)[-1].meta[NO_VERSION_CHECK] = True

    assert Run(0.5, keep).chained == 0
