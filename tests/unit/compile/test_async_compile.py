"""Deferred work of a compilation is done once, before the graph runs, and is always reported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch._functorch import config
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor.async_compile import AsyncCompile

from lightning_zero.compat.compiler import TritonBundler, dynamo_config, inductor_config
from lightning_zero.compile.async_compile import DeferredKernels, PendingCompile, PendingCompiles
from lightning_zero.compile.capture.discovery import CompiledModules


def test_it_is_done_once_and_in_order() -> None:
    done: list[str] = []
    told: list[float] = []
    pending_compiles = PendingCompiles()
    pending_compiles.add(lambda: done.append("first"), 3.0, told.append)
    pending_compiles.add(lambda: done.append("second"), 5.0, told.append)
    assert done == told == []
    pending_compiles.finish()
    pending_compiles.finish()
    assert done == ["first", "second"]
    assert told == [pytest.approx(3.0, abs=0.5), pytest.approx(5.0, abs=0.5)]


def failing(*errors: BaseException) -> Callable[[], None]:
    left = list(errors)

    def rest() -> None:
        if left:
            raise left.pop(0)

    return rest


def test_what_fails_is_raised_and_told_once_and_tried_again() -> None:
    told: list[float] = []
    pending_compiles = PendingCompiles()
    pending_compiles.add(failing(ValueError("no kernel"), KeyboardInterrupt()), 3.0, told.append)
    with pytest.raises(ValueError, match="no kernel"):
        pending_compiles.finish()
    assert len(told) == 1, "or other ranks would take this one for busy"
    with pytest.raises(KeyboardInterrupt):
        pending_compiles.finish()
    pending_compiles.finish()
    pending_compiles.finish()
    assert len(told) == 1


def test_no_thread_runs_a_graph_that_another_one_finishes() -> None:
    begun, go, seen = threading.Event(), threading.Event(), list[str]()
    pending_compiles = PendingCompiles()

    def rest() -> None:
        begun.set()
        go.wait(20)
        seen.append("finished")

    pending_compiles.add(rest, 0.0, lambda seconds: None)
    first = threading.Thread(target=pending_compiles.finish)
    first.start()
    assert begun.wait(20)

    def call() -> None:
        pending_compiles.finish()
        seen.append("ran")

    second = threading.Thread(target=call)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    go.set()
    first.join(20)
    second.join(20)
    assert seen == ["finished", "ran"]


def test_a_failure_under_way_is_not_hidden(caplog: pytest.LogCaptureFixture) -> None:
    pending_compiles = PendingCompiles()
    pending_compiles.add(failing(ValueError("one"), ValueError("two")), 0.0, lambda seconds: None)
    pending_compiles.finish_after(RuntimeError("the user's"))
    assert "Finalizing the failed compilation raised another error." in caplog.text
    with pytest.raises(ValueError, match="two"):
        pending_compiles.finish_after(None)


def test_settings_are_as_before_where_what_is_left_fails() -> None:
    calls = CompiledModules(nn.Linear(1, 1), {})
    before = dynamo_config.ignore_logging_functions
    calls.call_info.pending_compiles.add(failing(ValueError("no kernel")), 0.0, lambda seconds: None)
    with pytest.raises(RuntimeError, match="the user's"), calls.dynamo_settings():
        raise RuntimeError("the user's")
    assert dynamo_config.ignore_logging_functions is before


def test_a_graph_is_saved_once_its_kernels_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    globals_: dict[str, Any] = {"kernel": Future()}

    def save(key: str, entry: Any, remote: bool) -> None:
        seen.append((key, entry, remote, globals_["kernel"], config.bundled_autograd_cache))

    monkeypatch.setattr(AOTAutogradCache, "save", save)
    kernels = DeferredKernels()
    with (
        inductor_config.patch(compile_threads=2),
        config.patch(bundled_autograd_cache=False),
        PendingCompile(kernels, {"bundled_autograd_cache": True}) as rest,
    ):
        with kernels.defer():
            AsyncCompile().wait(globals_)
        AOTAutogradCache.save("key", "entry", remote=False)
        assert seen == []
    assert AOTAutogradCache.save is save
    globals_["kernel"].set_result("compiled")
    with config.patch(bundled_autograd_cache=False):
        rest()
    assert seen == [("key", "entry", False, "compiled", True)], "within the settings that it was compiled with"


def test_a_compilation_that_fails_leaves_no_kernel_unfinished() -> None:
    """Other graphs share kernels of its first subgraphs."""
    globals_: dict[str, Any] = {"kernel": Future()}
    globals_["kernel"].set_result("compiled")
    kernels = DeferredKernels()
    with (
        inductor_config.patch(compile_threads=2),
        pytest.raises(ValueError, match="a later piece"),
        PendingCompile(kernels, {}),
        kernels.defer(),
    ):
        AsyncCompile().wait(globals_)
        raise ValueError("a later piece")
    assert globals_["kernel"] == "compiled"


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with inductor_config.patch(compile_threads=2):  # with one thread kernels are compiled synchronously
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
    globals_["kernel"] = Future()  # a second wait would not return
    kernels.finish()


def test_kernels_of_a_piece_that_failed_are_not_given_to_the_next() -> None:
    """For example those of another graph that is lowered after a failed forward."""
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
