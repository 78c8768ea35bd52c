"""What ``checkpoint`` takes on its command line."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace

from lightning_zero.cli.checkpoint import consolidate
from lightning_zero.cli.checkpoint import DTYPES, export_weights
from lightning_zero.cli.checkpoint import inspect
from lightning_zero.cli.checkpoint import verify
from lightning_zero.cli.command import Command

__all__ = ["CHECKPOINT"]


def _add_arguments(parser: ArgumentParser) -> None:
    choices = parser.add_subparsers(title="what to do", required=True, metavar="WHAT")
    for name, do, text in (
        ("inspect", inspect, "Shows what is in a checkpoint, or in each of a folder of them."),
        ("verify", verify, "Compares it, or each of them, with its checksums."),
        ("consolidate", consolidate, "Makes one file of a sharded one, as a single process would have saved it."),
        ("export", export_weights, "Writes its weights as Hugging Face's safetensors."),
    ):
        own = choices.add_parser(name, help=text, description=text)
        own.add_argument("path", metavar="PATH", help="of the checkpoint: a file, a folder, or a URL of one")
        own.add_argument("--json", action="store_true", default=SUPPRESS, help="print everything as JSON")
        own.set_defaults(do=do)
        if name == "inspect":
            own.add_argument("--tensors", action="store_true", help="list all weights")
        if name == "export":
            own.add_argument("--output", metavar="FOLDER", required=True)
            own.add_argument("--prefix", default="", help="only weights whose names begin so, without it: 'model.'")
            own.add_argument("--dtype", choices=list(DTYPES), help="by default as they were saved")
            own.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file")
        if name == "consolidate":
            own.add_argument("--output", metavar="FILE", help="by default PATH.consolidated")
            own.add_argument(
                "--trust", action="store_true", help="unpickle whatever was saved beside tensors; it may run code"
            )


def _run(arguments: Namespace) -> int:
    status: int = arguments.do(arguments)
    return status


CHECKPOINT = Command("checkpoint", "Shows, verifies and converts checkpoints of either kind.", _add_arguments, _run)
