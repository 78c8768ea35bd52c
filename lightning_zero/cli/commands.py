"""Define the commands' arguments and help. Each command imports its own module when it runs.

This module imports neither torch nor Lightning, so that help and wrong arguments answer at once.
"""

from __future__ import annotations

import json
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from lightning_zero.cli.command import Command, describe
from lightning_zero.cli.model_sizes import SIZES
from lightning_zero.cli.status_line import StatusLine

# Names of lightning_zero.profiling.devices, whose import takes seconds.
DEVICE_NAMES = (
    *("H200", "H200-NVL", "GH200", "H100", "H100-NVL", "H100-PCIe", "B200", "A100", "A100-40GB", "L40S", "L4"),
    *("RTX-4090", "RTX-3090"),
)
PRECISIONS = ("bf16-mixed", "16-mixed", "32-true", "bf16-true", "16-true", "64-true")
DTYPES = ("float32", "bfloat16", "float16")
IMPORTING = "importing torch and Lightning"  # takes seconds, and longer from a cold disk
SELF_TEST_S = 120.0  # a tiny training takes seconds, and a busy machine several times as long


def add_json(parser: ArgumentParser, default: Any = False) -> None:
    text = "Print one JSON document to stdout, and nothing else there."
    parser.add_argument("--json", action="store_true", default=default, help=text)


# -- doctor


def _add_doctor_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--no-self-test",
        action="store_true",
        help="Inspect the machine only. Build nothing and train nothing.",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=SELF_TEST_S,
        metavar="SECONDS",
        help="End the self-test after this time. The default is %(default)g.",
    )


def _run_doctor(arguments: Namespace) -> int:
    with StatusLine("doctor") as status:
        status.update(IMPORTING)
        from lightning_zero.cli.doctor import run

        return run(arguments, status)


DOCTOR = Command(
    "doctor",
    "Check this machine, and train a tiny model on all of its devices.",
    _add_doctor_arguments,
    _run_doctor,
    "The command reports versions, devices, links, the network and limits of the system. It builds the C++ executor if "
    "there is none. It then trains a tiny model twice, with and without sharding, and compares the results. The exit "
    "status is 0 if all is well, and 1 if there is a problem to fix. With several hosts, start it as you start a "
    "training: rank 0 compares the hosts.",
    (
        "doctor                    # this machine",
        "doctor --no-self-test     # only report, in seconds",
        "doctor --json > doctor.json",
    ),
)


# -- build


def _add_build_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="FOLDER",
        help="Build into this folder. The default is $LIGHTNING_ZERO_CACHE, or else ~/.cache/lightning_zero. Trainings "
        "look only in the default folder.",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="Wait at most this time while another process builds. The default is 900.",
    )
    parser.add_argument(
        "--wheel",
        nargs="?",
        type=Path,
        const=Path("dist"),
        metavar="FOLDER",
        help="Also write a wheel of lightning_zero that contains the executor, into this folder (default: dist). The "
        "wheel serves machines with the same torch, and with this machine's glibc or a newer one. It needs a checkout "
        "of the sources.",
    )


def _run_build(arguments: Namespace) -> int:
    with StatusLine("build") as status:
        status.update(IMPORTING)
        from lightning_zero.cli.build_command import run
    return run(arguments)


BUILD = Command(
    "build",
    "Build the C++ executor ahead of time, or a wheel that contains it.",
    _add_build_arguments,
    _run_build,
    "A training builds the executor at its first start, which needs g++ and takes about a minute. This command does "
    "it earlier, such as in the image of a container, and prints the path of the library. If the library exists, the "
    "command ends at once.",
    (
        "build                     # into the cache of this user",
        "build --wheel wheels      # wheels/lightning_zero-...-linux_x86_64.whl",
        "build --cache /opt/lightning_zero && export LIGHTNING_ZERO_CACHE=/opt/lightning_zero",
    ),
)


# -- plan


