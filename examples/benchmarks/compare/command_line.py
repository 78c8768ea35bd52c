"""The command line: compare this strategy with others on one model."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compare.baselines import OURS, PEERS
from compare.comparison import HEADS, Devices, brief, cells, compare
from compare.job import Job
from compare.time_chart import draw
from lightning_zero.cli.main import run_command
from lightning_zero.cli.models import SIZES, model_class
from lightning_zero.cli.terminal import print_progress, show_table
from lightning_zero.native.build import build

__all__ = ["main"]

FILE = "bench.json"
FEWEST = 3  # measured steps: the first of them is left out, and quantiles need two


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and return the exit status: 0 if this strategy has a time, 1 if not, 2 for a wrong command line."""
    parser = ArgumentParser(
        prog="python examples/benchmarks/compare",
        description="Trains one model under this strategy and others, and compares.",
    )
    _add_arguments(parser)
    return run_command(_run, parser.parse_args(arguments))


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help=f"{', '.join(SIZES)}, or script.py:Module; by default 350m on GPUs and tiny on the CPU"
    )
    parser.add_argument("--only", metavar="NAMES", help=f"with commas, of {','.join(PEERS)}; by default all")
    parser.add_argument("--ranks", type=int, help="by default one for each GPU, or two on the CPU")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default %(default)s)")
    parser.add_argument("--warm", type=int, default=15, help="first steps, not measured (default %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="samples per rank, of built-in models")
    parser.add_argument(
        "--length", type=int, help="tokens per sample, of built-in models; by default 2048, or 128 of tiny"
    )
    parser.add_argument("--precision", help="by default bf16-mixed on GPUs, and 32-true on the CPU")
    parser.add_argument("--clip", type=float, default=1.0, help="norm of gradients; 0: no clipping")
    parser.add_argument("--limit", type=float, default=600.0, metavar="S", help="seconds that each peer gets")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"], help="of torch.compile")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of ZeroStrategy")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for bench.json, after each peer, and a chart")
    parser.add_argument(
        "--resume", action="store_true", help="peers that have a time in DIR/bench.json do not run again"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _run(arguments: Namespace) -> int:
    gpus = torch.cuda.is_available()
    names = list(PEERS) if arguments.only is None else arguments.only.split(",")
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ValueError(f"There is no peer called {', '.join(unknown)}. Choose of {', '.join(PEERS)}.")
    if arguments.steps < arguments.warm + FEWEST or arguments.warm < 1:
        raise ValueError(
            f"Of --steps {arguments.steps} with --warm {arguments.warm} too few are measured: at least one step warms "
            f"up, and {FEWEST} more are needed."
        )
    job = _job(arguments, gpus)
    if job.model not in SIZES:
        model_class(job.model)  # an error in it is shown once, before ranks start
    ranks = arguments.ranks or (torch.cuda.device_count() if gpus else 2)
    if OURS in names:
        build(report=print_progress)  # before the time limit of a peer begins
    title = f"{job.model}, {ranks} x {torch.cuda.get_device_name(0) if gpus else 'CPU'}, {job.precision}"
    found = {"title": title, "torch": torch.__version__, "ranks": ranks, "job": json.loads(job.to_json())}
    known = _rows_before(found, arguments.out) if arguments.resume else []

    def keep(rows: list[dict[str, Any]]) -> None:
        if arguments.out is not None:
            _write(found | {"rows": rows}, arguments.out)

    rows = compare(job, names, Devices(ranks, gpus, arguments.limit), print_progress, known, keep)
    found["rows"] = rows
    if arguments.out is not None:
        _write(found, arguments.out)
        chart = draw(rows, title, arguments.out)
        found["chart"] = None if chart is None else str(chart)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show_table(title, HEADS, [cells(row) for row in rows if not row["failed"]])
        for row in rows:
            if row["failed"]:
                print(f"{row['peer']}: {brief(row['failed'])}")
        if found.get("chart"):
            print(found["chart"])
    return 0 if all("ms" in row for row in rows if row["peer"] == OURS) else 1


def _job(arguments: Namespace, gpus: bool) -> Job:
    model = arguments.model or ("350m" if gpus else "tiny")
    return Job(
        peer=OURS,
        model=model,
        batch=arguments.batch,
        length=arguments.length or (128 if model == "tiny" else 2048),
        steps=arguments.steps,
        warm=arguments.warm,
        precision=arguments.precision or ("bf16-mixed" if gpus else "32-true"),
        backend=arguments.backend,
        clip=arguments.clip,
        options=tuple(arguments.option),
    )


def _write(found: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(found, indent=2) + "\n")


def _rows_before(found: dict[str, Any], folder: Path | None) -> list[dict[str, Any]]:
    """Return the rows of an earlier call for the same job on the same devices, if any.

    Raises:
        ValueError: the rows are of another job, or there is no folder.
    """
    if folder is None:
        raise ValueError(f"--resume needs --out DIR, where an earlier call has left {FILE}.")
    file = folder / FILE
    if not file.exists():
        return []
    try:
        before = json.loads(file.read_text())
        rows = before.pop("rows")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} was not written by this command ({error}): name another folder, or leave out --resume."
        ) from error
    for key, value in found.items():
        if before.get(key) != value:
            raise ValueError(
                f"{file} has another {key} ({before.get(key)}, and now {value}), so its rows cannot stand beside new "
                "ones: name another folder, or leave out --resume."
            )
    return rows
