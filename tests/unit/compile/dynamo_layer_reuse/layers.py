"""Models of layers for these tests, and how they are traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lightning_zero.compat.dynamo import ModuleVariable
from lightning_zero.compile.dynamo_layer_reuse import reuse_layer_traces

WIDTH = 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = 0.5

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.inner(x) * self.scale
        return y if mask is None else y.masked_fill(mask, 0.0)


class Layer(nn.Module):
    """As people write them: parts of parts, a number, an argument by name."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return x + self.drop(self.attention(self.norm(x), mask=mask))


class Model(nn.Module):
    def __init__(self, make: Callable[[int], nn.Module] = Layer, count: int = 5) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([make(number) for number in range(count)])

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        x = self.head(x)
        for layer in self.layers:
            x = layer(x, **given)
        return x.square().mean()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often Dynamo follows the code of modules of each class."""
    found: Counter[str] = Counter()
    plain = ModuleVariable.call_function

    def call_function(variable: Any, *rest: Any) -> Any:
        found[type(variable.value).__name__] += 1
        return plain(variable, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleVariable, "call_function", call_function)
        yield found


class Compiled:
    """A module as compiled code.

    Attributes:
        graphs: that Dynamo made.
        traced: how often it followed the code of modules of each class.
        seen: results of ``look`` for the graphs, before any change.
    """

    def __init__(
        self,
        module: nn.Module,
        once: bool = True,
        look: Callable[[GraphModule], Any] = lambda graph: None,
        dynamic: bool | None = False,
    ) -> None:
        torch._dynamo.reset()
        self.graphs: list[GraphModule] = []
        self.seen: list[Any] = []
        self._look = look
        self.traced: Counter[str] = Counter()
        self._once = once
        self._call = torch.compile(module, backend=self._backend, dynamic=dynamic)

    def _backend(self, graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        self.seen.append(self._look(graph))
        return graph.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with counted() as traced, reuse_layer_traces() if self._once else nullcontext():
            result = self._call(*args, **kwargs)
        self.traced += traced
        return result
