"""Kernels of pieces are waited for together, and each piece keeps its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_zero.compat.compiler import AsyncCompile, TritonBundler, inductor_config
from lightning_zero.compile.async_compile import DeferredKernels


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with inductor_config.patch(compile_threads=2):  # with one, kernels are compiled where they are asked for
        yield


class Compiled:
    def __init__(self, brought: list[str]) -> None:
        self._triton_bundle = SimpleNamespace(kernel_artifacts=brought, static_autotuners=[])

    def set_triton_bundle(self, bundle: Any) -> None:
        self._triton_bundle = bundle


def scope() -> tuple[dict[str, Any], Future[str]]:
    future: Future[str] = Future()
    return {"kernel": future, "other": 1}, future


def test_all_are_waited_for_together() -> None:
    (first, one), (second, other) = scope(), scope()
    with DeferredKernels() as kernels:
        for globals_ in (first, second):
            with kernels.defer():  # one graph's, then another's
                AsyncCompile().wait(globals_)  # would not return
                kernels.assign_to(object())
    assert first["kernel"] is one, "nobody waits where the context ends well"
    one.set_result("a")
    other.set_result("b")
    kernels.finish()
    assert (first, second) == ({"kernel": "a", "other": 1}, {"kernel": "b", "other": 1})


def test_whoever_compiles_in_another_thread_waits_as_before() -> None:
    globals_, future = scope()
    future.set_result("a")
    with DeferredKernels().defer():
        thread = threading.Thread(target=AsyncCompile().wait, args=(globals_,))
        thread.start()
        thread.join(20)
        assert globals_["kernel"] == "a"


def test_what_was_lowered_before_an_error_is_whole() -> None:
    (first, one), (second, other) = scope(), scope()
    before = AsyncCompile.wait
    with pytest.raises(ValueError, match="the third"), DeferredKernels() as kernels, kernels.defer():
        AsyncCompile().wait(first)
        kernels.assign_to(object())
        AsyncCompile().wait(second)
        one.set_result("a")
        other.set_result("b")
        raise ValueError("the third")
    assert (first["kernel"], second["kernel"]) == ("a", "b")
    assert AsyncCompile.wait is before


def test_each_piece_keeps_the_kernels_that_were_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    collected = iter(["its own", "compiled again"])
    monkeypatch.setattr(TritonBundler, "collect", lambda: (next(collected), None))
    made, loaded = Compiled([]), Compiled(["from the cache"])
    kernels = DeferredKernels()
    with kernels.defer():
        for compiled in (made, loaded):
            globals_, future = scope()
            future.set_result("a")
            AsyncCompile().wait(globals_)
            kernels.assign_to(compiled)
    kernels.finish()
    assert made._triton_bundle == "its own"
    assert loaded._triton_bundle.kernel_artifacts == ["from the cache"]


def test_a_piece_is_given_what_has_been_compiled_for_it() -> None:
    """The life of Inductor's own bundle."""
    made = Compiled([])
    seen: list[Any] = []
    globals_, future = scope()
    future.set_result("a")
    with inductor_config.patch(bundle_triton_into_fx_graph_cache=True):
        kernels = DeferredKernels()
        with kernels.defer():
            AsyncCompile().wait(globals_)
            kernels._waits.append(lambda: seen.append(TritonBundler._entries))
            kernels.assign_to(made)
        kernels.finish()
        assert seen == [[]], "kernels are noted while they are waited for"
        assert TritonBundler._entries is None
        assert made._triton_bundle.kernel_artifacts == []


def test_they_are_finished_once() -> None:
    globals_, future = scope()
    future.set_result("a")
    kernels = DeferredKernels()
    with kernels.defer():
        AsyncCompile().wait(globals_)
    kernels.finish()
    assert globals_["kernel"] == "a"
    globals_["kernel"] = Future()  # waited for again, this would not return
    kernels.finish()


def test_kernels_of_a_piece_that_failed_are_not_given_to_the_next() -> None:
    """That of another graph, say one that is lowered after a forward that was not."""
    (first, one), (second, other) = scope(), scope()
    one.set_result("a")
    other.set_result("b")
    kernels = DeferredKernels()
    with pytest.raises(ValueError, match="failed"), kernels.defer():
        AsyncCompile().wait(first)
        raise ValueError("failed")
    with kernels.defer():
        AsyncCompile().wait(second)
        kernels.assign_to("next")
    assert [(subgraph, len(waits)) for subgraph, waits in kernels._subgraphs if waits] == [(None, 1), ("next", 1)]


def test_an_interrupted_wait_goes_on_later() -> None:
    (first, one), (second, other) = scope(), scope()
    kernels = DeferredKernels()
    with kernels.defer():
        for globals_ in (first, second):
            AsyncCompile().wait(globals_)
            kernels.assign_to(object())
    one.set_exception(KeyboardInterrupt())
    other.set_result("b")
    with pytest.raises(KeyboardInterrupt):
        kernels.finish()
    first["kernel"] = again = Future[str]()
    again.set_result("a")
    kernels.finish()
    assert (first["kernel"], second["kernel"]) == ("a", "b")