def _add_plan_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=_model,
        metavar="MODEL",
        help=f"A built-in decoder ({', '.join(SIZES)}), or a LightningModule as FILE.py:CLASS. The class is called "
        "without arguments, and its train_dataloader() gives a batch.",
    )
    parser.add_argument("--ranks", type=_count, default=1, metavar="N", help="Number of GPUs. The default is 1.")
    parser.add_argument(
        "--ranks-per-host", type=_count, default=8, metavar="N", help="Number of GPUs of one host. The default is 8."
    )
    parser.add_argument(
        "--device",
        type=_device,
        default="H200",
        metavar="GPU",
        help=f"Type of the GPUs: {', '.join(DEVICE_NAMES)}. The default is H200.",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="bf16-mixed",
        metavar="PRECISION",
        help=f"The Trainer's precision: {', '.join(PRECISIONS)}. The default is bf16-mixed.",
    )
    parser.add_argument(
        "--accumulate",
        type=_count,
        default=1,
        metavar="N",
        help="Number of micro-batches in one optimizer step. The default is 1.",
    )
    parser.add_argument(
        "--batch",
        type=_count,
        default=2,
        metavar="N",
        help="Samples in a micro-batch of one GPU, for built-in models. The default is 2.",
    )
    parser.add_argument(
        "--length",
        type=_count,
        default=2048,
        metavar="N",
        help="Tokens in a sample, for built-in models. The default is 2048.",
    )
    parser.add_argument(
        "--memory",
        type=_memory,
        metavar="GIB",
        help="Choose recomputation and offload so that each GPU needs at most this memory, in GiB. With 'auto', the "
        "limit is the GPU's own memory. The default is no limit.",
    )
    parser.add_argument(
        "--option",
        action="append",
        type=_option,
        default=[],
        metavar="NAME=VALUE",
        help="Set an option of ZeroStrategy, with its value in JSON. Repeat it for several options. Names of Tuning "
        "begin with 'tuning.'.",
    )


def _run_plan(arguments: Namespace) -> int:
    with StatusLine("plan") as status:
        status.update(IMPORTING)
        from lightning_zero.cli.plan_command import run

        return run(arguments, status)


PLAN = Command(
    "plan",
    "Estimate memory and time of a training for each GPU, without a GPU.",
    _add_plan_arguments,
    _run_plan,
    "The command traces one training step on tensors without memory. It prints bytes by their use, the peak, and the "
    "milliseconds of a step. The exit status is 0 if the training fits into the GPU's memory, and 1 if it does not.",
    (
        "plan 1b --ranks 2 --device H100",
        "plan model.py:Module --ranks 8 --memory auto",
        "plan 7b --ranks 4 --option stage=2 --option tuning.gather_group_mb=64",
    ),
)


# -- checkpoint


