"""Compare trainings on several emulated hosts with DDP, and resume from each other's checkpoints."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_zero.cli.models import Block, Decoder, Tokens
from lightning_zero.engine import engine_of
from tests.helpers.looks import counted, look, seen
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import INPUTS, RTOL, Regression, close, global_losses, make_trainer, seeded, whole_state
from tests.ranks.pool import Ranks

BATCH, STEPS = 12, 4  # samples of all ranks; batches of an epoch
WIDTH, OUTPUTS = 32, 40  # each of four ranks holds a good part of each matrix
HOSTS: dict[str, Any] = {"ranks_per_host": 2}
REPLICAS = HOSTS | {"replicate_over": "hosts"}


class Wide(Regression):
    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.net = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))


def loader() -> DataLoader:
    rng = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(STEPS * BATCH, INPUTS, generator=rng), torch.randn(STEPS * BATCH, OUTPUTS, generator=rng)
    )
    sampler: DistributedSampler = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=sampler)


def fit(kind: str, home: str = "", path: str | None = None, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of two epochs from ``path`` on, and the values after them;

    save after each epoch with ``home``.
    """
    module = Wide()
    saves = [ModelCheckpoint(home, "{epoch}", every_n_epochs=1, save_top_k=-1)] if home else []
    trainer = make_trainer(kind, max_epochs=2, callbacks=saves, enable_checkpointing=bool(home), **options)
    trainer.fit(module, loader(), loader(), ckpt_path=path)
    found = global_losses(kind, module), whole_state(module)
    engine = engine_of(module)
    if options.get("ranks_per_host") == 2:
        assert engine is not None
        assert engine.mesh.inter_host is not None
        counters = engine.executor.counters()
        assert counters["reduce_bytes_across"] > 0
        copied = kind == "compiled" and not {"compute_shard_group", "replicate_over"} & options.keys()
        assert ("host_shard_refreshes" in counters) == copied
    close(module)
    return found


