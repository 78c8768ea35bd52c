"""Products of linear layers: found in graphs, chosen by shape and cost, and replaced by fp8 ones."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compat.graphs import AC_GRAPH_ID, RECOMPUTE
from lightning_zero.compile.fp8 import convert_products
from lightning_zero.compile.fp8.linear_products import find_products
from lightning_zero.compile.fp8.product_choice import ChoiceRules, choose_products
from lightning_zero.compile.scaled_mm_op import SCALED_MM
from lightning_zero.compile.subgraphs import cut, is_worth_cutting
from lightning_zero.config import CompileConfig
from lightning_zero.native.ops import OPS
from lightning_zero.sharding.weight_format import DEQUANTIZE, WeightKind
from tests.unit.compile.fp8.linear_graphs import BF16, Layers, called, cast
from tests.unit.compile.graphs import Builder, aten

ALL = ("forward", "input_gradient", "weight_gradient")


def choices(graph: Graph, **rules: object) -> dict[tuple[str, str], str]:
    given = ChoiceRules(**{"products": ALL, "min_gain": 0.0} | rules)  # type: ignore[arg-type]
    return {(choice.product.weight, choice.product.kind): choice.reason for choice in choose_products(graph, given)}


def reasons(graph: Graph, **rules: object) -> dict[str, str]:
    return {f"{weight} {kind}": reason for (weight, kind), reason in choices(graph, **rules).items() if reason}


def converted(graph: Graph, **options: object) -> Graph:
    config = CompileConfig(**{"linear_dtype": "fp8", "fp8_min_gain": 0.0} | options)  # type: ignore[arg-type]
    graph = convert_products(graph, config)
    graph.lint()
    return graph


def test_each_layer_has_three_products() -> None:
    found = find_products(Layers(48, 32).linear("a", 64).linear("b", 16).done())
    assert [(product.weight, product.kind, product.sizes) for product in found] == [
        ("net.a", "forward", (48, 32, 64)),
        ("net.b", "forward", (48, 64, 16)),
        ("net.b", "weight_gradient", (16, 48, 64)),
        ("net.b", "input_gradient", (48, 16, 64)),
        ("net.a", "weight_gradient", (64, 48, 32)),
        ("net.a", "input_gradient", (48, 64, 32)),
    ]


def test_products_without_a_weight_are_not_found() -> None:
    b = Builder()
    x, part = b.input("x", 32, 32, dtype=BF16), b.gather(b.shard("a", 2048), 64, 32, dtype=BF16)
    y = b.call(aten.mm.default, x, x)
    z = b.call(aten.mm.default, x, b.call(aten.slice.Tensor, part, 0, 0, 32))
    assert not find_products(b.done(y, z))


def test_sizes_that_do_not_fit_are_named() -> None:
    assert not reasons(Layers(48, 32).linear("a", 64).linear("b", 32).done())
    unfit = "24 outputs, not a multiple of 16"
    found = reasons(Layers(48, 32).linear("a", 24).done())
    assert found == {f"net.a {kind}": unfit for kind in ALL}
    # The tokens are contracted in the weight's gradient only.
    found = reasons(Layers(40, 32).linear("a", 32).done())
    assert found == {"net.a weight_gradient": "40 tokens, not a multiple of 16"}
    # Nothing is the largest of no elements.
    assert set(reasons(Layers(0, 32).linear("a", 32).done()).values()) == {"no elements"}


def test_layers_stay_in_16_bits_by_name_and_by_product() -> None:
    graph = Layers(48, 32).linear("a", 64).linear("b", 32).done()
    assert {
        weight for weight, kind in choices(graph, exclude=("*.a",)) if choices(graph, exclude=("*.a",))[weight, kind]
    } == {"net.a"}
    found = reasons(graph, products=("forward", "weight_gradient"))
    assert found == {f"net.{name} input_gradient": "left out of fp8_products" for name in "ab"}


def test_the_output_head_stays_in_16_bits() -> None:
    graph = Layers(48, 32).linear("a", 64).linear("b", 32).linear("head", 128).done()
    assert set(reasons(graph).values()) == {"the output head"}
    assert {key.split()[0] for key in reasons(graph)} == {"net.head"}


def test_a_weight_that_an_embedding_reads_stays_in_16_bits() -> None:
    layers = Layers(48, 32)
    b = layers.builder
    _, weight = layers.weight("a", 64, 32)
    layers.x = b.call(aten.embedding.default, weight, b.input("ids", 48, dtype=torch.int64))
    assert set(reasons(layers.linear("a", 64).linear("b", 32).done()).values()) == {"an embedding reads the weight"}


def test_float32_layers_stay() -> None:
    graph = Layers(48, 32, torch.float32).linear("a", 32).done()
    assert set(reasons(graph).values()) == {"computed in float32"}


@pytest.mark.parametrize(("tokens", "width", "gains"), [(4096, 4096, True), (4096, 512, False), (64, 4096, False)])
def test_layers_whose_casts_cost_more_are_declined(tokens: int, width: int, gains: bool) -> None:
    graph = Layers(tokens, width).linear("a", width).linear("b", width).done()
    found = reasons(graph, min_gain=1.0)
    assert set(found.values()) == (set() if gains else {"its casts would take longer than fp8 saves"})


def test_an_operand_of_several_products_is_cast_once() -> None:
    graph = converted(Layers(48, 32).linear("a", 64).linear("b", 32).done())
    # Two weights, two activations and two gradients.
    assert len(called(graph, aten.amax.default)) == 6
    fp8 = [
        node for node in graph.nodes if node.target is cast and node.args[1] in (torch.float8_e4m3fn, torch.float8_e5m2)
    ]
    assert [node.args[1] for node in fp8].count(torch.float8_e5m2) == 2
    assert len(fp8) == 6
    # Transposed copies: of both activations, both gradients and both weights.
    assert len(called(graph, aten.clone.default)) == 6


def test_layers_of_one_3d_activation_share_its_cast_and_its_cost() -> None:
    """Each of them flattens and casts the activation by nodes of its own."""

    def graph() -> Graph:
        layers = Layers(1, 1)
        b = layers.builder
        x, outputs = b.input("x", 2, 1024, 1024), []
        for name in "qkv":
            _, weight = layers.weight(name, 1024, 1024)
            rows = b.call(aten.view.default, b.call(cast, x, BF16), [2048, 1024])
            outputs.append(b.call(aten.mm.default, rows, b.call(aten.t.default, weight)))
        return b.done(*outputs, outputs[0])

    assert len(called(converted(graph()), aten.amax.default)) == 4  # of three weights and one activation
    products = find_products(graph())
    assert len({product.left for product in products}) == 1


def test_on_a_gpu_operands_have_the_layout_of_scaled_products() -> None:
    graph = converted(Layers(48, 64).linear("a", 32).done())
    products = called(graph, SCALED_MM)
    assert len(products) == 3
    for node in products:
        left, right, *_, dtype, _ = (arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args)
        assert left.is_contiguous()
        assert right.is_contiguous()
        assert dtype is BF16 is node.meta["val"].dtype
    assert [node.args[-1] for node in products] == [True, False, False]  # fast accumulation in forward only
    assert [node.args[0].meta["val"].dtype for node in products] == [  # type: ignore[union-attr]
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e5m2,
    ]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_packed_weights_are_dequantized_in_fp8_in_the_layout_of_each_product(kind: WeightKind) -> None:
    graph = Layers(48, 64).pack("a", 32, 64, kind).linear("a", 32).linear("b", 16).done()
    graph = converted(graph, fp8_products=("forward", "input_gradient"), fp8_exclude=("net.b",), fp8_health=True)
    weights = called(graph, DEQUANTIZE)
    assert [node.meta["val"].shape for node in weights] == [(32, 64), (64, 32)]
    assert [product.args[1] for product in called(graph, SCALED_MM)] == weights
    assert {node.meta["val"].dtype for node in weights} == {torch.float8_e4m3fn}  # none has 16 bits
    assert {node.meta[RECOMPUTE] for node in weights} == {CheckpointPolicy.MUST_RECOMPUTE}
    # The graph computes maxima of the activation and of the gradient. The packed weight contains its maximum.
    assert len(called(graph, aten.amax.default)) == 2
    factors = {node.args[4] for node in weights}
    scales = {product.args[3] for product in called(graph, SCALED_MM)}
    for [number] in (factors, scales):
        assert number.meta[RECOMPUTE] is CheckpointPolicy.MUST_SAVE  # type: ignore[union-attr]
    notes = [node for node in called(graph, OPS["fp8_health"].overload) if node.args[5] == 1]
    assert [(node, node.args[2:4]) for node in notes] == [(*scales, (None, None))]


def test_a_packed_weight_that_16_bit_products_read_too_is_dequantized_for_both() -> None:
    graph = Layers(48, 64).pack("a", 32, 64, "nf4").linear("a", 32).linear("b", 16).done()
    graph = converted(graph, fp8_products=("forward",))
    assert [node.meta["val"].dtype for node in called(graph, DEQUANTIZE)] == [BF16, torch.float8_e4m3fn]


def test_by_row_packed_weights_are_dequantized_in_16_bits_and_cast() -> None:
    graph = Layers(48, 64).pack("a", 32, 64, "nf4").linear("a", 32).linear("b", 16).done()
    graph = converted(graph, fp8_products=("forward", "input_gradient"), fp8_exclude=("net.b",), fp8_recipe="rowwise")
    assert [node.meta["val"].dtype for node in called(graph, DEQUANTIZE)] == [BF16]
    assert len(called(graph, SCALED_MM)) == 2


def test_casts_of_packed_weights_cost_nothing() -> None:
    """Few tokens gain little, and the cast of another weight takes longer."""
    layers = Layers(512, 1024).pack("a", 4096, 1024, "nf4").linear("a", 4096).linear("b", 4096).linear("c", 1024)
    found = choices(layers.done(), min_gain=1.0)
    assert not any(reason for (weight, _), reason in found.items() if weight == "net.a")
    assert all(reason for (weight, _), reason in found.items() if weight == "net.c")


def test_gradients_may_be_e4m3() -> None:
    graph = converted(Layers(48, 64).linear("a", 32).done(), fp8_gradient_format="e4m3")
    assert {node.args[0].meta["val"].dtype for node in called(graph, SCALED_MM)} == {torch.float8_e4m3fn}  # type: ignore[union-attr]


def test_by_row_each_side_of_a_product_has_a_scale_for_each_row() -> None:
    graph = converted(Layers(48, 64).linear("a", 32).done(), fp8_recipe="rowwise")
    products = called(graph, SCALED_MM)
    for node in products:
        left, right, *scales, bias, _, _ = (arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args)
        assert [scale.numel() for scale in scales] == [left.shape[0], right.shape[0]]
        assert all(scale.is_contiguous() and scale.dtype is torch.float32 for scale in scales)
        assert left.is_contiguous()
        assert right.is_contiguous()
    assert len(products) == 3
    # Each matrix has two casts, because it is contracted along both dimensions; but see the next test.
    assert len(called(graph, aten.amax.default)) == 6


def test_by_row_a_gradient_on_the_right_is_e4m3() -> None:
    """torch's rowwise kernels take e5m2 on the left only. ``y = x @ w`` has ``dw = x.T @ dy``."""
    b = Builder()
    shard, x, dy = b.shard("a", 2048), b.input("x", 48, 64, dtype=BF16), b.input("tangents_1", 48, 32, dtype=BF16)
    weight = b.gather(shard, 64, 32, dtype=BF16)
    y, dw = b.call(aten.mm.default, x, weight), b.call(aten.mm.default, b.call(aten.t.default, x), dy)
    dx = b.call(aten.mm.default, dy, b.call(aten.t.default, weight))
    graph = converted(
        b.done(y, dx, b.reduce(b.call(cast, dw, torch.float32), shard)), fp8_recipe="rowwise", fp8_products=ALL
    )
    formats = [[arg.meta["val"].dtype for arg in node.args[:2]] for node in called(graph, SCALED_MM)]  # type: ignore[union-attr]
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert formats == [[e4m3, e4m3], [e4m3, e4m3], [e5m2, e4m3]]


