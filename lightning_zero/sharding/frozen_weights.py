"""Choose the frozen weights that are stored packed: ``ZeroStrategy(frozen_dtype=...)``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lightning_zero.config import EngineConfig
from lightning_zero.config.text import format_bytes
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.weight_format import WeightFormat, WeightKind

log = logging.getLogger(__name__)

# Attribute name that nn.Linear gives the weight.
_WEIGHT = "weight"
# Packages whose quantized parameters hold other bytes than values.
_QUANTIZERS = ("bitsandbytes", "torchao")


@dataclass(frozen=True)
class FrozenWeights:
    """Select frozen 2-D weights of linear layers.

    A weight that another kind of module reads too, such as an embedding, stays as it is.

    Attributes:
        exclude: patterns of names of weights that stay as they are.
    """

    kind: WeightKind
    exclude: tuple[str, ...] = ()

    def find(self, root: nn.Module) -> dict[tuple[int, str], WeightFormat]:
        """Return the formats of the selected weights by the module's id and the parameter's name.

        Raises:
            UnsupportedError: no weight is selected.
        """
        chosen: dict[tuple[int, str], WeightFormat] = {}
        kept = {id(param) for name, module, key, param in _parameters(root) if not self._fits(name, module, key, param)}
        for _, module, key, param in _parameters(root):
            if id(param) not in kept:
                chosen[id(module), key] = WeightFormat(self.kind, torch.Size(param.shape), param.dtype)
        if not chosen:
            raise UnsupportedError(
                f"frozen_dtype={self.kind!r}, but the module has no frozen weight of an nn.Linear to store in it. "
                "Freeze the base model before it is sharded (PEFT does; or `base.requires_grad_(False)`), or leave "
                "frozen_dtype out."
            )
        return chosen

    def _fits(self, name: str, module: nn.Module, key: str, param: Tensor) -> bool:
        return (
            isinstance(module, nn.Linear)
            and key == _WEIGHT
            and not param.requires_grad
            and param.dim() == 2
            and param.is_floating_point()
            and param.itemsize in (2, 4)
            and param.numel() > 0
            and not any(fnmatchcase(name, pattern) for pattern in self.exclude)
        )


def warn_of_rest(root: nn.Module, formats: Mapping[tuple[int, str], WeightFormat]) -> None:
    """Log a warning if fewer bytes of frozen weights are packed than stay as they are."""
    packed, rest = 0, 0
    largest: tuple[int, str] = (0, "")
    seen: set[int] = set()
    for name, module, key, param in _parameters(root):
        if param.requires_grad or id(param) in seen:
            continue
        seen.add(id(param))
        if found := formats.get((id(module), key)):
            packed += found.shape.numel() * found.dtype.itemsize
        else:
            nbytes = param.numel() * param.itemsize
            rest, largest = rest + nbytes, max(largest, (nbytes, name))
    if rest > packed:
        log.warning(
            "frozen_dtype packs %s of frozen weights, and %s stay as they are, such as %r. Only weights of nn.Linear "
            "are packed: not embeddings, stacked experts or Conv1D. Build experts as nn.Linear modules, or leave "
            "frozen_dtype out.",
            format_bytes(packed),
            format_bytes(rest),
            largest[1],
        )


def frozen_weights(config: EngineConfig) -> FrozenWeights | None:
    """Return the selection that the options describe, or None."""
    return None if config.frozen_dtype is None else FrozenWeights(config.frozen_dtype, config.tuning.frozen_exclude)


def _parameters(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for name, module in root.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                yield f"{name}.{key}" if name else key, module, key, param


def check_not_quantized(name: str, param: Tensor) -> None:
    """Raise :class:`UnsupportedError` for a parameter that bitsandbytes or torchao has quantized."""
    for kind in (*type(param).__mro__, *type(param.data).__mro__):
        package = kind.__module__.partition(".")[0]
        if package in _QUANTIZERS:
            raise UnsupportedError(
                f"Parameter {name!r} was quantized by {package} ({kind.__name__}). Its bytes cannot be sharded without "
                "their scales. Build the model without quantization (leave out quantization_config, or quantize_()), "
                "in bfloat16, freeze it, and pass ZeroStrategy(frozen_dtype='nf4'). lightning_zero.load_safetensors "
                "reads files that were saved quantized, too."
            )
