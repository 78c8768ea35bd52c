"""Convert DeepSpeed's checkpoints: compare values, name damages, and resume on other numbers of ranks."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.checkpoint.sharded.reader import open_checkpoint
from lightning_zero.errors import CheckpointError
from tests.helpers import deepspeed
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL, Regression, close, global_losses, make_loader, make_trainer
from tests.ranks.pool import Ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "convert_deepspeed_checkpoint.py"
spec = importlib.util.spec_from_file_location("convert_deepspeed_checkpoint", SCRIPT)
assert spec is not None
assert spec.loader is not None
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
ConversionError = script.ConversionError

STEPS, WRITERS, STAGES = 4, 3, (2, 3)


class Decayed(Regression):
    """Biases are not."""

    def configure_optimizers(self) -> Any:
        matrices = [param for param in self.parameters() if param.ndim > 1]
        others = [param for param in self.parameters() if param.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _fit(epochs: int, path: str | None = None, save: str | None = None) -> list[float]:
    module, trainer = Decayed(), make_trainer("eager", max_epochs=epochs)
    if path is not None:
        with torch.no_grad():
            for param in module.parameters():
                param.add_(1.0)  # the checkpoint has other values
    trainer.fit(module, make_loader("eager", STEPS), ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    losses = global_losses("eager", module)
    close(module)
    return losses


def _as_deepspeed_saves(full: Path, folder: Path, stage: int) -> None:
    found = torch.load(full, weights_only=True)
    weights, [optimizer] = found.pop("state_dict"), found.pop("optimizer_states")
    names = [name for name, value in weights.items() if value.ndim > 1]
    names += [name for name, value in weights.items() if value.ndim <= 1]  # as the optimizer numbers them
    groups = [
        group | {"params": {names[number]: weights[names[number]] for number in group["params"]}}
        for group in optimizer["param_groups"]
    ]
    moments = {names[number]: entries for number, entries in optimizer["state"].items()}
    deepspeed.write(folder, stage, WRITERS, groups, moments, {}, found)


def _go_on(home: str) -> tuple[list[float], list[list[float]]]:
    full, folders = Path(home) / "full.ckpt", [Path(home) / f"stage-{stage}.ckpt" for stage in STAGES]
    _fit(1, save=str(full))
    converted = [folder.with_suffix(".full.ckpt") for folder in folders]
    if dist.get_rank() == 0:
        for stage, folder, new in zip(STAGES, folders, converted, strict=True):
            _as_deepspeed_saves(full, folder, stage)
            script.convert(folder, new)
    dist.barrier()
    found = [_fit(2, path=str(path)) for path in converted]
    with pytest.raises(CheckpointError, match="convert_deepspeed_checkpoint.py"):
        _fit(2, path=str(folders[0]))
    return _fit(2), found


def test_training_resumes_from_what_was_converted(ranks: Ranks, tmp_path: Path) -> None:
    for wanted, found in ranks.run(2, _go_on, str(tmp_path)):
        for stage, losses in zip(STAGES, found, strict=True):
            assert_close_relative(losses, wanted[STEPS:], 5 * RTOL, what=f"stage {stage}: ")


def test_the_command_prints_the_new_file_or_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "x", 3, 2)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path / "x"), str(tmp_path / "full.ckpt")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out.strip() == str(tmp_path / "full.ckpt")
    with pytest.raises(SystemExit) as ended:  # Python prints a text to stderr, and returns 1
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == f"{tmp_path / 'full.ckpt'} exists. Give the new file another name."


def _converted(folder: Path) -> dict[str, Any]:
    new = folder / "full.ckpt"
    script.convert(folder, new)
    found: dict[str, Any] = torch.load(new, weights_only=True)
    new.unlink()
    return found


CLIENT = {"pytorch-lightning_version": "2.6.6", "epoch": 1, "global_step": 3, "callbacks": {}}
SHAPES = ({"b.weight": (11, 8), "a.weight": (13, 8)}, {"b.bias": (13,), "scale": (), "a.bias": (5,)})


def _groups(lr: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    decays = (0.1, 0.0)
    return [
        {"lr": lr, "weight_decay": decay, "params": {name: torch.randn(shape) for name, shape in named.items()}}
        for named, decay in zip(SHAPES, decays, strict=True)
    ]


def _moments(groups: list[dict[str, Any]], step: float) -> dict[str, dict[str, Tensor]]:
    return {
        name: {"step": torch.tensor(step), "exp_avg": torch.randn(value.shape), "exp_avg_sq": torch.rand(value.shape)}
        for group in groups
        for name, value in group["params"].items()
    }


def _others() -> dict[str, Tensor]:
    return {"frozen": torch.randn(7, 3), "mean": torch.arange(4.0), "count": torch.tensor(5)}


def _write(
    path: Path, stage: int, ranks: int, *, step: float = 3.0, lr: float = 0.01, **more: Any
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The module's state, and the optimizer's by name."""
    groups, others = _groups(lr), _others()
    moments = _moments(groups, step)
    shared = {"tied": "b.weight"}
    deepspeed.write(path, stage, ranks, groups, moments, others, CLIENT, frozen=["frozen"], shared=shared, **more)
    trained = {name: value for group in groups for name, value in group["params"].items()}
    return trained | others | {"tied": trained["b.weight"]}, moments


