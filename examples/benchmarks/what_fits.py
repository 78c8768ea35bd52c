"""Compute the memory of one GPU by model and recipe, without a GPU; prints JSON lines, then the tables of a page.

    python examples/benchmarks/what_fits.py

The models are transformers' Llama in published shapes, with one sample of 4,096 tokens. `lightning_zero.plan` estimates
them with two and with four layers. Every part of the memory is linear in the number of layers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_zero import Training, Tuning, plan
from lightning_zero.profiling.devices import find_device

GIB = 2**30
LAYERS = (2, 4)
DEVICES = ("RTX-4090", "L40S", "H100", "H200")
# name -> hidden size, layers, heads, heads of keys and values, width of the MLP, vocabulary, tied head
SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "Llama-3.2-1B": (2048, 16, 32, 8, 8192, 128256, True),
    "Llama-3.2-3B": (3072, 28, 24, 8, 8192, 128256, True),
    "Llama-3-8B": (4096, 32, 32, 8, 14336, 128256, False),
    "Qwen2.5-14B": (5120, 48, 40, 8, 13824, 152064, False),
    "Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064, False),
    "Llama-3-70B": (8192, 80, 64, 8, 28672, 128256, False),
}


@dataclass(frozen=True)
class Recipe:
    """How a model trains.

    Attributes:
        lora: adapters of rank 16 on all linear layers, over a frozen base in bfloat16.
        options: of the strategy.
    """

    lora: bool
    options: dict[str, Any]


RECIPES = {
    "AdamW": Recipe(False, {"tuning": Tuning(grad_aliasing=True)}),
    "AdamW, 8-bit state": Recipe(False, {"tuning": Tuning(grad_aliasing=True, state_dtype="8bit")}),
    "LoRA": Recipe(True, {}),
    "LoRA, NF4": Recipe(True, {"frozen_dtype": "nf4"}),
}


def make(shape: str, layers: int, recipe: Recipe, checkpoints: bool) -> nn.Module:
    """Return the model on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, _, heads, key_heads, hidden, vocabulary, tied = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=hidden,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16 if recipe.lora else torch.float32)
        if recipe.lora:
            from peft import LoraConfig, get_peft_model

            model.requires_grad_(False)
            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        if checkpoints:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.requires_grad])


def not_traced(model: nn.Module, batch: Any) -> Any:
    raise NotImplementedError("only what persists is estimated")


def estimate(shape: str, layers: int, recipe: Recipe, checkpoints: bool, length: int, traced: bool) -> dict[str, float]:
    """Return GiB of a model with few layers: persistent, and if it is traced the rest of a steady step's peak."""
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    loss = (lambda model, batch: model(**batch).loss) if traced else not_traced
    model = make(shape, layers, recipe, checkpoints)
    batch = {"input_ids": ids, "labels": ids}
    found = plan(model, batch, training=Training(loss=loss, optimizer=adamw), **recipe.options)
    if traced and found.passes.compiled is None:
        raise RuntimeError(f"{shape} could not be traced: {found.passes.why}")
    transient = (found.transient or 0) + found.device.context
    return {"parameters": found.parameters, "stays": found.stays / GIB, "transient": transient / GIB}


def at_depth(few: dict[str, float], more: dict[str, float], layers: int) -> dict[str, float]:
    steps = (layers - LAYERS[0]) / (LAYERS[1] - LAYERS[0])
    return {key: few[key] + steps * (more[key] - few[key]) for key in few}


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(found: dict[tuple[str, str, bool], dict[str, float]]) -> str:
    """Return the GiB by model and recipe, and the largest model by GPU and recipe, as Markdown."""
    shapes = [shape for shape in SHAPES if any(key[0] == shape for key in found)]

    def both(shape: str, name: str) -> str:
        return " / ".join(f"{found[shape, name, checkpoints]['peak']:.0f}" for checkpoints in (False, True))

    def largest(device: str, name: str, checkpoints: bool) -> str:
        room = find_device(device).memory / GIB
        fitting = [shape for shape in shapes if found[shape, name, checkpoints]["peak"] <= room]
        return fitting[-1].rpartition("-")[2] if fitting else "none"

    def cell(device: str, name: str) -> str:
        return " / ".join(largest(device, name, checkpoints) for checkpoints in (False, True))

    needed = table(["model", *RECIPES], [[shape, *(both(shape, name) for name in RECIPES)] for shape in shapes])
    rows = [[f"{d}, {find_device(d).memory / GIB:.0f} GiB", *(cell(d, name) for name in RECIPES)] for d in DEVICES]
    return f"{needed}\n\n{table(['GPU', *RECIPES], rows)}"


def run(shapes: list[str], length: int, show: Callable[[str], None]) -> None:
    found: dict[tuple[str, str, bool], dict[str, float]] = {}
    for shape in shapes:
        for checkpoints in (False, True):
            transient: dict[bool, float] = {}  # the same for all recipes with adapters, and for all without
            for name, recipe in RECIPES.items():
                traced = recipe.lora not in transient
                few, more = (estimate(shape, layers, recipe, checkpoints, length, traced) for layers in LAYERS)
                result = found[shape, name, checkpoints] = at_depth(few, more, SHAPES[shape][1])
                result["transient"] = transient.setdefault(recipe.lora, result["transient"])
                result["peak"] = result["stays"] + result["transient"]
                rounded = {key: round(value, 2) for key, value in result.items()}
                show(json.dumps({"model": shape, "recipe": name, "checkpoints": checkpoints} | rounded))
    show(tables(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--length", type=int, default=4096)
    arguments = parser.parse_args()
    run(arguments.models, arguments.length, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
