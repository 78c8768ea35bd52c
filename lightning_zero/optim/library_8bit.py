"""Refuse optimizers of torchao and bitsandbytes that quantize, with the line to write instead.

They scale blocks of what a rank steps. So results would depend on the number of ranks, and checkpoints would, too.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

from lightning_zero.errors import UnsupportedError

_LIBRARIES = ("torchao", "bitsandbytes")
_BASES = ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad")  # of torch.optim; AdamW comes first, which has Adam in its name


def check_library_8bit(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`UnsupportedError` for an 8-bit or 4-bit optimizer of a library."""
    cls = next((c for c in type(optimizer).__mro__ if c.__module__.partition(".")[0] in _LIBRARIES), None)
    if cls is None:
        return
    # bitsandbytes' base class of all optimizers, 8-bit or not, is Optimizer8bit.
    names = " ".join(c.__name__ for c in type(optimizer).__mro__ if c.__name__ != "Optimizer8bit")
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)  # of bitsandbytes' AdamW(..., optim_bits=8)
    if bits == 32 and re.search(r"8bit|4bit|Fp8", names) is None:
        return
    name, library = type(optimizer).__name__, cls.__module__.partition(".")[0]
    base = next((base for base in _BASES if base in name), None)
    instead = "your own optimizer, by lightning_zero.register_rule,"
    if base is not None:
        instead = _line(base, optimizer.defaults)
    rounding = ", bf16_stochastic_round=True" if getattr(optimizer, "bf16_stochastic_round", False) else ""
    raise UnsupportedError(
        f"{name} of {library} scales blocks of a rank's flat shard, so results would depend on the number of ranks. "
        f"Write {instead} with ZeroStrategy(tuning=Tuning(state_dtype='8bit'{rounding})). That stores blocks of whole "
        "parameters."
    )


def _line(base: str, defaults: dict[str, Any]) -> str:
    """Return the line that makes torch's optimizer with the same settings."""
    if "Adam" not in base:  # bitsandbytes keeps momentum under another name
        return f"torch.optim.{base} with the same settings,"
    known = inspect.signature(getattr(torch.optim, base).__init__).parameters
    settings = {key: value for key, value in defaults.items() if key in known and _is_plain(value)}
    texts = [f"{key}={value!r}" for key, value in settings.items() if value != known[key].default or key == "lr"]
    return f"torch.optim.{base}({', '.join(['params', *texts])})"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float)
