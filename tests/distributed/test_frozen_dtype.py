"""`frozen_dtype` in an engine: the training of a plain module whose frozen weights are the dequantized ones."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero.engine import Engine
from lightning_zero.errors import UnsupportedError
from lightning_zero.sharding.weight_format import WeightFormat, packed_words
from tests.helpers.models import Batch, Case, build, make_batches
from tests.helpers.oracle import Reference, assert_close_relative, train_reference
from tests.helpers.sharded import EAGER, adamw, engine_for, train_sharded
from tests.ranks.pool import Ranks

STEPS, SAMPLES = 4, 12
FROZEN = ("first.base.weight", "second.base.weight")


class Adapted(nn.Module):
    """Two layers with adapters around a norm; recomputed in backward if `checkpoints` is set."""

    checkpoints = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(23)
        self.rise, self.fall = (nn.Linear(a, b, bias=False) for a, b in ((23, 67), (67, 23)))
        self.rise_adapter, self.fall_adapter = (
            nn.Sequential(nn.Linear(a, 16, bias=False), nn.Linear(16, b, bias=False)) for a, b in ((23, 67), (67, 23))
        )
        self.rise.requires_grad_(False)
        self.fall.requires_grad_(False)

    def change(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = torch.relu(self.rise(x) + self.rise_adapter(x))
        return self.fall(x) + self.fall_adapter(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.change, x, use_reentrant=False) if self.checkpoints else self.change(x))


class Deep(Case):
    """Every one of four ranks holds a good part of each matrix; equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Adapted() for _ in range(3)))
        self.head = nn.Linear(23, 41)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 23, generator=rng), 3 * torch.randn(n, 41, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def frozen_names(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if not param.requires_grad and param.dim() == 2]


def dequantized(kind: Any, case: Any = "LoRA") -> nn.Module:
    """The oracle's module."""
    model = build(case)
    for name in frozen_names(model):
        weight = model.get_parameter(name)
        packing = WeightFormat(kind, weight.shape, weight.dtype)
        weight.data = packing.decode(packing.encode(weight))
    return model


def train_deep(kind: str, backend: str, checkpoints: bool, **options: Any) -> tuple[Reference, dict[str, Any]]:
    """Return the training, and what was planned and counted."""
    model = build(Deep)
    for block in model.blocks:
        block.checkpoints = checkpoints
    with engine_for(model, backend, frozen_dtype=kind, **options) as engine:
        optimizer = trained_adamw(model)
        engine.optimizers.check(optimizer)
        engine.optimizers.arrange([optimizer])
        out = train_sharded(engine, model, make_batches(Deep, DEEP_STEPS, SAMPLES), optimizer)
        engine.eval_step()
        with torch.no_grad():
            evaluated = model(make_batches(Deep, 1, SAMPLES)[0][0])
        engine.unshard()
        again = train_reference(model, make_batches(Deep, 2, SAMPLES), trained_adamw)  # as a plain module
        weights = dict(model.named_parameters())
        plan = None if engine.memory.plan is None else engine.memory.plan.as_dict()
        return out, {
            "evaluated": evaluated,
            "weights": {name: weights[name].detach() for name in frozen_names(model)},
            "classes": {type(module).__name__ for module in model.modules()},
            "again": again.losses,
            "counters": engine.executor.counters(),
            "plan": plan,
        }


def trained_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model)  # of all parameters: frozen ones are left alone


def bytes_of(kind: str, rows: int = 25, columns: int = 19) -> int:
    return packed_words(rows, columns, kind) * 4


def train(kind: str, backend: str, **options: Any) -> dict[str, Any]:
    model = build("LoRA")
    with engine_for(model, backend, frozen_dtype=kind, **options) as engine:
        out = train_sharded(engine, model, make_batches("LoRA", STEPS, SAMPLES), trained_adamw(model))
        before = engine.executor.counters()["gather_bytes"]
        engine.eval_step()
        with torch.no_grad():
            evaluated = model(make_batches("LoRA", 1, SAMPLES)[0][0])
        moved = engine.executor.counters()["gather_bytes"] - before
        reads = {name: model.get_submodule(name.removesuffix(".weight")).weight.clone() for name in FROZEN}
        with engine.full_parameters(writeback=False):
            whole = {name: param.detach().clone() for name, param in model.named_parameters()}
        before_load = [record.shard.clone() for record in engine.sharder.live]
        model.load_state_dict(
            {key: value.bfloat16() if key in FROZEN else value for key, value in model.state_dict().items()}
        )
        kept = all(torch.equal(r.shard, own) for r, own in zip(engine.sharder.live, before_load, strict=True))
        parts = {name: engine.checkpoints.model_state(sharded=True)[name].shard for name in FROZEN}
        masters = sum(r.shard.nbytes for r in engine.sharder.live)
        return {
            "out": out,
            "evaluated": evaluated,
            "reads": reads,
            "whole": whole,
            "state": engine.model_state(),
            "moved": moved,
            "kept": kept,
            "parts": parts,
            "masters": masters,
            "numel": sum(param.numel() for param in model.parameters()),
            "errors": errors(engine, model),
        }