def test_by_row_weight_gradients_can_stay_in_16_bits() -> None:
    graph = converted(
        Layers(48, 64).linear("a", 32).done(), fp8_recipe="rowwise", fp8_products=("forward", "input_gradient")
    )
    assert len(called(graph, aten.amax.default)) == 4  # the weight's by rows and by columns, one of x, one of dy


@pytest.mark.parametrize(("tokens", "width", "gains"), [(4096, 4096, True), (4096, 2048, False)])
def test_by_row_more_layers_are_declined(tokens: int, width: int, gains: bool) -> None:
    def graph() -> Graph:
        return Layers(tokens, width).linear("a", width).linear("b", width).done()

    assert not reasons(graph(), min_gain=1.0)
    assert bool(reasons(graph(), min_gain=1.0, by_row=True)) is not gains


def test_graphs_with_health_are_cut_into_layers() -> None:
    layers = Layers(48, 64)
    for number in range(8):
        layers.linear(f"l{number}", 64)
    graph = converted(layers.done(), fp8_health=True)
    assert is_worth_cutting(graph)
    steps = cut(graph)
    assert steps is not None
    assert not {step.target for step in steps if isinstance(step, Node)} & {OPS["fp8_health"].overload}


def test_health_is_noted_by_matrix_in_graphs_that_have_a_backward() -> None:
    graph = converted(Layers(48, 64).linear("a", 32).linear("b", 32).done(), fp8_health=True)
    notes = called(graph, OPS["fp8_health"].overload)
    found = sorted((node.args[4].name, node.args[5]) for node in notes)  # type: ignore[union-attr]
    assert found == [(name, matrix) for name in "ab" for matrix in range(3)]
    used = {scale for product in called(graph, SCALED_MM) for scale in product.args[2:4]}
    assert used == set(notes)  # so that graphs keep them
    for note in notes:  # backward must not repeat those of forward
        kept = note.meta.get(RECOMPUTE) is CheckpointPolicy.MUST_SAVE
        assert kept is (note.args[5] != 2)
    evaluation = Layers(48, 64).linear("a", 32)
    graph = converted(evaluation.builder.done(evaluation.x), fp8_health=True)
    assert called(graph, SCALED_MM)
    assert not called(graph, OPS["fp8_health"].overload)


