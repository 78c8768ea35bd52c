"""Check that the functions of torch which ``compat/compiler.py`` replaces keep their meaning."""

import logging
import operator
import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch._aot_autograd import autograd_cache, graph_compile
from torch._inductor import codecache
from torch._library import utils as library
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils import _traceback

from lightning_zero.compat.compiler import aot_autograd, min_cut_partition
from lightning_zero.compat.compiler import paths_shortened_once, unwritten, written_when_called


def compiled(monkeypatch: pytest.MonkeyPatch) -> tuple[int, Tensor]:
    """How many texts are written while a function is compiled; a gradient."""
    found: Counter[str] = Counter()

    def counted(name: str, plain: Any) -> Any:
        return lambda *args, **kwargs: (found.update([name]), plain(*args, **kwargs))[1]

    def compiler(module: GraphModule, inputs: Any) -> Any:
        return lambda inputs: module.forward(*inputs)

    torch._dynamo.reset()
    x = torch.linspace(0, 1, 4, requires_grad=True)
    with monkeypatch.context() as patched:
        patched.setattr(GraphModule, "print_readable", counted("text", GraphModule.print_readable))
        backend = aot_autograd(fw_compiler=boxed(compiler), bw_compiler=boxed(compiler), partition_fn=min_cut_partition)
        result = torch.compile(lambda x: (x.sin() * x.cos()).sum(), backend=backend)(x)
        (grad,) = torch.autograd.grad(result, x)
    torch._dynamo.reset()
    return found["text"], grad


def boxed(compiler: Any) -> Any:
    def compile(module: GraphModule, inputs: Any) -> Any:
        run = compiler(module, inputs)
        run._boxed_call = True
        return run

    return compile


def test_text_is_left_to_whoever_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._logging._internal.trace_log", logging.Logger("nobody listens"))
    plain, expected = compiled(monkeypatch)
    with unwritten():
        few, grad = compiled(monkeypatch)
    assert few == plain - 3
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("traced", [False, True], ids=["logged", "traced"])
def test_listeners_hear_of_the_whole_and_of_both_halves(monkeypatch: pytest.MonkeyPatch, traced: bool) -> None:
    trace, logs = logging.Logger("trace"), logging.Logger("graphs", logging.WARNING if traced else logging.INFO)
    if traced:
        trace.addHandler(logging.NullHandler())
    monkeypatch.setattr("torch._logging._internal.trace_log", trace)
    monkeypatch.setattr(graph_compile, "aot_graphs_log", logs)
    monkeypatch.setattr(graph_compile, "aot_joint_log", logs)
    plain, _ = compiled(monkeypatch)
    with unwritten():
        assert compiled(monkeypatch)[0] == plain


def test_torch_has_its_own_functions_back() -> None:
    before = graph_compile._log_joint_graph, graph_compile._log_fw_bw_graphs
    with pytest.raises(ZeroDivisionError), unwritten():
        assert graph_compile._log_joint_graph is not before[0]
        raise ZeroDivisionError
    assert (graph_compile._log_joint_graph, graph_compile._log_fw_bw_graphs) == before


