"""Test which calls a step discovers, which of them are compiled, and why others are not."""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.compile.capture.discovery import CompiledModules
from lightning_zero.errors import UnsupportedError
from tests.unit.compile.backends import Backend

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.decoder = nn.Linear(3, 3)
        self.loss = nn.MSELoss()
        self.counting = Counting()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Counting(nn.Linear):
    """A metric: it has parameters and is never compiled."""

    def __init__(self) -> None:
        super().__init__(3, 3)


class Calls(CompiledModules):
    def __init__(self, net: nn.Module | None = None) -> None:
        self.backend, self.lines = Backend(), []  # type: ignore[var-annotated]
        self.net = net or Net()
        super().__init__(self.net, {"backend": self.backend}, (Counting,), self.lines.append)

    def shown(self, step: Callable[[Any], Any]) -> list[str]:
        """Run the first step and return the compiled modules."""
        with self.step(first=True):
            step(self.net)
        return list(self.modules)


X = torch.ones(2, 3)


def test_the_outermost_calls_of_a_step_are_compiled() -> None:
    assert Calls().shown(lambda net: net(X)) == [""]
    assert Calls().shown(lambda net: net.decoder(net.encoder(X))) == ["encoder", "decoder"]


def test_what_has_no_parameters_or_is_somebody_elses_is_left_alone() -> None:
    calls, other = Calls(), nn.Linear(3, 3)
    assert calls.shown(lambda net: net.loss(other(net.encoder[1](X)), X)) == []
    assert calls.shown(lambda net: net.counting(X)) == []
    assert calls.eager_reasons == {}


def test_the_first_step_runs_eagerly_and_later_ones_compiled() -> None:
    calls = Calls()
    calls.shown(lambda net: net(X))
    assert calls.backend.graphs == 0
    for _ in range(2):
        with calls.step(first=False):
            assert torch.equal(calls.net(X), Net.forward(calls.net, X))
    assert calls.backend.graphs == 1
    assert calls.call_info.called == "the whole Net"


def test_calls_outside_of_a_step_are_not_watched() -> None:
    calls = Calls()
    with pytest.raises(ZeroDivisionError), calls.step(first=True):
        calls.net.encoder(X)
        raise ZeroDivisionError
    calls.net.decoder(X)
    assert list(calls.modules) == [], "nothing is compiled after a step that failed"
    assert calls.shown(lambda net: net.decoder(X)) == ["decoder"]


def test_modules_that_look_alike_share_a_graph() -> None:
    calls = Calls(nn.ModuleList(nn.Linear(3, 3) for _ in range(12)))

    def step(layers: Any) -> None:
        for layer in layers:
            layer(X)

    assert len(calls.shown(step)) == 12
    with calls.step(first=False):
        step(calls.net)
    assert calls.backend.graphs == 1


def gradient_penalty(net: Any) -> None:
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(net.encoder(x).sum(), x, create_graph=True)
    grad.sum().backward()


def under_vmap(net: Any) -> None:
    torch.func.vmap(net.encoder)(X)


def with_others_inside(net: Any) -> None:
    """The outermost call is compiled unless it calls modules inside a transform."""
    net.decoder.forward = lambda x: torch.func.vmap(net.encoder)(x)
    try:
        net.decoder(X)
    finally:
        del net.decoder.forward


@pytest.mark.parametrize(
    ("step", "name", "why"),
    [
        (gradient_penalty, "encoder", "it is differentiated twice (create_graph=True)"),
        (under_vmap, "encoder", "it is called inside torch.func (grad, vmap, ...)"),
    ],
)
def test_what_compiled_code_cannot_do_stays_eager_and_is_told(step: Callable[[Any], None], name: str, why: str) -> None:
    calls = Calls()
    assert calls.shown(step) == []
    assert calls.eager_reasons == {name: why}
    shown = f"'{name}' ({type(calls.net.get_submodule(name)).__name__})"
    assert calls.lines == [f"Not compiling {shown}: {why}, which compiled code does not support."]


def test_modules_that_call_others_inside_a_transform_stay_eager() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(self.inner)(x)

    calls = Calls(Outer())
    assert calls.shown(lambda net: net(X)) == []
    assert calls.eager_reasons == {"": "it calls modules inside torch.func (grad, vmap, ...)"}


def test_a_backward_after_the_first_step_counts_too() -> None:
    calls = Calls()
    x = X.clone().requires_grad_()
    with calls.step(first=True):
        loss = calls.net.encoder(x).sum()
    assert list(calls.modules) == ["encoder"]
    torch.autograd.grad(loss, x, create_graph=True)
    assert calls.modules == {}
    assert calls.net.encoder._compiled_call_impl is None
    assert list(calls.eager_reasons) == ["encoder"]


