"""The op that stands for a layer while the graph around it is differentiated, and the one for its backward. They have
shapes and a derivative, and no kernel: :mod:`inline` puts the layer in their place before anything could run.

All that is known of them stands in their arguments, so that AOTAutograd's cache knows equal graphs in other processes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.fakes import Form, fake_from_specs
from lightning_zero.compat.ops import OpOverload

__all__ = [
    "BACKWARD",
    "FORWARD",
    "DedupFailed",
    "backward",
    "describe",
    "end",
    "forward",
    "fast_layer_call_fakes",
]

_NAMESPACE = "lightning_zero_outline"
FORWARD, BACKWARD, END = f"{_NAMESPACE}::forward", f"{_NAMESPACE}::backward", f"{_NAMESPACE}::end"


class DedupFailed(Exception):
    """In a graph something is other than it was for the layer by itself; without a standin it can be compiled.

    Attributes:
        number: of the standin.
        strides: of the gradients that the layer is given, where these are what is other; None where it is not that, or
            where they are no tensors of their own.
    """

    def __init__(self, why: str, number: int = -1, strides: list[list[int]] | None = None) -> None:
        super().__init__(why)
        self.number = number
        self.strides = strides


def describe(values: Sequence[Tensor | None]) -> str:
    """The layouts of results, as an argument of a standin."""
    return json.dumps(
        [
            None if v is None else [str(v.dtype).removeprefix("torch."), list(v.shape), list(v.stride()), str(v.device)]
            for v in values
        ]
    )


@cache
def _forms(described: str) -> list[Form]:
    return [
        Form(tuple(shape), tuple(stride), getattr(torch, dtype), torch.device(device))
        for dtype, shape, stride, device in filter(None, json.loads(described))
    ]


def _made(described: str) -> list[Tensor]:
    return [torch.empty_strided(*form[:2], dtype=form.dtype, device=form.device) for form in _forms(described)]


def fast_layer_call_fakes() -> AbstractContextManager[None]:
    """Inside, fakes of what standins return are made of the forms that these name. Torch would look for an equal call,
    of which there is none, in all that it is given, for each layer three times."""
    return fake_from_specs({op: lambda args: _forms(args[2]) for op in (forward(), backward())})


def _forward(layer: str, number: int, results: str, grads: str, given: Sequence[Tensor]) -> list[Tensor]:
    return _made(results)


def _backward(layer: str, number: int, grads: str, tangents: Sequence[Tensor]) -> list[Tensor]:
    return _made(grads)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    layer, number, _, grads, _ = inputs
    ctx.arguments = layer, number, grads


def _differentiate(ctx: Any, tangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
    layer, number, grads = ctx.arguments
    # One that has none is missed where the layer is put in place: to raise here would have autograd warn users.
    come = [tangent for tangent in tangents if tangent is not None]
    found = iter(backward()(layer, number, grads, come))
    return None, None, None, None, [None if known is None else next(found) for known in json.loads(grads)]


def _end(result: Tensor, stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(result.shape, stride, dtype=result.dtype, device=result.device)


def _pass_back(ctx: Any, tangent: Tensor) -> tuple[Tensor, None]:
    return tangent, None


_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_LIBRARY.define("forward(str layer, int number, str results, str grads, Tensor[] given) -> Tensor[]")
# Not given what forward was: who puts the layer in its place knows that, and each tensor of each call takes its time.
_LIBRARY.define("backward(str layer, int number, str grads, Tensor[] tangents) -> Tensor[]")
_LIBRARY.define("end(Tensor result, int[] stride) -> Tensor")
torch.library.register_fake(END, _end, lib=_LIBRARY)
torch.library.register_autograd(END, _pass_back, lib=_LIBRARY)
torch.library.register_fake(FORWARD, _forward, lib=_LIBRARY)
torch.library.register_fake(BACKWARD, _backward, lib=_LIBRARY)
torch.library.register_autograd(FORWARD, _differentiate, setup_context=_remember, lib=_LIBRARY)


def forward() -> OpOverload:
    """The op that stands for a layer."""
    return getattr(torch.ops, _NAMESPACE).forward.default


def backward() -> OpOverload:
    """The op that stands for a layer's backward."""
    return getattr(torch.ops, _NAMESPACE).backward.default


def end() -> OpOverload:
    """The op through which a layer's result goes whose gradient has other strides than it, while the layer is traced by
    itself."""
    return getattr(torch.ops, _NAMESPACE).end.default
