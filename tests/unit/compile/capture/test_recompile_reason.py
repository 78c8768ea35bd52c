"""Test the words for Dynamo's guards, on the guards that this torch writes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.compile.capture import recompile_reason
from lightning_zero.compile.capture.recompile_reason import (
    ARGUMENTS_CHANGED,
    LONGEST_VALUE,
    UNKNOWN,
    RecompileReason,
    argument_names,
    explain_guard,
    find_recompile_reason,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.1)
        self.scale = 1
        self.said = "a"

    def forward(self, x: Tensor, times: int = 1, mask: Any = None, **more: Any) -> Tensor:
        y = self.drop(self.inner(x)) * self.scale * times
        if mask is not None:
            y = y * (mask["m"] if isinstance(mask, dict) else mask)
        return y + 1 if self.said == "b" else y


def compiled() -> tuple[Net, Callable[..., Any], list[RecompileReason]]:
    """Return a module, its compiled call as discovery.py makes it, and the later reasons."""
    module, reasons = Net(), []
    names = argument_names(module)

    def backend(graph: Any, inputs: Any) -> Any:
        if (reason := find_recompile_reason(names)) is not None:
            reasons.append(reason)
        return graph.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    torch.compiler.reset()
    return module, torch.compile(call, backend=backend), reasons


def x(*sizes: int) -> Tensor:
    return torch.ones(*sizes or (8, 4))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            lambda net, call: call(x()),
            lambda net, call: call(x(3, 4)),
            "argument 'x' changed in dimension 0 from 8 to 3",
        ),
        (
            lambda net, call: call(x(), mask={"m": x()}),
            lambda net, call: call(x(), mask={"m": x(1, 4)}),
            "argument 'mask' at ['m'] changed in dimension 0 from 8 to 1",
        ),
        (
            lambda net, call: call(x()),
            lambda net, call: call(x(2, 8, 4)),
            "argument 'x' changed from 2 to 3 dimensions",
        ),
        (
            lambda net, call: call(x()),
            lambda net, call: call(x(4, 8).t()),
            "argument 'x' changed its stride in dimension 0 from 4 to 1",
        ),
        (
            lambda net, call: call(x()),
            lambda net, call: call(x().requires_grad_()),
            "argument 'x' needs a gradient now",
        ),
        (
            lambda net, call: call(x()),
            lambda net, call: (net.inner.weight.requires_grad_(False), call(x())),
            "'inner.weight' needs no gradient any more",
        ),
        (lambda net, call: call(x(), mask=x()), lambda net, call: call(x(), mask=x().double()), "changed its dtype"),
        (lambda net, call: call(x()), lambda net, call: call(x(), mask=x()), ARGUMENTS_CHANGED),
        (
            lambda net, call: call(x(), mask=None),
            lambda net, call: call(x(), mask=x()),
            "argument 'mask' is no longer None",
        ),
        (lambda net, call: call(x(), 3), lambda net, call: call(x(), 4), "argument 'times' is no longer 3"),
        (lambda net, call: call(x()), lambda net, call: (net.eval(), call(x())), "'drop' switched to evaluation"),
        (
            lambda net, call: call(x()),
            lambda net, call: (setattr(net, "said", "b"), call(x())),
            "'said' is no longer 'a' (forward in test_recompile_reason.py, line ",
        ),
        (
            lambda net, call: call(x()),
            lambda net, call: (setattr(net, "scale", 2), call(x())),
            "'scale' is no longer 1",
        ),
    ],
)
def test_guards_of_this_torch_are_translated(before: Any, after: Any, words: str) -> None:
    net, call, reasons = compiled()
    # With torch 2.11, a parameter that is frozen later does not recompile otherwise; discovery.py sets it, too.
    with torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=False):
        before(net, call)
        after(net, call)
    [reason] = reasons
    assert words in reason.text
    assert not reason.expected
    assert "module." not in reason.text
    assert "_modules" not in reason.text


def test_an_evaluation_is_expected_and_autocast_is_not() -> None:
    _, call, reasons = compiled()
    call(x())
    with torch.no_grad():
        call(x())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call(x())
    evaluation, autocast = reasons
    assert evaluation.expected
    assert "GLOBAL_STATE" in evaluation.guard
    assert not autocast.expected
    assert autocast.text == "autocast was switched on or off"


def test_the_reason_is_that_against_code_of_the_same_mode() -> None:
    """The code that ran last is the evaluation's, against which Dynamo's own reason is the gradients."""
    _, call, reasons = compiled()
    call(x())
    with torch.no_grad():
        call(x())
    call(x(3, 4))
    with torch.no_grad():
        call(x(5, 4))
    evaluation, training, again = reasons
    assert evaluation.expected
    assert training.text == "argument 'x' changed in dimension 0 from 8 to 3"
    assert again.text == "argument 'x' changed in dimension 0 from 8 to 5"
    assert not training.expected
    assert not again.expected


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("0/0: ", UNKNOWN),
        ("0/0: hasattr(a, 'b')  # y = a.b  # work/net.py:3 in forward", f"{UNKNOWN} (forward in net.py, line 3)"),
        ("0/0: hasattr(a, 'b')  # y = a.b  # nn/modules/module.py:3 in forward", UNKNOWN),
        (
            "3/12_1: tensor 'x' size mismatch at index 1. expected 2, actual 3\nUser stack:",
            "'x' changed in dimension 1 from 2 to 3",
        ),
        ("0/1: 2 <= L['args'][0].size()[1]  # return ...", "argument 'ids' is smaller than 2 in dimension 1"),
        ("0/1: args[1].size()[0] == 8  # return ...", "argument 2 is no longer 8 long in dimension 0"),
        ("0/1: args[0] is kwargs['mask']  # return ...", "argument 'ids' and argument 'mask' are no longer the same"),
        ("0/1: module.table == " + "1" * 100, f"'table' is no longer {'1' * LONGEST_VALUE} ..."),
        ("0/0: GLOBAL_STATE changed: num_threads ", "a global setting of torch has changed (num_threads)"),
    ],
)
def test_other_guards_have_short_reasons(reason: str, text: str) -> None:
    assert explain_guard(reason, ["ids"]).text == text


@pytest.mark.parametrize(
    "reason", [None, "0/0: BACKEND_MATCH failure: torch.compile detected different backend callables."]
)
def test_other_passes_are_no_reason(monkeypatch: pytest.MonkeyPatch, reason: str | None) -> None:
    notes = {} if reason is None else {"recompile_reason": reason}
    monkeypatch.setattr(recompile_reason, "metrics_context", lambda: SimpleNamespace(_metrics=notes))
    assert find_recompile_reason() is None