@pytest.mark.parametrize(
    ("stage", "ranks", "more"),
    [(1, 1, {}), (2, 2, {}), (2, 3, {"reverse": True}), (3, 1, {}), (3, 2, {}), (3, 3, {})],
)
def test_whole_values_come_from_ranks_files(tmp_path: Path, stage: int, ranks: int, more: dict[str, Any]) -> None:
    weights, moments = _write(tmp_path / "x", stage, ranks, **more)
    for path in (tmp_path / "x", tmp_path / "x" / "checkpoint"):
        content = _converted(path)
        torch.testing.assert_close(
            {name: value.clone() for name, value in content.pop("state_dict").items()}, weights, rtol=0, atol=0
        )
        [optimizer] = content.pop("optimizer_states")
        assert [set(group["params"]) for group in optimizer["param_groups"]] == [set(named) for named in SHAPES]
        assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.1, 0.0]
        found = {name: {key: value.clone() for key, value in held.items()} for name, held in optimizer["state"].items()}
        torch.testing.assert_close(found, moments, rtol=0, atol=0)
        assert content == CLIENT
        with pytest.raises(CheckpointError, match=r"of DeepSpeed. .*python examples/convert_deepspeed_checkpoint.py"):
            open_checkpoint(str(path))


def test_files_of_earlier_versions_need_not_list_ties_and_buffers(tmp_path: Path) -> None:
    weights, _ = _write(tmp_path, 2, 2)
    path = tmp_path / "checkpoint" / "mp_rank_00_model_states.pt"
    _edited(path, lambda held: [held.pop(key) for key in ("shared_params", "buffer_names")])
    torch.testing.assert_close(_converted(tmp_path)["state_dict"], weights, rtol=0, atol=0)


def test_tied_weights_are_one_value(tmp_path: Path) -> None:
    _write(tmp_path, 3, 2)
    found = _converted(tmp_path)["state_dict"]
    assert found["tied"] is found["b.weight"]


