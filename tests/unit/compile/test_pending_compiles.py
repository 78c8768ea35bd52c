"""What a compilation leaves to be done is done once, before the graph runs, and told in any case."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from torch import nn
from torch._functorch import config
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

from lightning_zero.compat.compiler import AsyncCompile, dynamo_config, inductor_config
from lightning_zero.compile.async_compile import PendingCompile, PendingCompiles
from lightning_zero.compile.capture.discovery import CompiledModules
from lightning_zero.compile.subgraphs import DeferredKernels


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
    """Those of its first pieces are other graphs', too."""
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