@pytest.mark.parametrize("retain", [True, False])
def test_a_graph_that_is_kept_for_another_backward_is_noted(retain: bool) -> None:
    calls = Calls()
    calls.shown(lambda net: net.encoder(X).sum().backward(retain_graph=retain))
    assert calls.call_info.retains_graph is retain


def test_calls_are_compiled_again_with_other_arguments() -> None:
    calls, other = Calls(), Backend()
    calls.shown(lambda net: net(X))
    with calls.step(first=False):
        calls.net(X)
        calls.compile_again({"backend": other})
        calls.net(X)
    assert (calls.backend.graphs, other.graphs) == (1, 1)


def test_a_new_beginning_shows_again_what_to_compile() -> None:
    calls, other = Calls(), Backend()
    calls.shown(lambda net: net.encoder(X))
    again = calls.restart({"backend": other})
    assert calls.net.encoder._compiled_call_impl is None
    assert (again.modules, again.eager_reasons) == ({}, {})
    with again.step(first=True):
        calls.net.decoder(X)
    with again.step(first=False):
        calls.net.decoder(X)
    assert list(again.modules) == ["decoder"]
    assert (calls.backend.graphs, other.graphs) == (0, 1)


def test_restored_calls_are_plain() -> None:
    calls = Calls()
    calls.shown(lambda net: net(X))
    calls.restore()
    calls.net(X)
    assert calls.backend.graphs == 0
    assert calls.net._compiled_call_impl is None


@pytest.mark.parametrize(
    "words",
    [
        "torch.compile with aot_autograd does not currently support double backward",
        "a compiled graph has non-empty donated buffers",
    ],
)
def test_torchs_own_errors_are_explained(words: str) -> None:
    calls = Calls()
    calls.shown(lambda net: net.decoder(net.encoder(X)))
    compiled = r"Compiled: 'encoder' \(Sequential\), 'decoder' \(Linear\)\."
    with pytest.raises(UnsupportedError, match=compiled), calls.explain_errors():
        raise RuntimeError(words)
    with pytest.raises(RuntimeError, match="another"), calls.explain_errors():
        raise RuntimeError("another")


def test_a_parameter_that_is_unfrozen_is_noticed() -> None:
    """torch 2.11 would treat it as unchanged while its module holds the same object."""
    calls = Calls()
    calls.shown(lambda net: net.encoder(X))
    config = torch.compiler.config
    before = config.skip_tensor_guards_with_matching_dict_tags
    with calls.step(first=False):
        assert config.skip_tensor_guards_with_matching_dict_tags is False
    assert config.skip_tensor_guards_with_matching_dict_tags is before


