"""Train the examples at toy size, unchanged otherwise, and check their output."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist

from tests.helpers.readme import README
from tests.helpers.trainer import make_strategy
from tests.ranks.pool import Ranks

CPU = ["--accelerator", "cpu", "--devices", "2"]


class WithoutCode(L.Trainer):
    """Compiles without generating code, which is most of the time of so short a training."""

    def __init__(self, **arguments: Any) -> None:
        if arguments["strategy"] == "zero3_compile":
            arguments["strategy"] = make_strategy("compiled")
        super().__init__(**arguments | {"enable_progress_bar": False, "enable_model_summary": False})


@contextmanager
def smaller(example: Any) -> Iterator[None]:
    """Reduce an example to one layer and a short validation."""
    with ExitStack() as stack:
        if example.__name__ == "train_gpt":
            stack.enter_context(patch.dict(example.SHAPES, tiny=replace(example.SHAPES["tiny"], layers=1)))
            stack.enter_context(patch.object(sys.modules["gpt.data"], "VALIDATION_WINDOWS", 32))
        if example.__name__ == "mixture_of_experts":
            stack.enter_context(patch.object(example, "Model", partial(example.Model, layers=1)))
        yield


def run(name: str, arguments: list[str], folder: str) -> tuple[int, dict[str, float]]:
    os.chdir(folder)
    with (
        patch.object(sys, "path", [str(README.parent / "examples"), *sys.path]),
        patch.object(L, "Trainer", WithoutCode),
    ):
        example = importlib.import_module(name)
        with smaller(example):
            trainer = example.main(arguments)
    return trainer.global_step, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.slow
def test_a_gpt_from_scratch_with_a_picture_of_the_losses_and_the_plan(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    arguments = [*CPU, "--steps", "12", "--warmup", "2", "--batch-size", "2", "--block-size", "32", "--val-every", "6"]
    arguments += ["--report", "--checkpoint", "--out", str(out)]
    for steps, found in ranks.run(2, run, "train_gpt", arguments, str(tmp_path), deadline=120):
        assert steps == 12
        assert found["val_loss"] < 5.0  # the logarithm of 256 is 5.55
    record = json.loads((out / "run.json").read_text())
    assert record["processes"] == 2
    assert record["final"]["val_loss"] < 5.0
    assert len(list((out / "checkpoints").glob("*.ckpt"))) == 2
    assert all((out / name).stat().st_size > 1000 for name in ("loss.png", "plan/plan.txt", "plan/report.html"))


@pytest.mark.exhaustive  # the first example trains as this one does
def test_a_mixture_of_experts(ranks: Ranks, tmp_path: Path) -> None:
    for steps, found in ranks.run(2, run, "mixture_of_experts", [*CPU, "--steps", "30"], str(tmp_path), deadline=120):
        assert steps == 30
        assert found["train_loss"] < 4.0  # the logarithm of 64 is 4.16


@pytest.mark.exhaustive  # see test_weight_averaging.py
def test_a_vision_model_whose_weights_are_averaged(ranks: Ranks, tmp_path: Path) -> None:
    arguments = [*CPU, "--epochs", "3", "--pictures", "768", "--out", str(tmp_path / "out")]
    for _, found in ranks.run(2, run, "vision_ema", arguments, str(tmp_path), deadline=120):
        assert found["accuracy"] > 0.3  # of nine
    assert len(list((tmp_path / "out").glob("*.ckpt"))) == 1


SHAPE = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
SHAPE |= {"num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.exhaustive  # distributed/test_outline.py trains a GPT-2
@pytest.mark.parametrize("lora", [False, True], ids=["weights", "LoRA"])
def test_a_transformers_model_is_tuned_and_exported(ranks: Ranks, tmp_path: Path, lora: bool) -> None:
    transformers = pytest.importorskip("transformers")
    if lora:
        pytest.importorskip("peft")
    (tmp_path / "shape.json").write_text(json.dumps(SHAPE))
    arguments = [*CPU, "--steps", "20", "--length", "32", "--export", str(tmp_path / "exported")]
    arguments += ["--config", str(tmp_path / "shape.json"), *(["--lora"] if lora else [])]
    for _, found in ranks.run(2, run, "finetune_transformers", arguments, str(tmp_path), deadline=120):
        assert found["train_loss"] < (5.55 if lora else 4.5)  # the logarithm of 256 is 5.55
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert sum(param.numel() for param in read.parameters()) > 70_000
    assert all(param.isfinite().all() for param in read.parameters())


def by_command_line(arguments: list[str]) -> tuple[Any, int]:
    """Return the strategy's arguments, and the steps."""
    with patch.object(sys, "path", [str(README.parent / "examples"), *sys.path]):
        cli = importlib.import_module("cli").main(arguments)
    options = cli.trainer.strategy._options
    assert dist.get_world_size() == 2
    return (options.tuning.gather_group_mb, options.tuning.unsharded_cache_mb), cli.trainer.global_step


def test_a_command_line_with_a_file(ranks: Ranks) -> None:
    pytest.importorskip("jsonargparse")
    told = "--trainer.strategy.init_args"
    arguments = ["fit", "--config", str(README.parent / "examples" / "cli.yaml"), "--trainer.accelerator", "cpu"]
    arguments += [f"{told}.compile_backend", "aot_eager", f"{told}.tuning.unsharded_cache_mb", "100"]
    arguments += ["--trainer.max_steps", "5", "--trainer.enable_progress_bar", "false"]
    for options, steps in ranks.run(2, by_command_line, arguments, deadline=120):
        assert options == (64, 100)
        assert steps == 5


def test_the_toy_losses_are_those_of_guessing() -> None:
    assert torch.tensor([64.0, 256.0]).log().tolist() == pytest.approx([4.16, 5.55], abs=0.01)