def both(kind: str, trainer: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    return fit(kind, **trainer, **options), fit("ddp", **trainer)


@pytest.mark.parametrize(
    ("kind", "trainer", "options"),
    [
        ("eager", {"gradient_clip_val": 0.1}, HOSTS),
        ("compiled", {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, HOSTS | {"cross_host_reduce": "step"}),
        ("eager", {"accumulate_grad_batches": 3}, HOSTS | {"cross_host_reduce": "step"}),
        (
            "eager",
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
            REPLICAS | {"cross_host_reduce": "step"},
        ),
        pytest.param("compiled", {"gradient_clip_val": 0.1}, REPLICAS, marks=pytest.mark.exhaustive),
        pytest.param(
            "compiled",
            {"accumulate_grad_batches": 2},
            HOSTS | {"compute_shard_group": "all"},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=[
        "eager, clipped",
        "accumulated, reduced once",
        "eager, reduced once",
        "replicas",
        "compiled replicas",
        "no copy per host",
    ],
)
@pytest.mark.exhaustive_variants("eager, reduced once", "accumulated, reduced once")
def test_training_on_hosts_equals_ddps(
    ranks: Ranks, kind: str, trainer: dict[str, Any], options: dict[str, Any]
) -> None:
    for (losses, state), (expected, values) in ranks.run(4, both, kind, trainer, options):
        assert_close_relative(losses, expected, RTOL, what="loss")
        assert_close_relative(state, values, RTOL)


def written(kind: str, home: str, saved: str, options: dict[str, Any]) -> list[float]:
    with patch("lightning_zero.checkpoint.sharded.checkpoint_tensors.MIN_SHARED_BYTES", 0):  # as if there were more
        return fit(kind, home, state_dict_type=saved, **options)[0]


def resumed(path: str, ways: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, list[float]]:
    return {name: fit(kind, path=path, **options)[0] for name, (kind, options) in ways.items()}


@pytest.mark.parametrize(("saved", "kind"), [("full", "eager"), ("sharded", "compiled")], ids=["full", "sharded"])
@pytest.mark.exhaustive_variants("sharded")
def test_checkpoints_of_hosts_go_on_elsewhere_and_the_other_way_round(
    ranks: Ranks, tmp_path: Path, saved: str, kind: str
) -> None:
    """Compiled code only where hosts hold copies of their own for it."""
    on_hosts = str(tmp_path / "hosts")
    losses = ranks.run(4, written, kind, on_hosts, saved, HOSTS)[0]
    path = f"{on_hosts}/epoch=0.ckpt"
    ways: dict[str, Any] = {"one host": ("eager", {}), "hosts of one": ("eager", {"ranks_per_host": 1})}
    if saved == "full":
        ways["DDP"] = ("ddp", {})
    for world_size in (2, 3):
        for name, found in ranks.run(world_size, resumed, path, ways)[0].items():
            assert_close_relative(found, losses[STEPS:], 5 * RTOL, what=f"{name}, {world_size} ranks: ")
    flat = str(tmp_path / "flat")
    losses = ranks.run(2, written, "eager", flat, saved, {})[0]
    on_hosts_again = {"hosts": (kind, HOSTS), "replicas": ("eager", REPLICAS)}
    for name, found in ranks.run(4, resumed, f"{flat}/epoch=0.ckpt", on_hosts_again)[0].items():
        assert_close_relative(found, losses[STEPS:], 5 * RTOL, what=f"on {name}: ")


def chunks(path: str) -> dict[str, tuple[int, int]]:
    """Return the number of elements of each tensor of a sharded checkpoint, and the sum over its chunks."""
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {key: value for key, value in saved.items() if isinstance(value, TensorStorageMetadata)}
    return {
        key: (value.size.numel(), sum(chunk.sizes.numel() for chunk in value.chunks)) for key, value in tensors.items()
    }


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.exhaustive), "sharded"])
def test_replicas_write_each_value_once_and_others_go_on_from_there(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    losses = ranks.run(4, written, "eager", str(tmp_path), kind, REPLICAS)[0]
    path = f"{tmp_path}/epoch=0.ckpt"
    if kind == "sharded":
        found = chunks(path)
        assert len(found) > 8
        assert all(whole == pieces for whole, pieces in found.values()), found
        sizes = [sum(file.stat().st_size for file in Path(path).glob(f"__{rank}_*")) for rank in range(4)]
        assert min(sizes[2] / sizes[0], sizes[3] / sizes[1]) > 0.5, f"replicas are to share the work: {sizes}"
    elsewhere = {"one host": ("eager", {})}
    on_hosts = {"replicas": ("compiled" if kind == "sharded" else "eager", REPLICAS), "hosts": ("eager", HOSTS)}
    for world_size, ways in ((3, elsewhere), (4, on_hosts)):
        for name, resumed_losses in ranks.run(world_size, resumed, path, ways)[0].items():
            assert_close_relative(resumed_losses, losses[STEPS:], 5 * RTOL, what=f"{name}, {world_size} ranks: ")


def saved_both_ways(home: str, options: dict[str, Any]) -> None:
    for kind in ("full", "sharded"):
        module, average = Wide(), EMAWeightAveraging(decay=0.6)
        trainer = make_trainer("eager", callbacks=[average], state_dict_type=kind, **options)
        trainer.fit(module, loader())
        trainer.save_checkpoint(f"{home}/{kind}")
        close(module)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [pytest.param(HOSTS, marks=pytest.mark.exhaustive), REPLICAS], ids=["together", "replicas"]
)
def test_sharded_averages_are_those_of_a_full_checkpoint(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    """Shards are numbered otherwise than ranks."""
    ranks.run(4, saved_both_ways, str(tmp_path), options)
    dcp_to_torch_save(tmp_path / "sharded", tmp_path / "joined")
    joined, full = (torch.load(tmp_path / name, weights_only=False) for name in ("joined", "full"))
    for part in ("state_dict", "current_model_state"):
        assert joined[part].keys() == full[part].keys()
        for name, value in full[part].items():
            assert torch.equal(joined[part][name], value), f"{part}[{name!r}]"


DEPTH = 4


class Watched(Block):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().forward(look(x, self.number), cos, sin)


class Language(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = Decoder(64, DEPTH, 2, 96)
        for number, block in enumerate(self.net.blocks):
            block.__class__, block.number = Watched, number

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        engine = engine_of(self)
        assert engine is not None
        counted[:] = [engine.executor]
        engine.executor.reset_counters()
        return self.net(batch[:, :-1], batch[:, 1:])


def awaited_layer_by_layer() -> list[int]:
    module = Language()
    seen.clear()
    options = {"ranks_per_host": 1, "gather_group_mb": 0.02}
    trainer = make_trainer("compiled", max_steps=STEPS, precision="bf16-mixed", **options)
    trainer.fit(module, DataLoader(Tokens(16), 2))
    counted.clear()
    close(module)
    return seen[-1]


@pytest.mark.exhaustive  # see distributed/test_exchange.py
def test_hosts_exchange_weights_in_the_order_in_which_compiled_code_reads_them(ranks: Ranks) -> None:
    """Test the order of the exchange.

    Eager code reads most weights in its backward only, the last layer's first. In that order the first layer would
    wait for everything.
    """
    for awaited in ranks.run(2, awaited_layer_by_layer, deadline=150):
        assert len(awaited) == DEPTH
        assert awaited == sorted(awaited)
        assert awaited[1] <= awaited[-1] / 2, awaited  # after the first layer
