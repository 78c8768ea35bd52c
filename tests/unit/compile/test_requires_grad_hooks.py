"""Hooks that only have outputs ask for gradients are left out of compiled code, where nothing sees that."""

import copy
import json
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.compat.compiler import dynamo_config
from lightning_zero.compile.capture.discovery import CompiledModules
from lightning_zero.compile.capture.requires_grad import find_requires_grad_hooks, ignore_hooks
from tests.unit.compile.backends import Backend

TOKENS = torch.arange(4)


pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


def make_inputs_require_grads(module: nn.Module, args: Any, output: Tensor) -> None:
    output.requires_grad_(True)


class Adapted(nn.Module):
    """An embedding that is frozen, as with LoRA, before layers that are checkpointed."""

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
    """Graphs that were compiled, and gradients of a first step, which runs eagerly, and of two more."""
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
    net.other = nn.Embedding(4, 3)  # of the class of the one that has a hook
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
    """As GPT-2's first hidden state, to which frozen positions are added."""

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
    """Torch 2.11 does so after each compilation, and said that it could not, with a stack, for each checkpointed model
    of transformers."""
    assert isinstance(make_inputs_require_grads, FunctionType)
    with ignore_hooks([make_inputs_require_grads]):
        setting = dynamo_config.ignore_logging_functions
        assert make_inputs_require_grads in setting
        assert json.dumps(copy.deepcopy(setting)) == "[]"