def test_nodes_are_searched_for_symbols_as_ever() -> None:
    """That of torch 2.13, which warns of raw ones; for any torch the same leaves."""
    size = ShapeEnv().create_unbacked_symint()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    tree = ((x, [1, None, slice(0, x, 2)], {"a": (x, torch.float32), "b": OrderedDict(c=1.5)}), {"d": size})
    with unwritten():
        iterate = torch.fx.graph.pytree.tree_iter
        assert list(map(id, iterate(tree))) == list(map(id, pytree.tree_leaves(tree)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.call_function(torch.ops.aten.view.default, (x, [2, size]))
    with warnings.catch_warnings(record=True) as plain:
        warnings.simplefilter("always")
        graph.call_function(torch.ops.aten.view.default, (x, [2, size]))
    assert [str(one.message) for one in caught] == [str(one.message) for one in plain]


def test_guards_say_the_same_of_their_lines_and_paths_are_shortened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    plain = _traceback.shorten_filename
    monkeypatch.setattr(_traceback, "shorten_filename", lambda fn, **how: (asked.append(fn), plain(fn, **how))[1])

    def guards() -> list[str]:
        found: list[str] = []
        write = torch._dynamo.guards.get_verbose_code_part
        torch._dynamo.reset()
        line = torch.nn.Linear(3, 3)
        with monkeypatch.context() as patched:
            listened = lambda *args: (found.append(write(*args)), found[-1])[1]  # noqa: E731
            patched.setattr(torch._dynamo.guards, "get_verbose_code_part", listened)
            torch.compile(lambda x: line(x).sin() * line.weight.sum(), backend="eager")(torch.ones(2, 3))
        torch._dynamo.reset()
        return found

    expected = guards()
    before = len(asked)
    asked.clear()
    with paths_shortened_once():
        assert guards() == expected
    assert len(asked) == len(set(asked)) < before
    assert any(Path(__file__).name in text for text in expected)


def test_guards_say_of_which_variable_around_a_function_they_are() -> None:
    def hints() -> list[str]:
        found: list[str] = []
        write = torch._dynamo.guards.get_verbose_code_parts
        torch._dynamo.reset()
        inner = torch.nn.Linear(3, 3)
        inner.scale = 2.0  # type: ignore[assignment]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                torch._dynamo.guards, "get_verbose_code_parts", lambda *a, **k: (found.extend(write(*a, **k)), found)[1]
            )
            torch.compile(lambda x: inner(x) * inner.scale, backend="eager")(torch.ones(2, 3))
        torch._dynamo.reset()
        return found

    expected = hints()
    with paths_shortened_once():
        assert hints() == expected
    assert any("inner" in line and "HINT" in line for line in expected)
    assert not all("HINT" in line for line in expected)


@pytest.mark.parametrize("called", [False, True], ids=["compiled", "called"])
def test_a_graph_of_dynamo_is_written_when_it_is_called(called: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._logging._internal.trace_log", logging.Logger("nobody listens"))

    def made() -> tuple[int, GraphModule]:
        graphs: list[GraphModule] = []
        written = 0
        plain = torch.fx.Graph.python_code

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal written
            written += 1
            return plain(*args, **kwargs)

        def backend(graph: GraphModule, inputs: Any) -> Any:
            assert isinstance(graph, GraphModule)
            graphs.append(graph)
            return graph.forward if called else lambda x: (x.sin() + 1,)

        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.fx.Graph, "python_code", counted)
            result = torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(3))
        torch._dynamo.reset()
        assert torch.equal(result, torch.ones(3).sin() + 1)
        return written, graphs[0]

    always, one = made()
    with written_when_called():
        later, other = made()
    assert always > 0
    assert (later > 0) == called
    assert other.code == one.code


def test_nobody_is_told_what_a_key_is_made_of_but_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._logging._internal.trace_log", logging.Logger("nobody listens"))
    pickler = codecache.FxGraphCachePickler
    asked = SimpleNamespace(one=1, several=[2, 3])
    module = GraphModule({}, torch.fx.Graph())
    expected = pickler(module).debug_lines(asked)
    assert len(expected) == 3
    with unwritten():
        assert pickler(module).debug_lines(asked) == []
        monkeypatch.setattr(autograd_cache, "log", logging.Logger("keys", logging.DEBUG))
    with unwritten():
        assert pickler(module).debug_lines(asked) == expected


def test_ops_do_more_than_they_return_or_not_as_ever() -> None:
    aten = torch.ops.aten
    calls = [
        *((op, random) for op in (aten.sin.default, aten.add_.Tensor, aten.rand.default) for random in (True, False)),
        (aten.sin, True), (aten._assert_async.msg, True), (operator.getitem, True), (torch.manual_seed, False),
    ]  # fmt: skip
    expected = [library.is_impure(op, args=(), kwargs={}, impure_random=random) for op, random in calls]
    plain = library.is_impure
    with unwritten():
        assert library.is_impure is not plain
        for _ in range(2):
            assert [library.is_impure(op, args=(), kwargs={}, impure_random=random) for op, random in calls] == expected
    assert len({*expected}) == 2
    assert library.is_impure is plain