def _add_checkpoint_arguments(parser: ArgumentParser) -> None:
    choices = parser.add_subparsers(title="actions", required=True, dest="action")
    for name, summary, description, example in (
        (
            "inspect",
            "Show the content of a checkpoint.",
            "The path may also be a folder of checkpoints: the command then shows each of them.",
            ("checkpoint inspect last.ckpt --tensors",),
        ),
        (
            "verify",
            "Compare a checkpoint with its checksums.",
            "The path may also be a folder of checkpoints: the command then compares each of them. The exit status is "
            "1 if one is damaged.",
            ("checkpoint verify checkpoints/",),
        ),
        (
            "consolidate",
            "Write a sharded checkpoint as one file, which any strategy can load.",
            "The file equals the one that a single process would save. The command needs host memory for all tensors "
            "of the checkpoint.",
            ("checkpoint consolidate last.ckpt --output full.ckpt",),
        ),
        (
            "export",
            "Write the weights as safetensors, Hugging Face's format.",
            "A prefix selects the weights below one attribute of the LightningModule, such as self.model.",
            ("checkpoint export last.ckpt --output weights --prefix model. --dtype bfloat16",),
        ),
    ):
        own = choices.add_parser(name, help=summary)
        describe(own, summary, description, example)
        own.add_argument("path", metavar="PATH", help="The checkpoint: a file, a folder, or the URL of a folder.")
        if name == "inspect":
            own.add_argument("--tensors", action="store_true", help="List all weights with their shapes and dtypes.")
        if name == "consolidate":
            own.add_argument("--output", metavar="FILE", help="Write this file. The default is PATH.consolidated.")
            own.add_argument(
                "--trust",
                action="store_true",
                help="Unpickle values that are not tensors. This may run code, so use it only for your own files.",
            )
        if name == "export":
            own.add_argument("--output", metavar="FOLDER", required=True, help="Write the files into this folder.")
            own.add_argument(
                "--prefix",
                default="",
                help="Export only weights whose names begin with this text, and remove it from the names.",
            )
            own.add_argument(
                "--dtype",
                choices=DTYPES,
                metavar="DTYPE",
                help=f"Convert floating-point weights to {', '.join(DTYPES)}. The default keeps each weight's dtype.",
            )
            own.add_argument(
                "--max-shard-size",
                default="5GB",
                metavar="SIZE",
                help="Largest size of one file, such as 500MB or 5GB. The default is %(default)s.",
            )
        add_json(own, SUPPRESS)  # as default, the value of the command's own --json


def _run_checkpoint(arguments: Namespace) -> int:
    with StatusLine("checkpoint") as status:
        status.update(IMPORTING)
        from lightning_zero.cli.checkpoint import run
    return run(arguments)


CHECKPOINT = Command(
    "checkpoint",
    "Inspect, verify, consolidate or export a checkpoint.",
    _add_checkpoint_arguments,
    _run_checkpoint,
    "Each action takes full and sharded checkpoints, and has its own help.",
    (
        "checkpoint inspect last.ckpt",
        "checkpoint consolidate last.ckpt --output full.ckpt",
        "checkpoint export --help",
    ),
)

COMMANDS: tuple[Command, ...] = (DOCTOR, BUILD, PLAN, CHECKPOINT)


# -- values of arguments


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _positive(text: str, problem: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ArgumentTypeError(f"{text!r} is {problem}")
    return value


def _seconds(text: str) -> float:
    return _positive(text, "not a number of seconds above 0")


def _memory(text: str) -> float | str:
    return text if text == "auto" else _positive(text, "neither a number of GiB above 0 nor 'auto'. Write --memory 40")


def _device(text: str) -> str:
    wanted = text.lower().replace(" ", "-")
    for name in DEVICE_NAMES:
        if name.lower() == wanted:
            return name
    raise ArgumentTypeError(
        f"{text!r} is none of {', '.join(DEVICE_NAMES)}. For another GPU, call lightning_zero.plan(...) in Python with "
        "device=lightning_zero.Device(...)"
    )


def _model(text: str) -> str:
    if text in SIZES:
        return text
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise ArgumentTypeError(
            f"{text!r} is none of {', '.join(SIZES)}, and not a file with a class. Write FILE.py:CLASS, such as "
            "model.py:Module"
        )
    if not Path(path).is_file():
        raise ArgumentTypeError(
            f"there is no file {path!r} in {Path.cwd()}. Write FILE.py:CLASS, such as model.py:Module"
        )
    return text


def _option(text: str) -> str:
    try:
        parse_option(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
    return text


def parse_option(text: str) -> tuple[str, Any]:
    """Return name and value of ``NAME=VALUE``, whose value is JSON.

    Raises:
        ValueError: The text has another form.
    """
    name, equals, value = text.partition("=")
    try:
        if name and equals:
            return name, json.loads(value)
    except json.JSONDecodeError:
        pass
    raise ValueError(
        f"{text!r} is not NAME=VALUE with a value in JSON. Write stage=2, compile=false or 'reduce_dtype=\"32\"'"
    )
