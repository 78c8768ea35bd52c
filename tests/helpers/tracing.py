"""Graphs of small functions."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx


def traced(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "fake") -> Graph:
    return make_fx(function, tracing_mode=mode)(*inputs).graph