def errors(engine: Engine, model: Any) -> list[str]:
    found = []
    layer = model.first.base
    for act in (
        lambda: layer.weight.mul_(2),
        lambda: layer.weight.data.copy_(torch.zeros(25, 19)),
        lambda: model.requires_grad_(True),
        lambda: layer._parameters["weight"].norm(),
        lambda: layer._parameters["weight"].data.zero_(),
    ):
        try:
            act()
        except UnsupportedError as error:
            found.append(str(error))
    return found


def compare(found: dict[str, Any], expected: Reference) -> None:
    __tracebackhide__ = True
    out = found["out"]
    trained = [name for name in expected.params[0] if name not in FROZEN]
    assert_close_relative(out.losses, expected.losses, 1e-6, what="losses")
    assert_close_relative(out.grads, expected.grads, 3e-6, what="grads")
    for mine, theirs in zip(out.params, expected.params, strict=True):
        assert_close_relative([mine[n] for n in trained], [theirs[n] for n in trained], 1e-6, atol=2e-8, what="params")


@pytest.mark.parametrize(
    ("world_size", "backend", "kind", "options"),
    [
        (1, EAGER, "nf4", {}),
        (2, "aot_eager", "nf4", {}),
        (3, "aot_eager", "nf4", {"prefetch": False}),
        (3, EAGER, "int8", {}),
        (2, "aot_eager", "int8", {"stage": 2}),
    ],
)
def test_training_equals_that_of_dequantized_weights(
    ranks: Ranks, world_size: int, backend: str, kind: str, options: dict[str, Any]
) -> None:
    results = ranks.run(world_size, train, kind, backend, **options)
    found, plain = results[0], dequantized(kind)
    expected = train_reference(plain, make_batches("LoRA", STEPS, SAMPLES), trained_adamw, world=world_size)
    compare(found, expected)
    values = dict(plain.named_parameters())
    for name in FROZEN:
        for where in ("reads", "whole", "state"):
            assert torch.equal(found[where][name], values[name]), f"{name} in {where}"
        together = torch.cat([each["parts"][name] for each in results])
        assert torch.equal(together[: values[name].numel()], values[name].reshape(-1)), name
    assert_close_relative(found["evaluated"], expected.model(make_batches("LoRA", 1, SAMPLES)[0][0]), 1e-5)
    assert all(each["kept"] for each in results), "loading values that were rounded to bfloat16 changed the codes"
    assert found["numel"] == sum(param.numel() for param in plain.parameters())
    assert [("codes" in error) for error in found["errors"]] == [True] * 5, found["errors"]
    # Evaluation gathers each weight once; shards are padded to 128 bytes. One rank reads codes in place.
    codes = 2 * bytes_of(kind) if world_size > 1 else 0
    rest = sum(p.numel() * 4 for name, p in values.items() if name not in FROZEN)
    padding = len(values) * 128 * world_size
    if options.get("stage") != 2:
        assert codes + rest <= found["moved"] <= codes + rest + padding
    assert sum(each["masters"] for each in results) <= 2 * bytes_of(kind) + rest + padding


