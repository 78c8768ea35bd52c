"""Ops that replace a layer and its backward while AOTAutograd traces the rest of the graph.

They have shapes and a derivative but no kernel: ``expand.py`` replaces them before anything runs. Their arguments
identify the layer, so that AOTAutograd's cache recognizes equal graphs in other processes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from sympy import srepr
from torch import SymInt, Tensor

from lightning_zero.compat.tensors import OpOverload, size_key, size_of

_NAMESPACE = "lightning_zero_layers"
TENSORS, SIZES, TANGENTS = 4, 5, 3  # positions of arguments of forward, and of backward
FORWARD, BACKWARD, END = f"{_NAMESPACE}::forward", f"{_NAMESPACE}::backward", f"{_NAMESPACE}::end"


class DedupFailed(Exception):
    """A layer differs between the graph and its own trace; compile without deduplicating it.

    Attributes:
        strides: of the layer's output gradients, if only these differ and are dense tensors; otherwise None.
    """

    def __init__(self, why: str, number: int = -1, strides: list[list[int]] | None = None) -> None:
        super().__init__(why)
        self.number = number
        self.strides = strides


def describe(values: Sequence[Tensor | None]) -> str:
    """Return the layouts of results as an argument of a layer call."""
    return json.dumps(
        [
            None
            if v is None
            else [str(v.dtype).removeprefix("torch."), _text(v.shape), _text(v.stride()), str(v.device)]
            for v in values
        ]
    )


_FORMULAS: dict[str, Any] = {}  # of symbolic sizes, by their text


def _text(sizes: Sequence[int | SymInt]) -> list[int | str]:
    keys = [size_key(size) for size in sizes]
    for key in keys:
        if not isinstance(key, int):
            _FORMULAS[srepr(key)] = key
    return [key if isinstance(key, int) else srepr(key) for key in keys]


class _Layout(NamedTuple):
    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    dtype: torch.dtype
    device: torch.device


@cache
def _layouts(described: str) -> list[_Layout]:
    return [
        _Layout(tuple(shape), tuple(stride), getattr(torch, dtype), torch.device(device))
        for dtype, shape, stride, device in filter(None, json.loads(described))
    ]


def _fake_results(described: str, like: Tensor) -> list[Tensor]:
    made = []
    for form in _layouts(described):
        shape, stride = (
            [size_of(_FORMULAS[size], like) if isinstance(size, str) else size for size in sizes] for sizes in form[:2]
        )
        made.append(torch.empty_strided(shape, stride, dtype=form.dtype, device=form.device))
    return made


def _forward(
    layer: str, number: int, results: str, grads: str, given: Sequence[Tensor], sizes: Sequence[int | SymInt]
) -> list[Tensor]:
    return _fake_results(results, given[0])


def _backward(layer: str, number: int, grads: str, tangents: Sequence[Tensor]) -> list[Tensor]:
    return _fake_results(grads, tangents[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    layer, number, _, grads, _, sizes = inputs
    ctx.arguments = layer, number, grads
    ctx.no_grad = None if sizes else []  # torch takes an empty list for one of tensors


def _differentiate(ctx: Any, tangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
    layer, number, grads = ctx.arguments
    # A missing gradient is detected when the layer is expanded. Raising here would make autograd warn users.
    present = [tangent for tangent in tangents if tangent is not None]
    found = iter(backward()(layer, number, grads, present))
    return None, None, None, None, [None if known is None else next(found) for known in json.loads(grads)], ctx.no_grad


def _end(result: Tensor, stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(result.shape, stride, dtype=result.dtype, device=result.device)


def _pass_back(ctx: Any, tangent: Tensor) -> tuple[Tensor, None]:
    return tangent, None


_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_LIBRARY.define("forward(str layer, int number, str results, str grads, Tensor[] given, SymInt[] sizes) -> Tensor[]")
# Forward inputs are not arguments: the expansion knows them, and each tensor argument costs time.
_LIBRARY.define("backward(str layer, int number, str grads, Tensor[] tangents) -> Tensor[]")
_LIBRARY.define("end(Tensor result, int[] stride) -> Tensor")
torch.library.register_fake(END, _end, lib=_LIBRARY)
torch.library.register_autograd(END, _pass_back, lib=_LIBRARY)
torch.library.register_fake(FORWARD, _forward, lib=_LIBRARY)
torch.library.register_fake(BACKWARD, _backward, lib=_LIBRARY)
torch.library.register_autograd(FORWARD, _differentiate, setup_context=_setup_context, lib=_LIBRARY)


def forward() -> OpOverload:
    """Return the op of a layer's forward."""
    return getattr(torch.ops, _NAMESPACE).forward.default


def backward() -> OpOverload:
    """Return the op of a layer's backward."""
    return getattr(torch.ops, _NAMESPACE).backward.default


def end() -> OpOverload:
    """Return the op that gives a result a gradient of other strides while the layer is traced alone."""
    return getattr(torch.ops, _NAMESPACE).end.default
