"""A joint graph in which equal layers were traced once is, node by node, the one in which each was traced."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from lightning_zero.compat.compiler import aot_autograd, min_cut_partition
from lightning_zero.compat.graphs import CUSTOM, FORWARD_MODULES, MODULES, RECOMPUTE, REGION, SIDE
from lightning_zero.compile.outline import NotOutlined, Outline, outline, tracer
from lightning_zero.compile.outline.inline import Inlined

WIDTH = 8
LAYERS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        wide = F.gelu(self.wide(self.norm(x)))
        return x + F.dropout(self.narrow(wide), 0.3, self.training)


class Attending(Block):
    """Is given what all layers share, and needs gradients; several views of one product."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        query, key = self.wide(self.norm(x)).unflatten(-1, (2, 2, WIDTH // 2)).unbind(-3)
        heads = F.scaled_dot_product_attention(
            query.transpose(-2, -3), key.transpose(-2, -3), x[..., None, :, :4], given[0]
        )
        return x + heads.transpose(-2, -3).flatten(-2)


class InPlace(Block):
    """Edits what is its own, and reads what it is given in another form."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        wide = self.wide(x.transpose(-1, -2).contiguous().transpose(-1, -2))
        wide[..., :2].mul_(2.0)
        return torch.relu_(self.narrow(wide)) + x


class Batched(Block):
    """Edits buffers, which are inputs of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return x + self.batch(self.narrow(F.silu(self.wide(x))).flatten(0, 1)).view_as(x)


class Twice(Block):
    """Reads what all layers share in two places."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return x + self.narrow(F.silu(self.wide(given[0] @ x))) * given[0].mean(1, keepdim=True)


class Caching(Block):
    """Returns views of one product to whoever calls the model, as decoders return keys and values."""

    def forward(self, x: Tensor, *given: Tensor) -> Any:
        keys = self.wide(self.norm(x)).unflatten(-1, (2, 2, WIDTH // 2)).transpose(1, 2)[..., 0, :]
        return x + self.narrow(F.gelu(self.wide(x))), keys


class Windowed(Block):
    """Hands the model what needs no gradient and is made of nothing of the layer's, as transformers' caches are told
    how long a window is; reads a constant of its own code; writes to a part of what it made; and calls what does
    nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.window = torch.tensor([3])

    def forward(self, x: Tensor, *given: Tensor) -> Any:
        torch._C._log_api_usage_once("tests.outline")
        length = self.window.to(torch.float64) + 1
        scale = torch.tensor([0.5, 2.0], dtype=x.dtype).repeat(WIDTH // 2)
        order = torch.arange(WIDTH).flip(0)
        order[:2] = torch.arange(2)
        return x + self.narrow(F.gelu(self.wide(x)))[..., order] * scale, length.mul(2)


class Cached(nn.Module):
    def __init__(self, block: type[Block] = Caching) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        keys = []
        for layer in self.layers:
            x, key = layer(x)
            keys.append(key)
        return x.square().sum(), keys


class Stack(nn.Module):
    def __init__(self, block: type[Block], last: Callable[[Tensor], Tensor] = torch.square) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(6, 6))
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.inner(x), self.bias.tanh()
        for layer in self.layers:
            x = layer(x, bias)
        return self.last(x).sum()


class Frozen(Stack):
    """The first two layers are one kind, too few; of the others, one is frozen in part."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.layers[0].requires_grad_(False)
        self.layers.extend([Block() for _ in range(2)])
        self.layers[5].wide.requires_grad_(False)


class Tied(Stack):
    """One layer, time after time."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.layers = nn.ModuleList([self.layers[0]] * LAYERS)


class Mixing(Block):
    """Looks at memory as of another dtype, and calls what returns a tensor and None."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        mixed = torch.view_as_real(torch.fft.fft(x))[..., 0]
        return x + self.heads(mixed, mixed, mixed, need_weights=False)[0]


class Curve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, power: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.power = power
        return x.tanh() * power

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (1 - x.tanh().square()) * ctx.power * grad, None


class Bending(Block):
    """Calls a function with a derivative of its own."""

    def __init__(self, power: float = 2.0) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return x + self.narrow(Curve.apply(self.wide(x), self.power))


class Bent(Stack):
    """Two of the functions differ in their code, and nowhere else."""

    def __init__(self) -> None:
        super().__init__(Bending)
        self.layers.extend([Bending(3.0), Bending(4.0)])


class Permuted(Stack):
    """Layers return what lies in memory as convolutions leave it, and get gradients that do not."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).mT.contiguous().mT
        for layer in self.layers:
            x = layer(x)
        return F.layer_norm(x, (WIDTH,)).square().sum()


