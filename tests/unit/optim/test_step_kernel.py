"""Test that the kernel keeps an optimizer's state as that optimizer would: complete, typed, unchanged by skipped steps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lightning_zero.optim import step_kernel
from lightning_zero.optim.flat_runs import FlatRun
from lightning_zero.optim.step_kernel import StepKernel

CPU = torch.device("cpu")
MAKES: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02, eps=1e-4),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.02, eps=1e-4),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=0, lambd=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.02),
}
MORE: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True, weight_decay=0.1, maximize=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.02, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
}


class Pair:
    """A plain optimizer after its first step, and a kernel that continues for two members at once."""

    def __init__(self, name: str, compile: bool = False, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(5)
        self.param = torch.nn.Parameter(torch.randn(12, dtype=dtype))
        self.optimizer = (MAKES | MORE)[name]([self.param])
        self.grads = [torch.randn(12, dtype=dtype) for _ in range(8)]
        self.step()
        own = copy.deepcopy(self.optimizer.state[self.param])
        self.counts = {key: value.repeat(2) for key, value in own.items() if value.dim() == 0}
        flat = torch.nn.Parameter(self.param.detach().clone())
        own.update({key: counts[0] for key, counts in self.counts.items()})
        self.flat_run = FlatRun(0, [], flat, torch.zeros(12, dtype=dtype), self.counts, own)
        groups = self.optimizer.param_groups
        assert StepKernel.supports(self.optimizer, groups, [self.flat_run])
        self.kernel = StepKernel(self.optimizer, groups, [self.flat_run], CPU, compile)
        self.squared = torch.zeros(())

    def step(self, max_norm: float | None = None) -> None:
        self.param.grad = self.grads.pop(0).clone()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_([self.param], max_norm)
        self.optimizer.step()

    def run(self, skip: float | None = None, max_norm: float | None = None) -> None:
        self.flat_run.grad.copy_(self.grads[0])
        if max_norm is not None:
            self.squared.fill_(self.grads[0].norm().square())
        flag = None if skip is None else torch.tensor(skip)
        self.kernel.run(self.optimizer.param_groups, self.squared, max_norm, flag)

    def kept(self) -> dict[str, Tensor]:
        return {**self.flat_run.state, **self.counts, "param": self.flat_run.param.detach()}


@pytest.mark.parametrize("name", MAKES)
def test_state_is_the_plain_optimizers(name: str) -> None:
    pair = Pair(name)
    while pair.grads:
        pair.optimizer.param_groups[0]["lr"] *= 0.9
        pair.run()
        pair.step()
    theirs = pair.optimizer.state[pair.param]
    assert list(pair.flat_run.state) == list(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(pair.flat_run.state[key], value, rtol=1e-5, atol=1e-6)
        if key in pair.counts:
            assert pair.counts[key].tolist() == [float(pair.flat_run.state[key])] * 2
    torch.testing.assert_close(pair.flat_run.param, pair.param, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*MAKES, *MORE])
def test_complex_state_is_the_plain_optimizers(name: str) -> None:
    pair = Pair(name, dtype=torch.complex64)
    for limit in (None, 0.4, None, 100.0, 0.4):
        pair.run(max_norm=limit)
        pair.step(limit)
    torch.testing.assert_close(pair.flat_run.param, pair.param, rtol=2e-6, atol=1e-6)
    for key, value in pair.optimizer.state[pair.param].items():
        torch.testing.assert_close(pair.flat_run.state[key], value, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", MAKES)
def test_gradients_are_clipped_as_they_are_used(name: str) -> None:
    """Clip below and above the norm, at another one, and not at all. Hooks see the clipped gradient."""
    pair = Pair(name)
    norms = [grad.norm().item() for grad in pair.grads]
    limits = [0.1, 0.1, norms[2] * 2, 0.4, None, 0.4, norms[6] / 2]
    assert len(limits) == len(pair.grads)
    for limit in limits:
        pair.run(max_norm=limit)
        pair.step(limit)
        assert pair.param.grad is not None
        torch.testing.assert_close(pair.flat_run.grad, pair.param.grad, rtol=2e-6, atol=0)
        torch.testing.assert_close(pair.flat_run.param, pair.param, rtol=2e-6, atol=1e-6)
    for key, value in pair.optimizer.state[pair.param].items():
        torch.testing.assert_close(pair.flat_run.state[key], value, rtol=1e-5, atol=1e-7)


def test_a_step_that_is_clipped_and_skipped_changes_no_state() -> None:
    pair = Pair("AdamW")
    before = copy.deepcopy(pair.kept())
    pair.run(skip=1.0, max_norm=0.1)
    assert {key: value.tolist() for key, value in pair.kept().items()} == {k: v.tolist() for k, v in before.items()}
    pair.run(skip=0.0, max_norm=0.1)
    pair.step(0.1)
    torch.testing.assert_close(pair.flat_run.param, pair.param, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", MAKES)
def test_a_skipped_step_changes_nothing(name: str) -> None:
    pair = Pair(name)
    before = copy.deepcopy(pair.kept())
    pair.run(skip=1.0)
    assert {key: value.tolist() for key, value in pair.kept().items()} == {k: v.tolist() for k, v in before.items()}
    pair.run(skip=0.0)
    still = {key for key, value in pair.kept().items() if torch.equal(value, before[key])}
    assert not still


def test_a_state_that_lacks_a_number_is_not_covered() -> None:
    pair = Pair("NAdam")
    without: dict[str, Any] = {key: value for key, value in pair.counts.items() if key != "mu_product"}
    flat_run = FlatRun(0, [], pair.flat_run.param, pair.flat_run.grad, without, pair.flat_run.state)
    assert not StepKernel.supports(pair.optimizer, pair.optimizer.param_groups, [flat_run])


def test_a_compiled_update_is_found_again_in_inductors_caches() -> None:
    found = []
    for _ in range(2):
        counters.clear()
        pair = Pair("AdamW", compile=True)
        pair.run()
        pair.step()
        torch.testing.assert_close(pair.flat_run.param.detach(), pair.param.detach(), rtol=1e-6, atol=1e-7)
        found.append(dict(counters["inductor"]))
    assert found[1]["fxgraph_cache_hit"]
    assert not {"fxgraph_cache_miss", "fxgraph_cache_bypass"} & found[1].keys()


def test_staged_state_of_several_dtypes_in_one_buffer_is_compiled() -> None:
    buffer = torch.arange(96.0)
    codes, scales = buffer.view(torch.uint8)[:64], buffer[16:80]
    grad = torch.full((64,), 2.0)

    def change(codes: Tensor, scales: Tensor, grad: Tensor, copy: Tensor) -> dict[str, Tensor]:
        new = scales + grad
        codes.copy_(new.to(torch.uint8))
        scales.copy_(new)
        copy.copy_(grad + new)
        return {}

    expected = scales + grad
    step_kernel._compile(change, (codes, scales, grad, grad))(codes, scales, grad, grad)
    assert torch.equal(scales, expected)
    assert torch.equal(codes, expected.to(torch.uint8))
    assert torch.equal(grad, 2 + expected)
    assert buffer[80:].tolist() == list(range(80, 96))
