"""Code that only makes activations require grad is ignored unless its effect is visible."""

import copy
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from lightning_zero.compat.compiler import dynamo_config
from lightning_zero.compile.capture.discovery import CompiledModules
from lightning_zero.compile.capture.requires_grad import find_requires_grad_hooks, ignore_grad_leaves, ignore_hooks
from tests.unit.compile.backends import Backend

TOKENS = torch.arange(4)


pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


def make_inputs_require_grads(module: nn.Module, args: Any, output: Tensor) -> None:
    output.requires_grad_(True)


class Adapted(nn.Module):
    """A frozen embedding, as with LoRA, before checkpointed layers."""

    def __init__(self, reentrant: bool = False, shows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layers = nn.Embedding(4, 3), nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.embedding.requires_grad_(False)
        self.handle = self.embedding.register_forward_hook(make_inputs_require_grads)
        self.reentrant, self.shows = reentrant, shows

    def forward(self, tokens: Tensor) -> Any:
        x = embedded = self.embedding(tokens)
        x = self.eagerly(x) if self.reentrant else self.checkpointed(x)
        return (x, embedded) if self.shows else x

    def checkpointed(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
        return x

    @torch.compiler.disable
    def eagerly(self, x: Tensor) -> Tensor:
        return self.checkpointed(x)


def trained(net: Adapted, loss: Callable[[Any], Tensor]) -> tuple[int, list[list[Tensor]]]:
    """Return compiled graphs, and gradients of a first, eager step and of two more."""
    backend, found = Backend(), []
    calls = CompiledModules(net, {"backend": backend})
    for number in range(3):
        with calls.step(first=number == 0):
            loss(net(TOKENS)).backward()
        found.append([layer.weight.grad for layer in net.layers])
        net.zero_grad()
    return backend.graphs, found


def test_no_graph_is_broken_where_checkpoints_do_not_need_that() -> None:
    graphs, gradients = trained(Adapted(), lambda out: out.square().sum())
    assert graphs == 1
    for later in gradients[1:]:
        torch.testing.assert_close(later, gradients[0])
    assert type(torch._dynamo.config.ignore_logging_functions) is set, "the setting is as it was"


@pytest.mark.parametrize("shows", [False, True])
def test_hooks_are_guarded_only_where_compiled_code_goes_with_them(shows: bool) -> None:
    net, backend = Adapted(shows=shows), Backend()
    net.other = nn.Embedding(4, 3)  # same class as the one with a hook
    calls = CompiledModules(net, {"backend": backend})
    for number in range(2):
        with calls.step(first=number == 0):
            net(TOKENS)
    assert backend.graphs
    assert backend.hooks_guarded is shows


def test_reentrant_checkpoints_keep_their_gradients() -> None:
    _, gradients = trained(Adapted(reentrant=True), lambda out: out.square().sum())
    assert all(grad is not None for step in gradients for grad in step)
    for later in gradients[1:]:
        torch.testing.assert_close(later, gradients[0])


def test_an_output_that_the_caller_sees_goes_on_asking_for_gradients() -> None:
    def loss(out: tuple[Tensor, Tensor]) -> Tensor:
        assert out[1].requires_grad
        return out[0].square().sum() + out[1].square().sum()

    trained(Adapted(shows=True), loss)


def test_so_does_one_of_which_the_caller_sees_what_was_made_without_weights() -> None:
    """Like GPT-2's first hidden state plus frozen positions."""

    class Shifted(Adapted):
        def forward(self, tokens: Tensor) -> Any:
            shifted = self.embedding(tokens) + 1
            return self.checkpointed(shifted), shifted

    seen = []

    def loss(out: tuple[Tensor, Tensor]) -> Tensor:
        [gradient] = torch.autograd.grad(out[0].square().sum(), out[1], retain_graph=True)
        seen.append(gradient)
        return out[0].square().sum()

    trained(Shifted(), loss)
    for later in seen[1:]:
        torch.testing.assert_close(later, seen[0])


def test_only_hooks_that_do_nothing_else_are_taken_for_that() -> None:
    seen = []

    def looks(module: nn.Module, args: Any, output: Tensor) -> None:
        output.requires_grad_(True)
        seen.append(output)

    def freezes(module: nn.Module, args: Any, output: Tensor) -> None:
        output.requires_grad_(False)

    def returns(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.requires_grad_(True)

    def bare(module: nn.Module, args: Any, output: Tensor) -> None:
        output.requires_grad_()

    def named(module: nn.Module, args: Any, output: Tensor) -> None:
        output.requires_grad_(requires_grad=True)

    def halves(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.requires_grad_(True) / 2

    def first(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> Tensor:
        return output[0].requires_grad_(True)

    def unfreezes(module: nn.Module, args: Any, output: Tensor) -> None:
        module.requires_grad_(True)

    others = [looks, freezes, nn.Identity(), halves, first, unfreezes]
    asks = [make_inputs_require_grads, returns, bare, named]
    assert find_requires_grad_hooks([dict(enumerate([*others, *asks])), {}]) == asks


def test_what_transformers_and_peft_put_on_an_embedding_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **shape))
    net.enable_input_require_grads()
    assert len(find_requires_grad_hooks([net.get_input_embeddings()._forward_hooks])) == 1


def test_torch_can_write_its_settings_down_meanwhile() -> None:
    """torch 2.11 does so after each compilation and would log a stack for each checkpointed model."""
    assert isinstance(make_inputs_require_grads, FunctionType)
    with ignore_hooks([make_inputs_require_grads]):
        setting = dynamo_config.ignore_logging_functions
        assert make_inputs_require_grads in setting
        assert json.dumps(copy.deepcopy(setting)) == "[]"


WEIGHT = torch.tensor([2.0, 3.0])


def graphs(function: Callable[..., Any], *args: Any, context: AbstractContextManager[None] | None = None) -> list[Any]:
    """Return the result of compiled code and the number of graphs."""
    found = []

    def backend(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        found.append(module)
        return module.forward

    torch._dynamo.reset()
    with context or ignore_grad_leaves():
        result = torch.compile(function, backend=backend)(*args)
    return [result, len(found)]


def by_attribute(x: Tensor) -> None:
    x.requires_grad = True


def by_method(x: Tensor) -> None:
    x.requires_grad_()


def by_keyword(x: Tensor) -> None:
    x.requires_grad_(requires_grad=True)


WAYS = [by_attribute, by_method, by_keyword]


@pytest.mark.parametrize("mark", WAYS)
def test_a_leaf_whose_gradient_nobody_takes_does_not_end_the_graph(mark: Callable[[Tensor], None]) -> None:
    weight = WEIGHT.clone().requires_grad_()

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        hidden = x + 1
        mark(hidden)
        return (hidden * weight).sum()

    loss, count = graphs(forward, torch.ones(2), weight)
    assert count == 1
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_nor_does_one_that_is_made_in_a_checkpointed_region(reentrant: bool) -> None:
    layer = nn.Linear(2, 2)

    def region(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            bias = torch.zeros(2, dtype=x.dtype)
            bias.requires_grad = True
        return layer(x) + bias, bias

    def forward(x: Tensor) -> Tensor:
        bias = None
        for _ in range(2):
            x, bias = torch.utils.checkpoint.checkpoint(region, x, bias, use_reentrant=reentrant)
        return x.sum()

    x = torch.ones(3, 2, requires_grad=True)
    loss, count = graphs(forward, x)
    assert count == 1
    assert torch.equal(loss, forward(x))


def outside(x: Tensor) -> None:
    torch._dynamo.graph_break()


def penalty(hidden: Tensor, weight: Tensor) -> Any:
    [grad] = torch.autograd.grad((hidden * weight).sum(), hidden, create_graph=True)
    return grad.square().sum()


def returned(hidden: Tensor, weight: Tensor) -> Any:
    return hidden, hidden * weight


def view_returned(hidden: Tensor, weight: Tensor) -> Any:
    return hidden.view(1, 2), hidden * weight


def read(hidden: Tensor, weight: Tensor) -> Any:
    return (hidden * weight).sum() * (2 if hidden.requires_grad else 1)


def read_of_what_follows(hidden: Tensor, weight: Tensor) -> Any:
    return (hidden * weight).sum() * (2 if (hidden * 3).requires_grad else 1)


def is_leaf_read(hidden: Tensor, weight: Tensor) -> Any:
    return (hidden * weight).sum() * (2 if (hidden * 3).is_leaf else 1)


def hooked(hidden: Tensor, weight: Tensor) -> Any:
    hidden.register_hook(lambda grad: grad * 2)
    return (hidden * weight).sum()


def retained(hidden: Tensor, weight: Tensor) -> Any:
    hidden.retain_grad()
    return (hidden * weight).sum()


def used_behind_a_break(hidden: Tensor, weight: Tensor) -> Any:
    product = (hidden * weight).sum()
    outside(product)
    return product + hidden.sum()


def assert_alike(found: Any, expected: Any) -> None:
    for mine, theirs in zip(*(one if isinstance(one, tuple) else (one,) for one in (found, expected)), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.requires_grad == theirs.requires_grad


ASKING = [
    penalty, returned, view_returned, read, read_of_what_follows, is_leaf_read, hooked, retained, used_behind_a_break
]  # fmt: skip


@pytest.mark.parametrize(
    ("asks", "mark"),
    [
        pytest.param(asks, mark, marks=[pytest.mark.exhaustive] * (number % len(WAYS) != way))
        for number, asks in enumerate(ASKING)
        for way, mark in enumerate(WAYS)
    ],
)
def test_where_somebody_may_ask_for_its_gradient_it_has_one(
    asks: Callable[..., Any], mark: Callable[[Tensor], None]
) -> None:
    def forward(x: Tensor, weight: Tensor) -> Any:
        hidden = x + 1
        mark(hidden)
        return asks(hidden, weight)

    weight = WEIGHT.clone().requires_grad_()
    expected = forward(torch.ones(2), weight)
    found, _ = graphs(forward, torch.ones(2), weight)
    assert_alike(found, expected)


@pytest.mark.parametrize("asks", [read, is_leaf_read, returned])
def test_so_it_has_where_a_checkpointed_region_asks(asks: Callable[..., Any]) -> None:
    weight = WEIGHT.clone().requires_grad_()

    def region(x: Tensor) -> Any:
        hidden = x + 1
        hidden.requires_grad = True
        return asks(hidden, weight)

    def forward(x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False)

    expected = forward(torch.ones(2))
    found, _ = graphs(forward, torch.ones(2))
    assert_alike(found, expected)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_tensor_of_the_caller_is_marked(wanted: bool) -> None:
    def forward(x: Tensor) -> Tensor:
        x.requires_grad = wanted
        return x * 2

    x = torch.ones(2, requires_grad=not wanted)
    result, _ = graphs(forward, x)
    assert (x.requires_grad, result.requires_grad) == (wanted, wanted)


def test_outside_dynamo_is_as_it_was() -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        hidden = x + 1
        hidden.requires_grad = True
        return (hidden * weight).sum()

    with ignore_grad_leaves():
        pass
    weight = WEIGHT.clone().requires_grad_()
    _, count = graphs(forward, torch.ones(2), weight, context=nullcontext())
    assert count == 2