DEEP_STEPS = 5
WAYS: dict[str, tuple[int, str, str, bool, dict[str, Any]]] = {
    "stage 1": (2, "aot_eager", "nf4", False, {"stage": 1}),
    "stage 2, eager": (2, EAGER, "nf4", False, {"stage": 2}),
    "checkpoints": (2, "aot_eager", "nf4", True, {}),
    "checkpoints, eager": (3, EAGER, "int8", True, {}),
    "recomputation": (2, "aot_eager", "nf4", False, {"activation_memory_budget": 0.3}),
    "kept weights": (2, "aot_eager", "nf4", False, {"unsharded_cache_mb": 10.0, "unsharded_cache_until": "step"}),
    "hosts": (4, "aot_eager", "nf4", False, {"ranks_per_host": 2}),
    "hosts, eager": (4, EAGER, "nf4", False, {"ranks_per_host": 2}),
    "replicas": (4, "aot_eager", "int8", False, {"ranks_per_host": 2, "replicate_over": "hosts"}),
    "hosts of one rank": (2, "aot_eager", "nf4", False, {"ranks_per_host": 1}),
    "gathers between hosts": (4, "aot_eager", "nf4", False, {"ranks_per_host": 2, "compute_shard_group": "all"}),
    "offload": (2, "aot_eager", "nf4", False, {"offload": ("optimizer", "activations")}),
    "replays": (2, "aot_eager", "nf4", False, {"emulate_cuda_graph_model": True, "emulate_cuda_graph_step": True}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.exhaustive_variants(
    "hosts, eager", "gathers between hosts", "hosts of one rank", "kept weights", "offload", "stage 2, eager"
)
def test_each_way_of_training_equals_that_of_dequantized_weights(ranks: Ranks, way: str) -> None:
    world_size, backend, kind, checkpoints, options = WAYS[way]
    found = ranks.run(world_size, train_deep, kind, backend, checkpoints, **options)
    plain = dequantized(kind, Deep)
    frozen = {name: plain.get_parameter(name).clone() for name in frozen_names(plain)}
    expected = train_reference(plain, make_batches(Deep, DEEP_STEPS, SAMPLES), trained_adamw, world=world_size)
    evaluated = expected.model(make_batches(Deep, 1, SAMPLES)[0][0])
    again = train_reference(expected.model, make_batches(Deep, 2, SAMPLES), trained_adamw)
    for out, rest in found:
        assert_close_relative(out.losses, expected.losses, 1e-6, what="losses")
        assert_close_relative(out.grads, expected.grads, 3e-6, atol=1e-7, what="grads")
        assert_close_relative(rest["evaluated"], evaluated, 1e-5)
        assert_close_relative(rest["again"], again.losses, 1e-5)
        assert all(torch.equal(rest["weights"][name], value) for name, value in frozen.items())
        assert rest["classes"] == {type(module).__name__ for module in plain.modules()}
        assert ("replayed_graphs" in rest["counters"]) == (way == "replays")


def load_and_export(folder: str) -> list[dict[str, Tensor]]:
    """Load bfloat16 files while the model is built and after it was sharded, and return the exported weights."""
    found = []
    for inside in (True, False):
        with engine_for(None, EAGER, frozen_dtype="nf4") as engine:
            with engine.construction():
                model = build(Deep, seed=5)
                if inside:
                    lightning_zero.load_safetensors(model, f"{folder}/base.safetensors", strict=False)
            engine.shard(model)
            if not inside:
                missing, unexpected = lightning_zero.load_safetensors(model, f"{folder}/base.safetensors", strict=False)
                assert not unexpected
                assert missing
                assert all("adapter" in name for name in missing)
            lightning_zero.export_safetensors(model, f"{folder}/{inside}")
            torch.distributed.barrier()
            found.append(load_file(f"{folder}/{inside}/model.safetensors"))
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_bfloat16_files_are_quantized_while_they_are_loaded(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    base = {name: value for name, value in build(Deep).state_dict().items() if "adapter" not in name}
    save_file({name: value.bfloat16() for name, value in base.items()}, tmp_path / "base.safetensors")
    plain = build(Deep, seed=5)
    plain.load_state_dict({name: value.bfloat16() for name, value in base.items()}, strict=False)
    for name in frozen_names(plain):
        weight = plain.get_parameter(name)
        packing = WeightFormat("nf4", weight.shape, weight.dtype)
        weight.data = packing.decode(packing.encode(weight))
    for exported in ranks.run(world_size, load_and_export, str(tmp_path))[0]:
        assert exported.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            assert torch.equal(exported[name], value), name


class Params4bit(nn.Parameter):
    """Stands for that of bitsandbytes."""


Params4bit.__module__ = "bitsandbytes.nn.modules"


class StackedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.zeros(9, 8, 8))


def refuse_and_pack_what_was_built_sharded() -> list[str]:
    found = []
    told: list[str] = []
    with patch("lightning_zero.sharding.frozen_weights.log.warning", lambda text, *args: told.append(text % args)):
        for model in (StackedExperts(), build("LoRA")):
            if isinstance(model, StackedExperts):
                model.requires_grad_(False)
            with engine_for(model, EAGER, frozen_dtype="nf4"):
                pass
    if torch.distributed.get_rank() == 0:
        assert len(told) == 1
        assert "packs 256 bytes of frozen weights, and 2.3 KiB stay as they are, such as 'experts'" in told[0]
    quantized = nn.Sequential(nn.Linear(8, 8))
    quantized[0]._parameters["weight"] = Params4bit(torch.zeros(8, 8), requires_grad=False)
    empty = nn.Sequential(nn.Linear(0, 8, bias=False).requires_grad_(False), nn.Linear(8, 8))
    for model in (quantized, nn.Sequential(nn.Linear(8, 8)), empty):
        with engine_for(backend=EAGER, frozen_dtype="nf4") as engine, pytest.raises(UnsupportedError) as caught:
            engine.shard(model)
        found.append(str(caught.value))
    expected = dequantized("nf4")
    with engine_for(backend=EAGER, frozen_dtype="nf4", frozen_exclude=("second.*",)) as engine:
        with engine.construction():
            model = build("LoRA")
        engine.shard(model)
        assert torch.equal(model.first.base.weight, expected.first.base.weight)
        assert torch.equal(model.second.base.weight, build("LoRA").second.base.weight)
        engine.unshard()
    assert torch.equal(model.first.base.weight, expected.first.base.weight)
    return found


def test_other_quantizers_are_refused_and_sharded_construction_packs_later(ranks: Ranks) -> None:
    other, nothing, empty = ranks.run(2, refuse_and_pack_what_was_built_sharded)[0]
    assert "bitsandbytes" in other
    assert "frozen_dtype='nf4'" in other
    assert "no frozen weight" in nothing
    assert "no frozen weight" in empty
