"""Sharded checkpoints are folders that all ranks write at once; any number of ranks goes on from them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from torch import nn

from tests.helpers.oracle import assert_close_relative
from tests.helpers.saved import MODULES, resume, uninterrupted_fit
from tests.helpers.trainer import RTOL, close, make_loader, make_trainer, whole_state
from tests.ranks.pool import Ranks

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
        for name in MODULES if world_size == 2 else ["Scheduled"]:
            path = str(root / f"{name}-{world_size}.ckpt")
            found[name, world_size] = path, ranks.run(world_size, _write, name, path)[0]
    return found


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.exhaustive_variants("3")
def test_training_goes_on_from_them_on_any_number_of_ranks(
    ranks: Ranks, folders: dict[tuple[str, int], tuple[str, dict]], world_size: int
) -> None:
    for name in MODULES:
        # transfers between numbers of ranks do not depend on the number of optimizers
        paths = [folders[name, writers][0] for writers in (WRITERS if name == "Scheduled" else [2])]
        wanted = ranks.run(1, uninterrupted_fit, name)[0]
        for resumed in ranks.run(world_size, resume, "eager", name, paths):
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


def test_a_plain_module_loads_them(folders: dict[tuple[str, int], tuple[str, dict]]) -> None:
    for world_size in WRITERS:
        path, state = folders["Scheduled", world_size]
        module = MODULES["Scheduled"].load_from_checkpoint(path, map_location="cpu", note="mine")
        assert module.hparams["note"] == "mine"
        assert dict(module.state_dict()).keys() == state.keys()
        for key, value in module.state_dict().items():
            assert torch.equal(value, state[key]), key


def _turned(kind: str, home: str) -> Any:
    """Other Trainers take the module over and save in the other format, to the same place."""
    results, module = [], MODULES["Scheduled"]()
    for state_dict_type in ("full", "sharded", "full"):
        if results:  # and begin it anew
            module.load_state_dict(MODULES["Scheduled"]().state_dict())
        trainer = make_trainer("eager", state_dict_type=state_dict_type)
        trainer.fit(module, make_loader("eager"))
        trainer.save_checkpoint(f"{home}/same.ckpt")
        results.append(Path(home, "same.ckpt").is_dir())
    close(module)
    return (
        results,
        sorted(path.name for path in Path(home).iterdir()),
        resume("eager", "Scheduled", [f"{home}/same.ckpt"]),
    )


def test_one_kind_takes_the_place_of_the_other(ranks: Ranks, tmp_path: Path) -> None:
    for kinds, names, _ in ranks.run(2, _turned, "eager", str(tmp_path)):
        assert kinds == [False, True, False]
        assert names == ["same.ckpt"]


class Edited(MODULES["Scheduled"]):  # type: ignore[misc]
    """Renames entries in hooks, doubles a weight, changes a number in place, and adds a parameter."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"old.{key}": value for key, value in checkpoint["state_dict"].items()}
        checkpoint["mine"] = {"tensor": torch.arange(3), "words": ["a"]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"]["tensor"].tolist() == [0, 1, 2]
        state = {key.removeprefix("old."): value for key, value in checkpoint["state_dict"].items()}
        state["net.0.weight"] = state["net.0.weight"] * 2
        state["net.0.bias"][3:] = 7.0
        self.last.weight = nn.Parameter(state["last.weight"])
        checkpoint["state_dict"] = state


def _edited(path: str) -> tuple[dict, dict]:
    module, trainer = Edited(), make_trainer("eager", state_dict_type="sharded")
    trainer.fit(module, make_loader("eager"))
    trainer.save_checkpoint(path)
    before = whole_state(module)
    close(module)
    module, trainer = Edited(), make_trainer("eager")
    trainer.validate(module, make_loader("eager"), ckpt_path=path, verbose=False)
    after = whole_state(module)
    close(module)
    return before, after


def test_hooks_edit_them(ranks: Ranks, tmp_path: Path) -> None:
    for before, after in ranks.run(2, _edited, str(tmp_path / "x.ckpt")):
        assert torch.equal(after.pop("net.0.weight"), 2 * before.pop("net.0.weight"))
        assert (after["net.0.bias"][3:] == 7).all()
        before["net.0.bias"][3:] = 7.0
        before.pop("calls"), after.pop("calls")
        assert_close_relative(after, before, 0)
