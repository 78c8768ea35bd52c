"""torchao's float8 training as a peer: it swaps linear modules, and `torch.compile` fuses their casts.

Settings are those of torchao's and torchtitan's documents for torchao 0.18: a recipe by name, no output head, no sizes
that are not multiples of 16, no layers that their own filter finds too small, fp8 all-gathers with `tensorwise`.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
FILTERS = ("auto", "16")
OUTPUT_HEAD = "head"


def convert(model: nn.Module, recipe: str, layers: str, fp8_gather: bool) -> int:
    """Swap linear modules in place, and return their number. Call it before `compile` and `fully_shard`.

    Args:
        recipe: one of `RECIPES`.
        layers: "auto" leaves layers in 16 bits that torchao's filter finds too small; "16" converts all that fit.
        fp8_gather: weights are cast before FSDP2 gathers them. Only `tensorwise` can.
    """
    from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    on_cpu = not torch.cuda.is_available()
    if fp8_gather or on_cpu:
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=fp8_gather, emulate=on_cpu)

    def fits(module: nn.Module, name: str) -> bool:
        linear = isinstance(module, nn.Linear) and name.rpartition(".")[2] != OUTPUT_HEAD
        return linear and all(size % 16 == 0 for size in module.weight.shape)

    large_enough = fits
    if layers == "auto" and recipe != "rowwise_with_gw_hp":  # torchao has no filter for that recipe
        large_enough = _auto_filter_for_recipe(recipe, [OUTPUT_HEAD])
    swapped = [name for name, module in model.named_modules() if fits(module, name) and large_enough(module, name)]
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in swapped)
    return len(swapped)


def after_step(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in fp8, with one all-reduce."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def adamw8bit(params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Return torchao's AdamW with 8-bit state, which compiles its step for each shape of a parameter."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, **options)
