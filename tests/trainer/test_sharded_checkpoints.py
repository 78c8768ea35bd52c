"""Sharded checkpoints are folders that all ranks write at once; any number of ranks goes on from them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL, close, make_loader, make_trainer, whole_state
from tests.ranks.pool import Ranks
from tests.trainer.test_full_checkpoints import MODULES, _resume, _uninterrupted

WRITERS = [1, 2, 3]


def _write(name: str, path: str) -> dict[str, Any]:
    module, trainer = MODULES[name](note="written"), make_trainer("eager", state_dict_type="sharded")
    trainer.fit(module, make_loader("eager"))
    trainer.save_checkpoint(path)
    state = whole_state(module)
    close(module)
    return state


@pytest.fixture(scope="module")
def folders(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[str, dict]]:
    root = tmp_path_factory.mktemp("sharded")
    found = {}
    for world_size in WRITERS:
        for name in MODULES:
            path = str(root / f"{name}-{world_size}.ckpt")
            found[name, world_size] = path, ranks.run(world_size, _write, name, path)[0]
    return found


@pytest.mark.parametrize("world_size", WRITERS)
def test_training_goes_on_from_them_on_any_number_of_ranks(
    ranks: Ranks, folders: dict[tuple[str, int], tuple[str, dict]], world_size: int
) -> None:
    for name in MODULES:
        paths = [folders[name, writers][0] for writers in WRITERS]
        wanted = ranks.run(1, _uninterrupted, name)[0]
        for resumed in ranks.run(world_size, _resume, "eager", name, paths):
            for path, (losses, state) in resumed.items():
                assert_close_relative(losses, wanted[0], 5 * RTOL, what=path)
                assert_close_relative(state, wanted[1], 5 * RTOL, what=path)


@pytest.mark.parametrize("world_size", WRITERS)
def test_lightnings_tool_makes_one_file_of_them(
    folders: dict[tuple[str, int], tuple[str, dict]], world_size: int
) -> None:
    path, state = folders["Scheduled", world_size]
    whole = _load_distributed_checkpoint(Path(path))
    assert whole["epoch"] == 1
    assert whole["hyper_parameters"]["note"] == "written"
    assert list(whole["state_dict"]) == list(state)
    for key, value in state.items():
        assert torch.equal(whole["state_dict"][key], value), key
    moments = whole["optimizer_0"]["state"]["net.0.weight"]
    assert moments["exp_avg"].shape == state["net.0.weight"].shape
    assert moments["step"] == 4
