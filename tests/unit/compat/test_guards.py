"""Guards for which Dynamo reads each value once, against those that it builds by itself."""

from __future__ import annotations

import re
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import guards

from lightning_zero.compat.guards import values_read_once

SCALE = {"one": [2.0, 3.0]}


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.names = OrderedDict(first=1, second=(2, {"deep": 3}))
        self.kept: list[Any] = [1, "two", None]

    def forward(self, x: Tensor, by: float = 1.0) -> Tensor:
        second: Any = self.names["second"]
        return self.line(x) * by * second[1]["deep"] * SCALE["one"][1] + len(self.kept)


def compiled(part: Part, once: bool) -> tuple[list[str], list[Tensor], int, list[Any]]:
    """The guards in words, results, how often it was compiled, and what was read."""
    outside, graphs, words, read = 2.5, 0, [], []
    plain, look = guards.get_verbose_code_parts, guards.GuardBuilder.get

    def noted(*args: Any, **kwargs: Any) -> Any:
        words.extend(re.sub(r"dict___\d+|_\d+_c\d+|\d{9,}", "N", word) for word in plain(*args, **kwargs))
        return plain(*args, **kwargs)

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def function(x: Tensor) -> Tensor:
        return part(x) * outside + part(x, by=2.0)

    torch._dynamo.reset()
    with values_read_once() if once else nullcontext(), pytest.MonkeyPatch.context() as patched:
        get = guards.GuardBuilder.get
        patched.setattr(guards, "get_verbose_code_parts", noted)
        patched.setattr(guards.GuardBuilder, "get", lambda self, asked: (read.append(get(self, asked)), read[-1])[1])
        call = torch.compile(function, backend=backend)
        results = [call(torch.ones(2, 3)).detach()]
        for change in (lambda: part.kept.append(4), lambda: SCALE["one"].__setitem__(1, 5.0), lambda: None):
            change()
            results.append(call(torch.ones(2, 3)).detach())
    assert guards.GuardBuilder.get is look
    torch._dynamo.reset()
    part.kept.pop()
    SCALE["one"][1] = 3.0
    return words, results, graphs, read


def test_guards_are_the_same_and_are_of_what_is_there() -> None:
    part = Part()
    expected, found = compiled(part, once=False), compiled(part, once=True)
    assert found[0] == expected[0]
    assert len(found[0]) > 20
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))
    assert found[2] == expected[2] == 3
    assert len(found[3]) == len(expected[3])
    same = [one is other or one == other for one, other in zip(found[3], expected[3], strict=True) if _plain(one)]
    assert same.count(True) == len(same) > 20


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | str | list | tuple | dict | nn.Module)


def test_settings_are_read_anew_for_each_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a graph would be guarded as the one before was asked to be."""
    seen: list[bool] = []
    before = guards.config

    class Manager:
        def __init__(self) -> None:
            seen.extend(guards.config.skip_nnmodule_hook_guards for _ in range(2))

    monkeypatch.setattr(guards, "CheckFunctionManager", Manager)
    with values_read_once():
        for skips in (True, False):
            with torch._dynamo.config.patch(skip_nnmodule_hook_guards=skips):
                guards.CheckFunctionManager()  # type: ignore[call-arg]
            assert guards.config is before
    assert seen == [True, True, False, False]
