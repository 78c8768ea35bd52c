"""Checkpoints in ``samples/`` were written by an earlier version, before any release, and load."""

from pathlib import Path

import torch

from lightning_zero.integrations.checkpoint_files import FileIO, load_file, read_folder, read_on_all_ranks
from lightning_zero.sharding.layout import ShardLayout
from tests.helpers.threaded import checkpoints_of, on_ranks, values_of

SAMPLES = Path(__file__).parent / "samples"


def test_a_sharded_one_of_two_ranks() -> None:
    found = read_folder(SAMPLES / "sharded", None)
    assert (found["seed"], found["nested"]) == (1.0, {"a": [1, (2, "x")]})
    moments = found["optimizer_0"]["state"]
    for key, value in values_of(1.0).items():
        assert torch.equal(found["state_dict"][key].full_tensor(), value)
        assert torch.equal(moments[key]["exp_avg"].full_tensor(), value)
        assert moments[key]["step"] == 4.0


def test_a_sharded_one_at_another_world_size() -> None:
    def attempt(ranks: object) -> dict[str, torch.Tensor]:
        return read_on_all_ranks(checkpoints_of(ranks), SAMPLES / "sharded", None)["state_dict"]  # type: ignore[arg-type]

    for rank, found in enumerate(on_ranks(3, attempt)):
        for key, value in values_of(1.0).items():
            layout = ShardLayout.of(value.shape, value.dtype, 3)
            assert torch.equal(layout.part(found[key], rank), layout.part(value, rank))


def test_a_full_one() -> None:
    found = load_file(FileIO(), SAMPLES / "full", None)
    assert found["seed"] == 1.0
    for key, value in values_of(1.0).items():
        assert torch.equal(found["state_dict"][key], value)
