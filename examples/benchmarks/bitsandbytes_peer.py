"""bitsandbytes' 4-bit linear layers as a peer: NF4 with double quantization, which compute in bfloat16."""

from collections.abc import Collection

import torch
from torch import nn


def quantize(model: nn.Module, kept: Collection[str]) -> nn.Module:
    """Replace linear layers in place, one at a time, and return the model.

    Args:
        model: on the device that will train it.
        kept: names of layers that stay as they are.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or name in kept:
            continue
        with torch.device("meta"):
            made = Linear4bit(
                module.in_features, module.out_features, module.bias is not None, torch.bfloat16, True, "nf4"
            )
        weight = Params4bit(module.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
        made.weight, made.bias = weight.to(module.weight.device), module.bias
        model.set_submodule(name, made)
    # PEFT reads both to choose its layer and transformers' check of quantized models to allow the training.
    model.is_loaded_in_4bit = model.is_quantized = True
    return model
