"""What a compilation leaves to be done is done once, before the graph runs, and told in any case."""

from concurrent.futures import Future
from typing import Any

import pytest
from torch._functorch import config
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

from lightning_zero.compat.compiler import AsyncCompile, inductor_config
from lightning_zero.compile.pieces import Kernels
from lightning_zero.compile.unfinished import Rest, Unfinished


def test_it_is_done_once_and_in_order() -> None:
    done: list[str] = []
    told: list[float] = []
    unfinished = Unfinished()
    unfinished.add(lambda: done.append("first"), 3.0, told.append)
    unfinished.add(lambda: done.append("second"), 5.0, told.append)
    assert done == told == []
    unfinished.finish()
    unfinished.finish()
    assert done == ["first", "second"]
    assert told == [pytest.approx(3.0, abs=0.5), pytest.approx(5.0, abs=0.5)]


def test_what_fails_is_raised_and_told() -> None:
    told: list[float] = []
    unfinished = Unfinished()

    def fails() -> None:
        raise ValueError("no kernel")

    unfinished.add(fails, 3.0, told.append)
    with pytest.raises(ValueError, match="no kernel"):
        unfinished.finish()
    assert len(told) == 1, "or other ranks would take this one for busy"
    unfinished.finish()


def test_a_graph_is_saved_once_its_kernels_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    globals_: dict[str, Any] = {"kernel": Future()}

    def save(key: str, entry: Any, remote: bool) -> None:
        seen.append((key, entry, remote, globals_["kernel"], config.bundled_autograd_cache))

    monkeypatch.setattr(AOTAutogradCache, "save", save)
    kernels = Kernels()
    with (
        inductor_config.patch(compile_threads=2),
        config.patch(bundled_autograd_cache=False),
        Rest(kernels, {"bundled_autograd_cache": True}) as rest,
    ):
        with kernels.not_waited_for():
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
    kernels = Kernels()
    with (
        inductor_config.patch(compile_threads=2),
        pytest.raises(ValueError, match="a later piece"),
        Rest(kernels, {}),
        kernels.not_waited_for(),
    ):
        AsyncCompile().wait(globals_)
        raise ValueError("a later piece")
    assert globals_["kernel"] == "compiled"
