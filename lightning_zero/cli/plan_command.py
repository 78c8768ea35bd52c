"""Estimate a training's memory and step time per GPU: the command ``plan``."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_zero.cli.command import UsageError
from lightning_zero.cli.commands import parse_option
from lightning_zero.cli.models import SIZES, DecoderModule, model_class
from lightning_zero.cli.status_line import StatusLine
from lightning_zero.cli.terminal import show_table
from lightning_zero.config import EngineConfig, Tuning
from lightning_zero.planning.estimate_training import Training, plan
from lightning_zero.planning.training_plan import MEMORY_HEADS, TIME_HEADS, TrainingPlan


def run(arguments: Namespace, status: StatusLine) -> int:
    """Run the command, and return the exit status: 1 if the training does not fit."""
    with redirect_stdout(sys.stderr):  # what the user's script prints is no result
        found = _plan(arguments, status)
    status.close()
    if arguments.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        _show(found)
    return 0 if found.fits and (found.memory is None or found.memory.fits) else 1


def _plan(arguments: Namespace, status: StatusLine) -> TrainingPlan:
    status.update("building the model")
    module = _module(arguments, status)
    options = _options(arguments.option) | ({} if arguments.memory is None else {"memory": arguments.memory})
    return plan(
        module,
        _batch(module, arguments.model),
        world_size=arguments.ranks,
        device=arguments.device,
        precision=arguments.precision,
        training=Training(accumulate=arguments.accumulate, ranks_per_host=arguments.ranks_per_host),
        progress=status.update,
        **options,
    )


def parsed_options(options: Sequence[str]) -> dict[str, Any]:
    """Return ZeroStrategy's arguments from ``NAME=VALUE`` or ``tuning.NAME=VALUE``, with values in JSON.

    Raises:
        ValueError: one is written in another way.
    """
    given: dict[str, Any] = {}
    tuning: dict[str, Any] = {}
    for text in options:
        name, value = parse_option(text)
        if name.startswith("tuning."):
            tuning[name.removeprefix("tuning.")] = value
        else:
            given[name] = value
    return given | {"tuning": Tuning(**tuning)}


def _options(texts: Sequence[str]) -> dict[str, Any]:
    """Return ZeroStrategy's arguments. Raise ``UsageError`` for an unknown name or a wrong value."""
    try:
        options = parsed_options(texts)
        EngineConfig(**options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"argument --option: {error}") from error
    return options


def _module(arguments: Namespace, status: StatusLine) -> pl.LightningModule:
    """Return the module, on the meta device if possible."""
    if arguments.model in SIZES:
        with torch.device("meta"):
            return DecoderModule(arguments.model, arguments.batch, arguments.length)
    cls = model_class(arguments.model)
    try:
        with torch.device("meta"):
            return cls()
    except Exception as error:
        status.note(
            f"{cls.__name__} cannot be built on the meta device, so its weights take host memory: "
            f"{type(error).__name__}: {error}"
        )
    return cls()


def _batch(module: pl.LightningModule, name: str) -> Any:
    try:
        return next(iter(module.train_dataloader()))
    except Exception as error:
        raise ValueError(
            f"{name} has to give a batch by its train_dataloader(), and that raised {type(error).__name__}: {error}"
        ) from error


def _show(found: TrainingPlan) -> None:
    show_table(found.title, MEMORY_HEADS, found.memory_rows())
    print(f"\n{found.verdict()}")
    if found.memory is not None:
        print(f"\n{found.memory.with_advice()}")
    if rows := found.time_rows():
        show_table("", TIME_HEADS, rows)
    print("", *found.sources(), sep="\n")