class Turned(Stack):
    """The last layer alone gets a gradient in other strides than its result."""

    def __init__(self) -> None:
        super().__init__(Normed)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return F.layer_norm(x.mT, (6,)).square().sum()


class Normed(Block):
    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return self.norm(F.gelu(self.narrow(F.silu(self.wide(x)))))


class Projecting(nn.Module):
    """Equal parts are next to nothing of it."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = x.sin().neg().exp().tanh().cos()
        for number in range(40 * LAYERS):
            x = x * (number + 0.5)
        return x.sum()


def joint_graph(module: nn.Module, outlined: bool, precision: torch.dtype = torch.float32) -> tuple[list[str], int]:
    """The lines of the graph, and how many layers stand in it that were traced once."""
    lines: list[str] = []
    count = 0
    torch.compiler.reset()
    torch.manual_seed(0)
    x = torch.randn(3, 6, WIDTH)

    def found(layers: Outline | None, graph: Graph) -> None:
        nonlocal count
        count = 0 if layers is None else len(layers)
        lines[:] = described(graph)

    with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
        torch.compile(module, backend=backend(outlined, found))(x)
    return lines, count


def backend(outlined: bool, found: Callable[[Outline | None, Graph], None] = lambda *_: None) -> Callable[..., Any]:
    """Of torch.compile. ``found`` is told which layers are in a joint graph that holds them all."""

    def compile_graph(graph: GraphModule, inputs: Any) -> Any:
        layers = outline(graph, tracer("aot_eager")) if outlined else None

        def compiled(layers: Outline | None) -> Any:
            def partition(joint: GraphModule, *args: Any, **settings: Any) -> Any:
                if layers is not None:
                    layers.inline(joint.graph)
                joint.graph.lint()
                found(layers, joint.graph)
                return min_cut_partition(joint, *args, **settings)

            def compiler(half: GraphModule, inputs: Any) -> Any:
                return make_boxed_func(half)

            return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(graph, inputs)

        while layers is not None:
            try:
                return compiled(layers)
            except NotOutlined as error:
                layers = layers.without(error)
        return compiled(None)

    return compile_graph


def described(graph: Graph) -> list[str]:
    """All that passes go by: what is called with what, the memory of the results, whose each node is. A node is called
    by what it computes, wherever it stands."""
    names: dict[Any, str] = {}
    memory: dict[int, str] = {}
    lines: list[str] = []
    regions = sorted({node.meta[REGION] for node in graph.nodes if REGION in node.meta})

    def value(found: Any, name: str) -> str:
        if isinstance(found, Tensor):
            owner = memory.setdefault(found.untyped_storage()._cdata, name)
            return f"{found.dtype}{tuple(found.shape)}{found.stride()}{found.storage_offset()} of {owner}"
        return str([value(part, name) for part in found]) if isinstance(found, list | tuple) else repr(found)

    for node in graph.nodes:
        called = node.name if node.op == "placeholder" else node.target
        name = f"{called} {map_arg((node.args, node.kwargs), lambda read: names[read])}"
        names[node] = hashlib.sha256(name.encode()).hexdigest()[:8]
        modules = [[path for path, _ in (node.meta.get(key) or {}).values()] for key in (MODULES, FORWARD_MODULES)]
        again = [regions.index(node.meta[REGION]), str(node.meta[RECOMPUTE])] if REGION in node.meta else []
        meta = f"{modules} {node.meta.get(CUSTOM)} {node.meta.get(SIDE)} {again} {sorted(node.meta)}"
        lines.append(re.sub("0x[0-9a-f]+", "", f"{name} {value(node.meta.get('val'), names[node])} {meta}"))
    return lines


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: Stack(Block), LAYERS),
        pytest.param(lambda: Stack(InPlace), LAYERS, marks=pytest.mark.slow),
        (lambda: Stack(Batched), 0),
        # Parts of the shared gradient would be added up in another order.
        (lambda: Stack(Twice), 0),
        pytest.param(Frozen, LAYERS, marks=pytest.mark.slow),
        (lambda: Stack(Mixing), LAYERS),
        (Permuted, LAYERS),
        (Bent, LAYERS),
        # The last layer is given a gradient that is one number in all places.
        (lambda: Stack(Block, nn.Identity()), LAYERS - 1),
    ],
    ids=[
        "dropout",
        "edits of its own",
        "edits of buffers",
        "two parts of one gradient",
        "frozen in part",
        "other dtypes",
        "permuted",
        "functions with derivatives",
        "expanded gradient",
    ],
)
def test_the_joint_graph_is_that_of_the_whole(make: Callable[[], nn.Module], count: int) -> None:
    module = make()
    whole, _ = joint_graph(module, False)
    once, found = joint_graph(module, True)
    assert found == count
    assert len(whole) > 100
    assert once == whole


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: Stack(Attending), Tied], ids=["a bias", "weights"])
def test_what_all_layers_read_gets_the_same_sum_of_gradients(make: Callable[[], nn.Module]) -> None:
    module = make()
    whole, _ = joint_graph(module, False)
    once, found = joint_graph(module, True)
    assert found == LAYERS
    assert sorted(once) == sorted(whole)  # each layer's is added behind the layer, and not amid it


@pytest.mark.slow
def test_what_autocast_casts_once_in_all_stays_in_one_graph() -> None:
    module = Stack(Block)
    assert joint_graph(module, True, torch.bfloat16)[1] == 0  # parameters of which no gather stands between


@pytest.mark.slow
def test_layers_that_cannot_be_put_in_place_are_traced_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Stack(Block)
    whole, _ = joint_graph(module, False)
    monkeypatch.setattr("lightning_zero.compile.outline.layers.moved_to", lambda value, moved: value.nothing)
    instead, found = joint_graph(module, True)
    assert found == 0
    assert instead == whole


def test_views_that_a_model_returns_of_each_layer_get_their_gradients() -> None:
    module, x = Cached(), torch.randn(3, 6, WIDTH)
    counts: list[int] = []

    def grads(run: Callable[..., Any]) -> list[Tensor]:
        loss, keys = run(x)
        return list(torch.autograd.grad(loss + sum(key.pow(3).sum() for key in keys), list(module.parameters())))

    torch.compiler.reset()
    once = grads(torch.compile(module, backend=backend(True, lambda layers, _: counts.append(len(layers or ())))))
    assert counts == [LAYERS - 1]  # the first is another kind: what it is given needs no gradient
    torch.testing.assert_close(once, grads(module))


def test_what_needs_no_gradient_and_constants_keep_no_layer_from_being_traced_once() -> None:
    module, x = Cached(Windowed), torch.randn(3, 6, WIDTH, requires_grad=True)
    counts: list[int] = []
    torch.compiler.reset()
    once = torch.compile(module, backend=backend(True, lambda layers, _: counts.append(len(layers or ()))))(x)
    assert counts == [LAYERS - 1]  # the first is another kind: it is given an input of the graph
    plain = module(x)
    torch.testing.assert_close(once, plain)
    weights = [x, *(weight for layer in module.layers for weight in (*layer.wide.parameters(), layer.narrow.weight))]
    torch.testing.assert_close(torch.autograd.grad(once[0], weights), torch.autograd.grad(plain[0], weights))


def test_gradients_in_other_strides_cost_a_trace_or_two_and_not_one_for_each_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def counted(self: Outline, graph: Graph) -> Graph:
        tried.append(len(self))
        return inline(self, graph)

    tried: list[int] = []
    inline = Outline.inline
    monkeypatch.setattr(Outline, "inline", counted)
    assert joint_graph(Permuted(), True)[1] == LAYERS
    assert tried == [LAYERS, LAYERS]
    assert joint_graph(Turned(), True)[1] == LAYERS
    assert tried[2:] == [LAYERS] * 3  # the last in its strides, then those before it in theirs


def test_equal_parts_that_are_next_to_nothing_are_left_where_they_are() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Projecting())
    assert joint_graph(module, True)[1] == 0  # to trace the graph once more, for one that does not fit, takes longer


def test_a_kind_of_layers_that_does_not_fit_is_given_up_at_its_second_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfit(self: Inlined, standin: Node) -> None:
        tried.append(self._number)
        raise NotOutlined("it does not fit", self._number)

    tried: list[int] = []
    monkeypatch.setattr(Inlined, "forward", unfit)
    assert joint_graph(Stack(Block), True)[1] == 0
    assert len(tried) == 2  # of four: each costs another trace of the whole graph
