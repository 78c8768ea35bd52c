"""What ``compat/backwards.py`` takes from torch still means the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch._aot_autograd import graph_compile
from torch.fx import GraphModule

from lightning_zero.compat.backwards import skip_backward_copies
from lightning_zero.compat.compiler import functorch_config, lookup_backend


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(context: AbstractContextManager[Any], at_once: bool = True) -> Any:
    compile_fx: Any = lookup_backend("inductor")

    def backend(module: GraphModule, inputs: Any) -> Any:
        settings = functorch_config.patch(force_non_lazy_backward_lowering=at_once, enable_autograd_cache=False)
        with settings, context:
            return compile_fx(module, inputs)

    return torch.compile(lambda x: (x.sin() * x).sum(), backend=backend)


def gradient(run: Any) -> Tensor:
    x = torch.linspace(-1, 1, 6, requires_grad=True)
    (found,) = torch.autograd.grad(run(x), x)
    return found


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "when it runs"])
def test_backwards_compute_the_same(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    plain = copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda value, *rest: copies.append(value) or plain(value, *rest))
    assert torch.equal(gradient(compiled(skip_backward_copies(), at_once)), gradient(compiled(nullcontext(), at_once)))
    # In the first one none, or, when it runs, that of the runtime; torch's own in the second.
    assert len([value for value in copies if isinstance(value, GraphModule)]) == (1 if at_once else 2)


def test_compiled_autograd_finds_nothing_rather_than_something_else() -> None:
    run = compiled(skip_backward_copies())
    assert torch.equal(gradient(run), gradient(lambda x: (x.sin() * x).sum()))
    x = torch.linspace(-1, 1, 6, requires_grad=True)
    with (
        pytest.raises(Exception, match=r"lazy_backward_info|does not support\s+compiled autograd"),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
    ):
        run(x).backward()


def test_with_compiled_autograd_all_is_kept() -> None:
    x = torch.linspace(-1, 1, 6, requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        compiled(skip_backward_copies())(x).backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, gradient(lambda x: (x.sin() * x).sum()))


def test_torch_has_its_own_functions_back() -> None:
    names = ("copy", "AutogradLazyBackwardCompileInfo", "serialize_graph_module")
    before = [getattr(graph_compile, name) for name in names]
    with pytest.raises(ZeroDivisionError), skip_backward_copies():
        raise ZeroDivisionError
    assert [getattr(graph_compile, name) for name in names] == before
