"""Test that quantizing optimizers of libraries are refused with the line to write instead."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.support import check_optimizer


def made(name: str, module: str, base: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    cls = type(name, (base,), {"__module__": module})
    return cls([nn.Parameter(torch.zeros(3))], **options)


@pytest.mark.parametrize("module", ["torchao.optim.adam", "bitsandbytes.optim.adamw"])
def test_the_message_has_the_line_to_write_with_the_same_settings(module: str) -> None:
    optimizer = made("AdamW8bit", module, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    with pytest.raises(UnsupportedError) as caught:
        check_optimizer(optimizer)
    line = "torch.optim.AdamW(params, lr=0.0003, betas=(0.9, 0.95), weight_decay=0.1)"
    assert f"Write {line} with ZeroStrategy(tuning=Tuning(state_dtype='8bit'))" in str(caught.value)
    eval(line, {"torch": torch, "params": [nn.Parameter(torch.zeros(3))]})


def test_the_line_of_torchaos_rounded_weights_has_the_option_for_them() -> None:
    optimizer = made("AdamW8bit", "torchao.optim.adam")
    optimizer.bf16_stochastic_round = True
    with pytest.raises(UnsupportedError, match=r"Tuning\(state_dtype='8bit', bf16_stochastic_round=True\)"):
        check_optimizer(optimizer)


@pytest.mark.parametrize(
    ("name", "base", "expected"),
    [
        ("PagedAdam8bit", torch.optim.Adam, r"torch.optim.Adam\(params, lr=0.001\)"),
        ("SGD8bit", torch.optim.SGD, "torch.optim.SGD with the same settings"),
        ("Lion8bit", torch.optim.SGD, "your own optimizer, by lightning_zero.register_rule"),
        ("AdamW4bit", torch.optim.AdamW, r"torch.optim.AdamW\(params"),
    ],
)
def test_each_optimizer_gets_its_own_line(name: str, base: Any, expected: str) -> None:
    with pytest.raises(UnsupportedError, match=expected):
        check_optimizer(made(name, "bitsandbytes.optim", base))


def test_bits_may_be_an_argument_and_wide_optimizers_of_the_libraries_pass() -> None:
    base = type("Optimizer8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.optimizer"})
    optimizer = made("AdamW", "bitsandbytes.optim.adamw", base)
    optimizer.args = SimpleNamespace(optim_bits=32)
    check_optimizer(optimizer)
    optimizer.args.optim_bits = 8
    with pytest.raises(UnsupportedError, match="state_dtype='8bit'"):
        check_optimizer(optimizer)
    check_optimizer(made("_AdamW", "torchao.optim.adam"))
    check_optimizer(made("Adam8bit", "my_code"))
