"""Choose the products that gain from fp8; the others stay in 16 bits, each with a reason.

The choice depends on shapes and on constants only, so that every rank, every run and a CPU make the same one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from lightning_zero.compile.fp8.linear_products import (
    LinearProduct,
    Operand,
    dequantization,
    find_products,
    last_products,
    reads_embedding,
)
from lightning_zero.profiling.graph_tensors import size_hint

# Elements. torch._scaled_mm needs rows of whole 16-byte units in both operands and in the result.
ALIGNMENT = 16
_DTYPES = (torch.bfloat16, torch.float16)
# Floating-point operations per second of products of 8192 x 8192 matrices, measured on one H200. Those by rows are in
# forward, which has fast accumulation, and in backward.
BF16_FLOPS_PER_S, FP8_FLOPS_PER_S = 805e12, 1517e12
ROWWISE_FLOPS_PER_S, ROWWISE_GRADIENT_FLOPS_PER_S = 1559e12, 1282e12
# Bytes per second of a fused kernel that casts. Nominal for an H200.
CAST_BYTES_PER_S = 4e12
# Bytes that a cast moves for each element in each layout: read for the maximum and for the cast, write, and half of it
# fused with the kernel that computes the matrix.
CAST_BYTES = 4
# Bytes with a scale for each column, counted: kernels that compute rows cannot be fused with such a cast.
COLUMN_CAST_BYTES = 5
# Seconds of a kernel launch in a replayed CUDA graph; a cast adds one for each layout.
LAUNCH_S = 1e-6


@dataclass(frozen=True)
class ChoiceRules:
    """Options of the choice; see ``linear_dtype`` and the options ``fp8_*`` of ``Tuning``.

    Attributes:
        products: kinds of products that may be in fp8.
        exclude: patterns of names of weights that stay in 16 bits.
        min_gain: a weight's products are in fp8 if they save at least this many times the seconds of their casts.
        by_row: operands have a scale for each row or column.
    """

    products: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    min_gain: float = 1.0
    by_row: bool = False

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of products that can be in fp8; results of torch 2.11's rowwise ones are bfloat16."""
        return _DTYPES[:1] if self.by_row else _DTYPES


@dataclass(frozen=True)
class Choice:
    """Decision about one product; ``reason`` says why it stays in 16 bits, and is empty if it does not."""

    product: LinearProduct
    reason: str

    @property
    def is_fp8(self) -> bool:
        """Return True if the product is computed in fp8."""
        return not self.reason


def choose_products(graph: Graph, rules: ChoiceRules) -> list[Choice]:
    """Return a choice for each product of a linear layer in a joint graph, in order."""
    products = find_products(graph)
    tied, last = reads_embedding(graph), last_products(products, graph)
    heads = {product.shard for product in last if _is_output_head(product)}
    choices = []
    for product in products:
        reason = ""
        if any(fnmatchcase(product.weight, pattern) for pattern in rules.exclude):
            reason = "excluded by fp8_exclude"
        elif product.dtype not in rules.dtypes:
            reason = f"computed in {str(product.dtype).removeprefix('torch.')}"
        elif product.kind not in rules.products:
            reason = "left out of fp8_products"
        elif product.shard in tied:
            reason = "an embedding reads the weight"
        elif product.shard in heads:
            reason = "the output head"
        elif any(type(size) is int and size == 0 for size in product.sizes):
            reason = "no elements"
        elif any(free_unbacked_symbols(size) for size in product.sizes):
            reason = "sizes that depend on values, and may be 0"
        elif (size := _misaligned_size(product)) is not None:
            reason = f"{size}, not a multiple of {ALIGNMENT}"
        choices.append(Choice(product, reason))
    return _decline_by_cost(choices, rules)


def _is_output_head(product: LinearProduct) -> bool:
    """Return True for a last product that widens, as one to logits of a vocabulary does."""
    _, k, n = product.sizes
    return size_hint(n) > size_hint(k)


def _misaligned_size(product: LinearProduct) -> str | None:
    """Return the size that does not fit; one of the weight concerns all of its products."""
    m, k, n = product.sizes
    if product.kind == "forward":
        named = {"inputs": k, "outputs": n}
    elif product.kind == "input_gradient":
        named = {"inputs": n, "outputs": k}
    else:
        named = {"inputs": n, "outputs": m, "tokens": k}
    for name, size in named.items():
        if type(size) is not int:
            return f"a changing number of {name}"
        if size % ALIGNMENT:
            return f"{size} {name}"
    return None


def _decline_by_cost(choices: Sequence[Choice], rules: ChoiceRules) -> list[Choice]:
    """Decline all products of a weight if their casts take longer than what fp8 saves."""
    layouts = Counter(key for choice in choices if choice.is_fp8 for key in _layouts(choice.product))
    saved: defaultdict[Node, float] = defaultdict(float)
    paid: defaultdict[Node, float] = defaultdict(float)
    for choice in choices:
        if choice.is_fp8:
            product = choice.product
            saved[product.shard] += _saved_seconds(product, rules.by_row)
            paid[product.shard] += sum(
                _cast_seconds(operand, rules.by_row) / layouts[operand] for operand in _layouts(product)
            )
    return [
        Choice(choice.product, "its casts would take longer than fp8 saves")
        if choice.is_fp8 and saved[choice.product.shard] < rules.min_gain * paid[choice.product.shard]
        else choice
        for choice in choices
    ]


def _layouts(product: LinearProduct) -> tuple[Operand, Operand]:
    """Return both operands in the layouts that the product reads: rows on the left, columns on the right."""
    return product.left, Operand(product.right.source, not product.right.transposed)


def _saved_seconds(product: LinearProduct, by_row: bool) -> float:
    """Return the seconds by which a product is faster in fp8, without casts."""
    m, k, n = map(size_hint, product.sizes)
    fp8 = FP8_FLOPS_PER_S
    if by_row:
        fp8 = ROWWISE_FLOPS_PER_S if product.kind == "forward" else ROWWISE_GRADIENT_FLOPS_PER_S
    return 2.0 * m * k * n * (1 / BF16_FLOPS_PER_S - 1 / fp8)


def _cast_seconds(operand: Operand, by_row: bool) -> float:
    if not by_row and dequantization(operand.source) is not None:
        return 0.0  # the kernel that dequantizes the weight writes fp8 in place of 16 bits
    elements = 1
    for size in operand.source.meta["val"].shape:
        elements *= size_hint(size)
    if by_row and operand.transposed:  # two kernels: the maximum of each column, and the cast
        return elements * COLUMN_CAST_BYTES / CAST_BYTES_PER_S + 2 * LAUNCH_S
    return elements * CAST_BYTES / CAST_BYTES_PER_S + LAUNCH_S
