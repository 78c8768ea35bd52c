"""Each model of the table makes its batch and its loss, in the tiny size."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parents[3] / "examples" / "benchmarks"
NEEDS = {"vit": "timm", "convnext": "timm", "lora": "peft"}


def read_table() -> Any:
    with patch.object(sys, "path", [str(BENCHMARKS), *sys.path]):
        import architectures

        return architectures


@pytest.mark.slow
def test_each_architecture_has_a_finite_loss_and_gradients() -> None:
    pytest.importorskip("transformers")
    table = read_table()
    wrong = {}
    for name, architecture in table.ARCHITECTURES.items():
        if name in NEEDS and find_spec(NEEDS[name]) is None:
            continue
        torch.manual_seed(1)
        made = architecture.make(architecture.tiny)
        modules = {"net": made} if isinstance(made, nn.Module) else made
        batch = architecture.inputs(architecture.tiny, torch.Generator().manual_seed(1), 0)
        loss = architecture.loss(SimpleNamespace(**modules), batch)
        loss.backward()
        parts = {type(part).__name__ for module in modules.values() for part in module.modules()}
        trained = [param for module in modules.values() for param in module.parameters() if param.requires_grad]
        if not loss.isfinite() or not any(param.grad is not None for param in trained):
            wrong[name] = f"loss {loss.item()}"
        elif missing := set(architecture.blocks) - parts:
            wrong[name] = f"no modules of {missing}"
    assert wrong == {}