def test_hooks_that_come_and_go_are_noticed_and_nothing_is_compiled_twice() -> None:
    calls = Calls()
    calls.shown(lambda net: net(X))
    plain = Net.forward(calls.net, X)

    def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2

    graphs = []
    for hooked in (False, False, True, True, False, True, False):
        handle = calls.net.decoder.register_forward_hook(double) if hooked else None
        with calls.step(first=False):
            assert torch.equal(calls.net(X), plain * 2 if hooked else plain)
        graphs.append(calls.backend.graphs)
        if handle is not None:
            handle.remove()
    assert graphs == [1, 1, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("later", [False, True])
def test_hooks_of_a_module_that_was_put_in_the_place_of_another_are_noticed(later: bool) -> None:
    calls = Calls()
    calls.shown(lambda net: net(X))
    with calls.step(first=False):
        plain = calls.net(X)
    calls.net.encoder[1] = new = nn.Tanh()
    if later:
        with calls.step(first=False):
            assert torch.equal(calls.net(X), plain)
    new.register_forward_hook(lambda module, args, output: output * 2)
    with calls.step(first=False):
        assert torch.equal(calls.net(X), calls.net.forward(X))
        assert not torch.equal(calls.net(X), plain)


def test_a_hook_on_one_of_several_modules_is_not_called_for_the_others_nor_left_out() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(3, 3), nn.Linear(3, 3)
            self.teacher.register_forward_hook(lambda module, args, output: output * 2)

    calls = Calls(Pair())
    calls.shown(lambda pair: pair.student(X) + pair.teacher(X))
    student, teacher = (part.forward(X) for part in (calls.net.student, calls.net.teacher))
    for _ in range(2):
        with calls.step(first=False):
            assert torch.equal(calls.net.student(X), student)
            assert torch.equal(calls.net.teacher(X), teacher * 2)


def test_what_is_logged_once_breaks_no_graph(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def warning_once(self: logging.Logger, message: str) -> None:
        self.warning(message)

    monkeypatch.setattr(logging.Logger, "warning_once", functools.lru_cache(None)(warning_once), raising=False)
    logger = logging.getLogger("tests.warned_once")

    class Warns(Net):
        def forward(self, x: Tensor) -> Tensor:
            encoded = self.encoder(x)
            logger.warning_once("there is a default")  # type: ignore[attr-defined]
            return self.decoder(encoded)

    calls = Calls(Warns())
    calls.shown(lambda net: net(torch.ones(2, 3)))
    for _ in range(2):
        with calls.step(first=False):
            calls.net(torch.ones(2, 3))
    assert calls.backend.graphs == 1
    assert caplog.text.count("there is a default") == 1
    assert "Unexpected exception" not in caplog.text, "torch has something to say of its settings"
    assert type(torch._dynamo.config.ignore_logging_functions) is set


class Counter(nn.Module):
    """Scale the result by the number of calls."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.number, self.calls = number, 0
        self.said = ""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls + self.number + len(self.said)


class Counters(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Counter(number) for number in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("make", [Counter, Counters])
def test_an_int_of_a_module_that_changes_is_compiled_twice(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    net = make()
    plain = copy.deepcopy(net)
    calls = Calls(net)
    calls.shown(lambda net: net(X))
    plain(X)
    for _ in range(12):
        with calls.step(first=False):
            assert torch.equal(net(X), plain(X))
    assert calls.backend.graphs == 2
    assert [m.calls for m in net.modules() if isinstance(m, Counter)] == [13] * (3 if make is Counters else 1)
    assert not calls.limit_reasons


def test_code_that_torch_compiles_no_more_is_named_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls(Counter())
    calls.shown(lambda net: net(X))
    limit = torch._dynamo.config.recompile_limit
    with caplog.at_level(logging.WARNING):
        for step in range(limit + 3):
            calls.net.said = "x" * step
            with calls.step(first=False):
                calls.net(X)
    (record,) = [record for record in caplog.records if "lightning_zero" in record.name]
    assert f"the whole Counter runs eagerly from now on: torch has compiled it {limit} times" in record.getMessage()
    assert "said" in record.getMessage()
    assert "torch.compiler.disable" in record.getMessage()
    assert not any("torch._dynamo hit" in record.getMessage() for record in caplog.records)
    assert list(calls.limit_reasons) == [""]
    calls.restore()
    assert not calls.limit_reasons


def test_a_compilation_of_an_evaluation_that_fails_after_the_backend_is_finished() -> None:
    """Otherwise its progress would be shown for ever, and other ranks would wait for it."""
    finished: list[float] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.call_info.pending_compiles.add(lambda: None, 1.0, finished.append)

        def run(*args: Any) -> Any:
            raise ValueError("after the backend")

        return run

    module = nn.Linear(4, 4)
    found = CompiledModules(module, {"backend": backend})
    found.compile("", module)
    with torch.no_grad(), pytest.raises(ValueError, match="after the backend"):
        module(torch.ones(2, 4))
    assert finished == [pytest.approx(1.0, abs=0.5)]


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, scale: float, *, batch: dict[str, Tensor]) -> Tensor:
        return scale * self.linear(batch["x"]).sum(0) / len(batch["x"])


@pytest.mark.parametrize(
    ("eager", "compiled", "graphs"),
    [
        ((4, 6), (5, 7, 9), 1),  # the first step shows it
        ((4,), (5, 7, 9), 1),
        ((4,), (4, 4, 4), 1),
        ((4,), (4, 5, 9), 2),
        ((4, 6), (1, 5, 9), 2),  # torch compiles for 1 apart
    ],
)
def test_sizes_that_change_before_the_compilation_are_compiled_once(
    eager: tuple[int, ...], compiled: tuple[int, ...], graphs: int
) -> None:
    net = Pooled()
    calls, plain = Calls(net), copy.deepcopy(net)

    def call(module: nn.Module, n: int) -> Tensor:
        return module(2.0, batch={"x": torch.arange(3.0 * n).view(n, 3)})

    calls.shown(lambda net: [call(net, n) for n in eager])
    for n in compiled:
        with calls.step(first=False):
            torch.testing.assert_close(call(net, n), call(plain, n))
    assert calls.backend.graphs == graphs


def test_sizes_stay_constants_if_the_options_say_so() -> None:
    net = Pooled()
    calls = CompiledModules(net, {"backend": (backend := Backend()), "dynamic": False})
    for first, n in ((True, 4), (False, 5), (False, 7)):
        with calls.step(first):
            net(1.0, batch={"x": torch.ones(n, 3)})
    assert backend.graphs == 2
