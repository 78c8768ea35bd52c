"""Names in ``compat/compiler.py`` have the expected meaning in this torch."""

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import config as functorch_config
from functorch.compile import min_cut_rematerialization_partition as min_cut_partition
from torch import Tensor, nn
from torch._functorch._aot_autograd import graph_compile
from torch.fx import GraphModule

from lightning_zero.compat.compiler import (
    BoxedCodeGen,
    CustomGraphPass,
    Unsupported,
    aot_autograd,
    compiled_from,
    keep_python_scalars,
    limit_row_elements,
    lookup_backend,
    skip_debug_text,
    stable_topological_sort,
)


def test_a_backend_is_made_of_a_partitioner_and_boxed_compilers() -> None:
    seen: list[str] = []
    lengths: list[int] = []

    def partition(module: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        seen.append("joint")
        return min_cut_partition(module, inputs, **kwargs)

    def compiler(kind: str) -> Callable[..., Any]:
        def compiled(module: GraphModule, inputs: Any) -> Any:
            seen.append(kind)
            module.graph.set_codegen(BoxedCodeGen())
            module.recompile()

            def run(inputs: list[Any]) -> Any:
                result = module.forward(inputs)
                lengths.append(len(inputs))
                return result

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compiled

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
    )
    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(lambda x: (x.sin() * x).sum(), backend=backend)
    compiled(x).backward()
    with torch.no_grad():
        compiled(x)
    assert x.grad is not None
    assert seen == ["joint", "forward", "backward", "inference"]
    assert lengths == [0, 0, 0], "a graph leaves its list of inputs empty, so that they are freed"


def test_settings_of_the_partitioner_and_of_backwards() -> None:
    with functorch_config.patch(activation_memory_budget=0.5, donated_buffer=False):
        assert functorch_config.activation_memory_budget == 0.5
        assert functorch_config.donated_buffer is False


def test_a_pass_of_inductor_is_a_call_and_a_uuid() -> None:
    assert CustomGraphPass.__abstractmethods__ == {"__call__", "uuid"}


def test_inductor_takes_settings_for_one_graph() -> None:
    import torch._inductor.config as config
    from torch._inductor.compile_fx import compile_fx

    assert callable(lookup_backend("inductor"))
    assert "config_patches" in inspect.signature(compile_fx).parameters
    passes = ("joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_post_pass")
    for name in (*passes, "reorder_for_peak_memory"):
        assert hasattr(config, name)


def test_nodes_are_sorted_after_their_inputs() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    one = graph.call_function(torch.sin, (x,))
    two = graph.call_function(torch.cos, (x,))
    one.args = (two,)
    graph.output(one)
    stable_topological_sort(graph)
    graph.lint()
    assert [node.target for node in graph.nodes][1:3] == [torch.cos, torch.sin]


def test_a_compiled_module_has_its_original() -> None:
    module = nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    assert compiled._orig_mod is module
    assert set(compiled.state_dict()) == {"_orig_mod.weight", "_orig_mod.bias"}


def test_a_boxed_graph_takes_one_list() -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    module = torch.fx.symbolic_trace(doubled)
    module.graph.set_codegen(BoxedCodeGen())
    module.recompile()
    given = [torch.ones(1)]
    assert module.forward(given).item() == 2
    assert given == []


def test_numbers_of_a_graph_become_tensors_unless_kept() -> None:
    read = torch.ops.aten._local_scalar_dense.default
    stay: list[bool] = []

    def note(module: GraphModule, inputs: Any) -> Any:
        stay.append(bool(module.graph.find_nodes(op="call_function", target=read)))
        return module.forward

    for within in (nullcontext, keep_python_scalars, nullcontext):
        torch.compiler.reset()
        compiled = torch.compile(lambda x, number: x * number, backend=aot_autograd(fw_compiler=note))
        x = torch.randn(3)
        with within():
            for number in (1.5, 2.5, 3.5):
                torch.testing.assert_close(compiled(x, number), x * number)
    # Compiled for one number, then for any.
    assert stay == [False, False, False, True, False, False]


def test_compiled_functions_have_their_original() -> None:
    def plain(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return 2 * x

    compiled = torch.compile(plain, backend="eager", fullgraph=True)

    @functools.wraps(compiled)
    def around(x: Tensor) -> Tensor:
        return compiled(x) + 1

    assert compiled_from(compiled) is plain
    for other in (plain, around, torch.compiler.disable(plain)):
        assert compiled_from(other) is None
    with pytest.raises(Unsupported):
        compiled(torch.ones(2))


def count_texts(monkeypatch: pytest.MonkeyPatch) -> tuple[int, Tensor]:
    """Return how many graphs are printed while a function is compiled, and a gradient."""
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


def test_graphs_are_not_printed_for_logs_that_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._logging._internal.trace_log", logging.Logger("off"))
    plain, expected = count_texts(monkeypatch)
    with skip_debug_text():
        few, grad = count_texts(monkeypatch)
    assert few == plain - 2
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("traced", [False, True], ids=["logged", "traced"])
def test_graphs_are_printed_for_logs_that_are_on(monkeypatch: pytest.MonkeyPatch, traced: bool) -> None:
    trace, logs = logging.Logger("trace"), logging.Logger("graphs", logging.WARNING if traced else logging.INFO)
    if traced:
        trace.addHandler(logging.NullHandler())
    monkeypatch.setattr("torch._logging._internal.trace_log", trace)
    monkeypatch.setattr(graph_compile, "aot_graphs_log", logs)
    plain, _ = count_texts(monkeypatch)
    with skip_debug_text():
        assert count_texts(monkeypatch)[0] == plain


def test_torch_has_its_own_function_back() -> None:
    before = graph_compile._log_fw_bw_graphs
    with pytest.raises(ZeroDivisionError), skip_debug_text():
        assert graph_compile._log_fw_bw_graphs is not before
        raise ZeroDivisionError
    assert graph_compile._log_fw_bw_graphs is before


def test_kernels_that_reduce_rows_get_warps_by_their_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(size_hints: Any, reduction_hint: Any = False, inductor_meta: Any = None, triton_meta: Any = None) -> Any:
        return [SimpleNamespace(kwargs={"XBLOCK": rows}, num_warps=1) for rows in (1, 4, 16)]

    from torch._inductor.runtime import triton_heuristics

    parameters = inspect.signature(triton_heuristics._persistent_reduction_configs).parameters
    assert list(parameters) == list(inspect.signature(choose).parameters)
    monkeypatch.setattr(triton_heuristics, "_persistent_reduction_configs", choose)

    def warps() -> list[int]:
        found = triton_heuristics._persistent_reduction_configs({"x": 1 << 20, "r0_": 256})
        return [config.num_warps for config in found]

    with limit_row_elements(8):
        assert warps() == [1, 4, 8]
    assert warps() == [1, 1, 1]
