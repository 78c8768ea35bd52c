"""Convert the products of one graph to fp8, and note each product's dtype or reason for the plan."""

from __future__ import annotations

import torch
from torch.fx import Graph

from lightning_zero.compile.fp8.fp8_gathers import find_fp8_gathers
from lightning_zero.compile.fp8.product_choice import Choice, ChoiceRules, choose_products
from lightning_zero.compile.fp8.scaled_products import Fp8Recipe, scale_products
from lightning_zero.compile.fx_utils import LINEAR_PRODUCTS
from lightning_zero.compile.graph_plan import FP8
from lightning_zero.config import CompileConfig

ROWWISE = "rowwise"
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def convert_products(graph: Graph, config: CompileConfig, fp8_shards: bool = False) -> Graph:
    """Convert a joint graph, or an inference graph, in place if ``linear_dtype`` is ``"fp8"``.

    Args:
        fp8_shards: gather weights in fp8 if all their products are.
    """
    if config.linear_dtype != "fp8":
        return graph
    rules = ChoiceRules(config.fp8_products, config.fp8_exclude, config.fp8_min_gain, config.fp8_recipe == ROWWISE)
    choices = choose_products(graph, rules)
    for choice in choices:
        _note(choice)
    chosen = [choice.product for choice in choices if choice.is_fp8]
    recipe = Fp8Recipe(
        gradient_dtype=_DTYPES[config.fp8_gradient_format],
        by_row=config.fp8_recipe == ROWWISE,
        health=config.fp8_health,
    )
    gathered = find_fp8_gathers(graph, chosen) if fp8_shards else {}
    return scale_products(graph, chosen, [choice.product for choice in choices], recipe, gathered)


def _note(choice: Choice) -> None:
    product = choice.product
    name, products = product.shard.meta.setdefault(LINEAR_PRODUCTS, (product.weight, {}))
    assert name == product.weight
    products.setdefault(product.kind, choice.reason or FP8)