def test_casts_of_weights_are_recomputed_and_their_scales_saved() -> None:
    graph = Layers(48, 64).linear("a", 32).done()
    [weight] = [node for node in graph.nodes if node.target is cast and node.args[1] is BF16]
    weight.meta |= {AC_GRAPH_ID: 7, RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE}
    graph = converted(graph)
    forward = called(graph, SCALED_MM)[0]
    copy, scale = forward.args[1], forward.args[3]
    assert isinstance(copy, Node)
    assert isinstance(scale, Node)
    assert (copy.meta[AC_GRAPH_ID], copy.meta[RECOMPUTE]) == (7, CheckpointPolicy.MUST_RECOMPUTE)
    assert scale.meta[RECOMPUTE] is CheckpointPolicy.MUST_SAVE


def test_casts_in_checkpointed_regions_are_recomputed() -> None:
    graph = Layers(48, 32).linear("a", 64).linear("b", 32).done()
    policy = {AC_GRAPH_ID: 3, RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE}
    called(graph, aten.mm.default)[0].meta |= policy
    graph = converted(graph)
    inside, outside = called(graph, SCALED_MM)[:2]
    assert {key: inside.args[0].meta[key] for key in policy} == policy  # type: ignore[union-attr]
    assert RECOMPUTE not in outside.args[0].meta  # type: ignore[union-attr]


def test_without_the_option_nothing_changes() -> None:
    graph = converted(Layers(48, 64).linear("a", 32).done(), linear_dtype=None)
    assert len(called(graph, aten.mm.default)) == 3
    assert not called(graph, aten.amax.default)
