"""Test that optimizers that need full parameters are rejected by name, and elementwise ones are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.support import check_optimizer


class Elementwise(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad.sign(), alpha=-group["lr"])


def named(name: str, base: type = Elementwise) -> Optimizer:
    """Return a stand-in for an optimizer of a library that is not installed."""
    return type(name, (base,), {})([nn.Parameter(torch.zeros(3, 3))])


REASONS = {
    "orthogonalizes full matrices": ["Muon", "MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam", "NorMuon", "Dion"],
    "keeps row and column statistics of full matrices": [
        "Adafactor",
        "AdafactorScheduled",
        "AdaFactor",
        "CAME",
        "SM3",
    ],
    "preconditions with full matrices": ["Shampoo", "DistributedShampoo", "ShampooV2", "SOAP", "KFAC", "PSGD"],
    "projects full matrices": ["GaLore", "GaLoreAdamW", "GaLoreAdamW8bit"],
    "scales by the norm of full parameters": ["LAMB", "Lamb", "LARS"],
    "takes inner products over all parameters": ["LBFGS", "Prodigy", "DAdaptAdam"],
    "projects on full parameters": ["AdamP", "SGDP"],
    "normalizes by the norm of full gradients": ["NovoGrad"],
    "shares statistics over blocks of full parameters": ["AdamMini", "Adam_mini"],
    "steps the rows that sparse gradients name": ["SparseAdam"],
}
REFUSED = [(name, reason) for reason, names in REASONS.items() for name in names]


@pytest.mark.parametrize(("name", "reason"), REFUSED, ids=[name for name, _ in REFUSED])
def test_an_optimizer_for_whole_parameters_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{name} {reason}.*such as AdamW.*or another strategy"):
        check_optimizer(named(name))


def test_torchs_own_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="^LBFGS "):
        check_optimizer(torch.optim.LBFGS([nn.Parameter(torch.zeros(3, 3))]))


def test_a_subclass_of_a_refused_one_is_refused_by_its_own_name() -> None:
    for base in ("Muon", "SOAP", "GaLoreAdamW"):
        with pytest.raises(UnsupportedError, match="^MyOptimizer "):
            check_optimizer(named("MyOptimizer", type(named(base))))


class Lion(Elementwise):
    """Named like many elementwise optimizers."""


ACCEPTED: list[Callable[..., Optimizer]] = [
    torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop, Elementwise, Lion,
]  # fmt: skip


@pytest.mark.parametrize("make", ACCEPTED, ids=lambda make: make.__name__)
def test_an_optimizer_that_treats_elements_one_by_one_is_accepted(make: Callable[..., Optimizer]) -> None:
    check_optimizer(make([nn.Parameter(torch.zeros(3, 3))]))


class Lookahead(Elementwise):
    """Steps by an inner optimizer, as many wrappers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.fast = torch.optim.SGD(self.param_groups, lr=0.1)


class NotInitialized(Elementwise):
    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


class InTwoParts(Elementwise):
    def state_dict(self) -> dict[str, Any]:
        return {"fast": {}, "slow": {}}


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Lookahead, "by another optimizer that it holds .SGD.*Return the SGD itself"),
        (NotInitialized, r"has not called .*Call super\(\).__init__"),
        (InTwoParts, r"is \{'fast', 'slow'\}, not 'state'"),
    ],
)
def test_an_optimizer_that_no_checkpoint_could_hold_is_refused_before_training(cls: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{cls.__name__} .*{words}"):
        check_optimizer(cls([nn.Parameter(torch.zeros(3, 3))]))
