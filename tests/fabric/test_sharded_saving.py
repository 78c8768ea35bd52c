"""Resume from folders of ``fabric.save()`` with ``state_dict_type="sharded"`` on any number of ranks."""

from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint

from tests.helpers.fabric import closing, make_fabric, network, set_up, train, whole_state
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL, mlp
from tests.helpers.writers import forked_writers
from tests.ranks.pool import Ranks

BATCHES = 4


@forked_writers()
def _write(path: str, background: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    fabric = make_fabric("eager", state_dict_type="sharded", async_save=background)
    model, optimizer = set_up(fabric, network())
    with closing(model):
        train(fabric, model, optimizer, BATCHES)
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3, "seen": torch.arange(5)})
        state = whole_state(model)
        after, _ = train(fabric, model, optimizer, BATCHES, seed=1)
        fabric.save(path + ".biases", {"model": model}, filter={"model": lambda name, value: name.endswith("bias")})
    return after, state


def _resume(path: str) -> list[float]:
    torch.manual_seed(7)
    fabric = make_fabric("eager")
    model, optimizer = set_up(fabric, mlp())
    with closing(model):
        content = {"model": model, "optimizer": optimizer, "step": 0}
        left = fabric.load(path, content)
        assert content["step"] == 3
        assert left["seen"].tolist() == list(range(5))
        losses, _ = train(fabric, model, optimizer, BATCHES, seed=1)
        assert sorted(fabric.load(path + ".biases")["model"]) == ["0.bias", "2.bias", "4.bias"]
    return losses


@pytest.mark.parametrize(
    "background", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["at once", "beside training"]
)
def test_loops_go_on_from_folders(ranks: Ranks, tmp_path: Path, background: bool) -> None:
    path = str(tmp_path / "x")
    after, state = ranks.run(2, _write, path, background)[0]
    whole = _load_distributed_checkpoint(Path(path))
    assert {key: value.shape for key, value in whole["model"].items()} == {k: v.shape for k, v in state.items()}
    assert_close_relative(whole["model"], state, 0)
    for world_size in (1, 2, 3):
        for losses in ranks.run(world_size, _resume, path):
            assert_close_relative(losses, after, 5 * RTOL, what=f"{world_size} ranks")
