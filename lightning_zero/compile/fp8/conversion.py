"""Convert the products of one graph to fp8, and note each product's dtype or reason for the plan.

:func:`check_fp8_device` raises for devices without fp8 products.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from lightning_zero.compile.fp8.fp8_gathers import find_fp8_gathers
from lightning_zero.compile.fp8.product_choice import Choice, ChoiceRules, choose_products
from lightning_zero.compile.fp8.scaled_products import Fp8Recipe, scale_products
from lightning_zero.compile.fx_utils import LINEAR_PRODUCTS
from lightning_zero.compile.graph_plan import FP8
from lightning_zero.config import CompileConfig
from lightning_zero.errors import UnsupportedError

MIN_CAPABILITY = 8, 9  # of torch._scaled_mm with one scale per matrix
_DEVICES = "Ada (L4, L40S, RTX 4090), Hopper (H100, H200) and newer NVIDIA GPUs"
ROWWISE = "rowwise"
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def check_fp8_device(device: torch.device) -> None:
    """Raise unless the device multiplies fp8 matrices; a CPU computes the same numbers in float32.

    Raises:
        UnsupportedError: The device has no fp8 products.
    """
    if device.type == "cpu":
        return
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability >= MIN_CAPABILITY:
            return
        found = f"{torch.cuda.get_device_name(device)} has compute capability {'.'.join(map(str, capability))}"
    else:
        found = f"this is {'an AMD GPU' if device.type == 'cuda' else device.type}"
    raise UnsupportedError(
        f"linear_dtype='fp8' needs a GPU with fp8 products: {_DEVICES}, from compute capability "
        f"{'.'.join(map(str, MIN_CAPABILITY))}. But {found}. Leave linear_dtype out."
    )


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
