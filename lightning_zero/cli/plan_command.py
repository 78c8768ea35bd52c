"""Estimate a training's memory and step time per GPU: the command ``plan``."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_zero.cli.command import Command
from lightning_zero.cli.models import SIZES, DecoderModule, model_class
from lightning_zero.cli.terminal import print_progress, show_section
from lightning_zero.config import Tuning
from lightning_zero.planning.estimate_training import Training, plan
from lightning_zero.planning.training_plan import TrainingPlan
from lightning_zero.profiling.devices import DEVICES

__all__ = ["PLAN", "parsed_options"]


def _add_arguments(parser: ArgumentParser) -> None:
    names = ", ".join(device.name for device in DEVICES)
    parser.add_argument("model", help=f"{', '.join(SIZES)}, or script.py:Module")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs (default %(default)s)")
    parser.add_argument("--device", default="H200", help=f"one of {names} (default %(default)s)")
    parser.add_argument("--precision", default="bf16-mixed", help="the Trainer's (default %(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step (default %(default)s)")
    parser.add_argument("--ranks-per-host", type=int, default=8, help="(default %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="samples of a rank, of built-in models")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample, of built-in models")
    parser.add_argument("--memory", help="GiB of each GPU, or auto: plan within that limit")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="option of ZeroStrategy")


def _run(arguments: Namespace) -> int:
    module = _module(arguments)
    found = plan(
        module,
        _batch(module, arguments.model),
        world_size=arguments.ranks,
        device=arguments.device,
        precision=arguments.precision,
        training=Training(accumulate=arguments.accumulate, ranks_per_host=arguments.ranks_per_host),
        **parsed_options(arguments.option),
        **_memory(arguments.memory),
    )
    if arguments.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        _show(found)
    return 0 if found.fits and (found.memory is None or found.memory.fits) else 1


def parsed_options(options: Sequence[str]) -> dict[str, Any]:
    """Return ZeroStrategy's arguments from ``NAME=VALUE`` or ``tuning.NAME=VALUE``, with values in JSON.

    Raises:
        ValueError: one is written in another way.
    """
    given: dict[str, Any] = {}
    tuning: dict[str, Any] = {}
    for text in options:
        name, equals, value = text.partition("=")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            equals = ""
        if not equals:
            raise ValueError(f"{text!r} is no NAME=VALUE with a value in JSON, as stage=2 or reduce_dtype='\"32\"'.")
        if name.startswith("tuning."):
            tuning[name.removeprefix("tuning.")] = parsed
        else:
            given[name] = parsed
    return given | {"tuning": Tuning(**tuning)}


def _memory(text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    try:
        return {"memory": float(text)}
    except ValueError:
        return {"memory": text}


def _module(arguments: Namespace) -> pl.LightningModule:
    """Return the module, on the meta device if possible."""
    if arguments.model in SIZES:
        with torch.device("meta"):
            return DecoderModule(arguments.model, arguments.batch, arguments.length)
    cls = model_class(arguments.model)
    try:
        with torch.device("meta"):
            return cls()
    except Exception as error:
        print_progress(f"{cls.__name__} is built with memory for its weights: without, {type(error).__name__}: {error}")
    return cls()


def _batch(module: pl.LightningModule, name: str) -> Any:
    try:
        return next(iter(module.train_dataloader()))
    except Exception as error:
        raise ValueError(
            f"{name} has to give a batch by its train_dataloader(), and that raised {type(error).__name__}: {error}"
        ) from error


def _show(found: TrainingPlan) -> None:
    show_section(f"Estimated, for each of {found.ranks} x {found.device.name}", found.facts())
    if found.memory is not None:
        print(found.memory.with_advice())
    if found.seconds is not None:
        show_section("ms of a step", found.milliseconds())
    show_section("How sure that is", found.known())
    if found.passes.why:
        print_progress(f"Not all could be traced: {found.passes.why}")


PLAN = Command("plan", "Estimate memory and time of a training, without a GPU.", _add_arguments, _run)
