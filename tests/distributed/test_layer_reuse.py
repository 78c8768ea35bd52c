"""Trainings whose equal layers are traced once, and as often as there are layers, to the last bit, with the same plan."""

from contextlib import nullcontext
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_zero.compile.capture.discovery import reuse_layer_traces
from tests.helpers.checkpointed import Blocks
from tests.helpers.models import Batch, Case, Deep, build
from tests.helpers.oracle import Reference
from tests.helpers.sharded import engine_for, sgd, train_sharded
from tests.ranks.pool import Ranks
from tests.unit.compile.dynamo_layer_reuse.layers import counted


class ManyBlocks(Blocks):
    dropout = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(type(self.blocks[0])(24, self.dropout) for _ in range(3))


class WithOneApart(Deep):
    """The fourth layer adds another value to its sum than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].register_forward_hook(lambda module, args, result: result * 1.5)


class Adapted(Deep):
    """PEFT's adapters over frozen layers, and a reference forward without them in each step."""

    def __init__(self) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        super().__init__()
        lora = LoraConfig(r=4, target_modules=r"layers\..*\.(gate|up|down)", init_lora_weights=False, lora_dropout=0.25)
        inject_adapter_in_model(lora, self)

    def loss(self, batch: Batch, call: Any = None) -> Tensor:
        x, target = batch
        layers: Any = [part for part in self.modules() if hasattr(part, "enable_adapters")]
        for layer in layers:
            layer.enable_adapters(False)
        with torch.no_grad():
            reference = (call or self)(x)
        for layer in layers:
            layer.enable_adapters(True)
        output = (call or self)(x)
        return self.criterion(output, target) + self.criterion(output, reference)


def train(case: type[Case], kind: str, once: bool, **options: Any) -> tuple[Reference, list[Any], int]:
    """The record, the plans, and how many layers Dynamo has followed."""
    model = build(case)
    torch.compiler.reset()
    torch.manual_seed(7)
    instead = patch("lightning_zero.compile.capture.discovery.reuse_layer_traces", nullcontext)
    with (
        nullcontext() if once else instead,
        counted() as followed,
        engine_for(model, "aot_eager", compile_dynamic=False, **options) as engine,
    ):
        batches = [case.make_batch(step, 12) for step in range(3)]
        record = train_sharded(engine, model, batches, sgd(model))
        plans = [asdict(graph) for graph in engine.session.plans.plan.graphs]
    return record, plans, followed[kind]


def both(case: type[Case], kind: str, layers: int, kinds: int, options: dict[str, Any]) -> None:
    assert reuse_layer_traces is not nullcontext
    (once, plans, few), (each, expected, all_of_them) = (train(case, kind, it, **options) for it in (True, False))
    assert (few, all_of_them) == (kinds, layers)
    assert once.losses == each.losses
    for grads, wanted in zip(once.grads, each.grads, strict=True):
        assert {name for name, grad in grads.items() if grad is None or not torch.equal(grad, wanted[name])} == set()
    assert plans == expected


@pytest.mark.parametrize(
    ("world", "case", "kind", "layers", "kinds", "options"),
    [
        (1, ManyBlocks, "_Block", 5, 1, {}),
        (2, Deep, "_Gated", 6, 2, {}),
        (3, WithOneApart, "_Gated", 6, 3, {}),
        (2, Deep, "_Gated", 6, 2, {"unsharded_cache_mb": 0.02}),
        (2, Adapted, "_Gated", 12, 4, {"frozen_dtype": "nf4"}),
    ],
    ids=["dropout", "two ranks", "three ranks, one apart", "weights that stay", "adapters over NF4"],
)
@pytest.mark.exhaustive_variants("two ranks", "three ranks, one apart")
def test_reuse_trains_bit_for_bit(
    ranks: Ranks, world: int, case: type[Case], kind: str, layers: int, kinds: int, options: dict[str, Any]
) -> None:
    if case is Adapted:
        pytest.importorskip("peft")
    ranks.run(world, both, case, kind, layers, kinds, options, deadline=240)
