"""Resume from full files of fabric.save() in plain models, under DDP, and on other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.fabric import adamw, closing, loss_of, make_fabric, network, set_up, train, whole_state
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL, make_loader, mlp
from tests.ranks.pool import Ranks

BATCHES = 6


def write(kind: str, path: str) -> tuple[list[float], list[float], dict[str, Any]]:
    """Train, save and continue. Return the losses before and after, and the model in between."""
    fabric = make_fabric(kind)
    model, optimizer = set_up(fabric, network())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    with closing(model):
        before, _ = train(fabric, model, optimizer, BATCHES)
        schedule.step()
        content = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 3, "seen": torch.arange(5)}
        fabric.save(path, content)
        fabric.save(path + ".biases", {"model": model}, filter={"model": lambda name, value: name.endswith("bias")})
        state = whole_state(model)
        after, _ = train(fabric, model, optimizer, BATCHES, seed=1)
    torch._dynamo.reset()
    return before, after, state


def resume(kind: str, path: str, separately: bool) -> list[float]:
    """In another model, whose values the file replaces."""
    torch.manual_seed(7)
    fabric = make_fabric(kind)
    model, optimizer = set_up(fabric, mlp(), separately)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    with closing(model):
        if separately:  # something has been trained, which the file undoes
            train(fabric, model, optimizer, 4, seed=3)
        content = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
        left = fabric.load(path, content)
        assert content["step"] == 3
        assert content["model"] is model
        assert left["seen"].tolist() == list(range(5))
        losses, _ = train(fabric, model, optimizer, BATCHES, seed=1)
    torch._dynamo.reset()
    return losses


def save_and_go_on(path: str) -> dict[str, Any]:
    written = {kind: write(kind, f"{path}-{kind}") for kind in ("compiled", "ddp")}
    resumed = {
        (kind, source, separately): resume(kind, f"{path}-{source}", separately)
        for kind, source, separately in [
            ("compiled", "compiled", False),
            ("compiled", "compiled", True),
            ("ddp", "compiled", False),
            ("compiled", "ddp", False),
        ]
    }
    return {"written": written, "resumed": resumed}


def test_training_goes_on_from_a_file_under_either_strategy(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for found in ranks.run(2, save_and_go_on, str(path), deadline=120):
        for part, expected in zip(found["written"]["compiled"], found["written"]["ddp"], strict=True):
            assert_close_relative(part, expected, 2 * RTOL)
        _, after, state = found["written"]["compiled"]
        for how, losses in found["resumed"].items():
            assert_close_relative(losses, after, 5 * RTOL, what=str(how))
    file = torch.load(f"{path}-compiled")
    plain = mlp()
    plain.load_state_dict(file["model"])
    assert_close_relative(dict(plain.state_dict()), state, 0)
    optimizer = adamw(plain)
    optimizer.load_state_dict(file["optimizer"])
    assert [value["exp_avg"].shape for value in optimizer.state.values()] == [p.shape for p in plain.parameters()]
    assert (file["step"], file["seen"].tolist()) == (3, list(range(5)))
    assert sorted(torch.load(f"{path}-compiled.biases")["model"]) == [k for k in sorted(state) if k.endswith("bias")]


def load_in_other_ways(path: str) -> None:
    """Test ``load_raw`` of plain state dicts, a single file, and the calls that one rank makes alone."""
    fabric = make_fabric("eager")
    plain = network()
    if fabric.is_global_zero:
        plain_optimizer = adamw(plain)
        for batch in make_loader("ddp", 1):
            loss_of(plain, batch).backward()
        plain_optimizer.step()
        torch.save(plain.state_dict(), path + "-model")
        torch.save(plain_optimizer.state_dict(), path + "-optimizer")
    fabric.barrier()
    model, optimizer = set_up(fabric, mlp())
    with closing(model):
        fabric.load_raw(path + "-model", model)
        fabric.load_raw(path + "-optimizer", optimizer)
        expected = fabric.load(path + "-model")
        assert isinstance(expected["0.weight"], torch.Tensor)
        assert_close_relative(whole_state(model), expected, 0)
        fabric.save(path, {"optimizer": optimizer})
        written, moments = fabric.load(path)["optimizer"]["state"], torch.load(path + "-optimizer")["state"]
        assert_close_relative(written[0], moments[0], 0)
        with pytest.raises(ValueError, match=r"nothing in the state that AdamW is to load.*fabric\.load"):
            optimizer.load_state_dict({})
        with pytest.raises(KeyError, match="'more' that does not exist"):
            fabric.load(path, {"optimizer": optimizer, "more": 1})
        with pytest.raises(FileNotFoundError):
            fabric.load(path + "-gone", {"model": model})
        with pytest.raises(RuntimeError, match="size mismatch for 0.weight"):
            model.load_state_dict({**expected, "0.weight": torch.zeros(2, 2)})
        lonely = nn.Linear(2, 2)
        fabric.save(path + "-lonely", {"model": lonely, "optimizer": torch.optim.SGD(lonely.parameters(), lr=1.0)})
        assert fabric.load(path + "-lonely")["model"]["weight"].tolist() == lonely.weight.tolist() or fabric.global_rank


def test_files_of_plain_torch_are_read(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, load_in_other_ways, str(tmp_path / "file"))
