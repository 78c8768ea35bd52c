"""What Dynamo writes of the frames above a node."""

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lightning_zero.compat.compiler import output_graph
from lightning_zero.compile.stacks import frames_written_once


class Deep(nn.Module):
    def __init__(self, calls: int) -> None:
        super().__init__()
        self.layers, self.calls = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), calls

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() + again(x, self.calls)
        return x


def again(x: Tensor, times: int) -> Tensor:
    return x.cos() if times == 0 else again(x, times - 1)


def stacks(context: Any, calls: int = 5) -> list[str]:
    found: list[str] = []

    def backend(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        found.extend(node.stack_trace or "" for node in module.graph.nodes)
        return module.forward

    torch._dynamo.reset()
    with context:
        torch.compile(Deep(calls), backend=backend)(torch.ones(2, 3))
    torch._dynamo.reset()
    return found


def test_nodes_say_the_same_of_where_they_come_from() -> None:
    plain = stacks(nullcontext())
    assert any("again(x, times - 1)" in stack and "Previous line repeated" in stack for stack in plain)
    assert stacks(frames_written_once()) == plain


def test_dynamo_has_its_own_way_back() -> None:
    before = output_graph.traceback
    with pytest.raises(ZeroDivisionError), frames_written_once():
        assert output_graph.traceback is not before
        raise ZeroDivisionError
    assert output_graph.traceback is before


def test_a_frame_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[int] = []
    plain = traceback.StackSummary.format
    monkeypatch.setattr(traceback.StackSummary, "format", lambda self: (frames.append(len(self)), plain(self))[1])
    stacks(nullcontext(), calls=0)
    each_time = sum(count for count in frames if count < 10)  # without the stack that has called Dynamo
    frames.clear()
    stacks(frames_written_once(), calls=0)
    once = [count for count in frames if count < 10]
    assert once == [1] * len(once)
    assert 3 * len(once) < each_time
