"""Convert the products of one graph to fp8, and note each product's dtype or reason for the plan."""

from __future__ import annotations

import torch
from torch.fx import Graph

from lightning_zero.compile.fp8.product_choice import Choice, ChoiceRules, choose_products
from lightning_zero.compile.fp8.scaled_products import Fp8Recipe, scale_products
from lightning_zero.config import CompileConfig

# Key in the meta of a shard's graph input: kind of product -> "fp8", or why it stays in 16 bits. Inputs keep their meta
# from the joint graph to forward and backward, and through Inductor's passes.
FP8_PRODUCTS = "lightning_zero.fp8_products"
FP8 = "fp8"
_GRADIENT_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def convert_products(graph: Graph, config: CompileConfig) -> Graph:
    """Convert a joint graph, or an inference graph, in place if ``linear_dtype`` is ``"fp8"``."""
    if config.linear_dtype != "fp8":
        return graph
    rules = ChoiceRules(config.fp8_products, config.fp8_exclude, config.fp8_min_gain)
    choices = choose_products(graph, rules)
    recipe = Fp8Recipe(gradient_dtype=_GRADIENT_DTYPES[config.fp8_gradient_format])
    for choice in choices:
        _note(choice)
    chosen = [choice.product for choice in choices if choice.is_fp8]
    return scale_products(graph, chosen, [choice.product for choice in choices], recipe)


def _note(choice: Choice) -> None:
    product = choice.product
    notes = product.shard.meta.setdefault(FP8_PRODUCTS, {})
    notes.setdefault(product.kind, choice.reason or FP8)