def _number_twice(held: dict[str, Any]) -> None:
    for group in held["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]:
        group["params"] = [0]


def _edited(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    with deepspeed._classes() as made, torch.serialization.safe_globals(list(made.values())):
        found = torch.load(path, weights_only=True)
        edit(found)
        torch.save(found, path)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class Code:
    """Unpickling it would run something."""

    def __reduce__(self) -> Any:
        return print, ("this ran",)


OPTIM, MODEL = "zero_pp_rank_{}_mp_rank_00_optim_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a rank's part is missing": (
        lambda h: (h / OPTIM.format(0)).unlink(),
        r"lacks rank 0's file: it has 'zero_pp_rank_2",
    ),
    "the last rank's are missing": (
        lambda h: [(h / name.format(2)).unlink() for name in (OPTIM, MODEL)],
        r"rank_0\S+ was saved by \[3\] ranks, and there are files of 2",
    ),
    "one of another kind of file is missing": (lambda h: (h / MODEL.format(2)).unlink(), "model_states.pt' of 2 ranks"),
    "no parts": (lambda h: [one.unlink() for one in h.glob("*optim*")], "saved without ZeRO"),
    "two saves in one folder": (
        lambda h: shutil.copy(h / OPTIM.format(1), h / f"bf16_{OPTIM.format(1)}"),
        "two files for rank 1",
    ),
    "experts": (lambda h: (h / "layer_0_expert_1_mp_rank_00_model_states.pt").touch(), "mixture of experts"),
    "a pipeline": (lambda h: (h / "layer_00-model_states.pt").touch(), "pipeline parallelism"),
    "tensor parallelism": (lambda h: (h / "mp_rank_01_model_states.pt").touch(), "tensor or pipeline parallelism"),
    "a weight of another shape": (
        lambda h: _edited(h / MODEL.format(0), lambda held: held["param_shapes"][0].update({"a.weight": (14, 8)})),
        "do not fit together: rank 0 has",
    ),
    "an unknown stage": (
        lambda h: [
            _edited(h / OPTIM.format(rank), lambda held: held["optimizer_state_dict"].update(zero_stage=4))
            for rank in range(3)
        ],
        r"of ZeRO-4",
    ),
    "an optimizer of other parameters": (
        lambda h: [_edited(h / OPTIM.format(rank), _number_twice) for rank in range(3)],
        r"an optimizer of other parameters",
    ),
    "a lost frozen weight": (
        lambda h: _edited(h / MODEL.format(1), lambda held: held["frozen_param_fragments"].clear()),
        r"rank_1\S+ lacks its part of the frozen 'frozen'",
    ),
    "no folder of that name": (lambda h: (h.parent / "latest").write_text("step9") and shutil.rmtree(h), "'step9'"),
    "a flipped bit": (lambda h: _flip(h / OPTIM.format(1)), r"rank_1\S+"),
    "a short file": (lambda h: (h / OPTIM.format(1)).write_bytes(b"PK"), r"rank_1\S+"),
    "code": (
        lambda h: torch.save({"optimizer_state_dict": Code()}, h / OPTIM.format(1)),
        r"builtins\.print.*--trusted",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    do, said = DAMAGES[damage]
    _write(tmp_path, 3, 3)
    do(tmp_path / "checkpoint")
    with pytest.raises(ConversionError) as caught:
        _converted(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "full.ckpt").exists()
    assert re.search(said, str(caught.value)), caught.value
    assert "this ran" not in capsys.readouterr().out


def test_parts_of_different_saves_are_named(tmp_path: Path) -> None:
    _write(tmp_path, 2, 3)
    home = tmp_path / "checkpoint"
    shutil.copy(home / OPTIM.format(0), home / OPTIM.format(2))
    with pytest.raises(ConversionError, match="do not fit together: ranks have"):
        _converted(tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("later", "said"),
    [
        ({"step": 4.0}, "'step' is 4.0 in it"),
        ({"lr": 0.02}, "settings of the optimizer"),
        ({"version": "0.20"}, "ds_version is 0.20"),
    ],
    ids=["step", "settings", "version"],
)
def test_a_rank_of_a_later_save_is_named(tmp_path: Path, stage: int, later: dict[str, Any], said: str) -> None:
    for name, more in (("x", {}), ("later", later)):
        _write(tmp_path / name, stage, 2, **more)
    name = OPTIM.format(1)
    shutil.copy(tmp_path / "later" / "checkpoint" / name, tmp_path / "x" / "checkpoint" / name)
    with pytest.raises(ConversionError, match=rf"x/checkpoint/{name} .* of different saves: {said}"):
        _converted(tmp_path / "x")


def test_a_model_file_of_a_later_save_is_named(tmp_path: Path) -> None:
    _write(tmp_path, 3, 2)
    path = tmp_path / "checkpoint" / MODEL.format(1)
    _edited(path, lambda held: held.update(global_steps=4))
    with pytest.raises(ConversionError, match=rf"{MODEL.format(1)} .* global_steps is 4 in it, and 3 there"):
        _converted(tmp_path)


def test_of_three_tied_weights_each_is_the_first(tmp_path: Path) -> None:
    _write(tmp_path, 3, 2)
    for rank in range(2):
        _edited(tmp_path / "checkpoint" / MODEL.format(rank), _tie_another)
    found = _converted(tmp_path)["state_dict"]
    assert found["third"] is found["tied"] is found["b.weight"]


def _tie_another(held: dict[str, Any]) -> None:
    held["shared_params"]["third"] = "tied"
    held["module"]["third"] = torch.empty(0)


def test_a_version_that_does_not_say_where_weights_lie_is_named(tmp_path: Path) -> None:
    _write(tmp_path, 2, 2, mappings=False)
    with pytest.raises(ConversionError, match="too old"):
        _converted(tmp_path)
