"""`memory=GIB` beside options set by hand, of one model on one GPU: how much slower it is than the best of them that
stays within the limit, too.

    python examples/benchmarks/memory_sweep.py decoder_1.36b --memory 32
    python examples/benchmarks/memory_sweep.py t5_base --memory 14 --budgets 0.7,0.5 --offload "" --total 140
    python examples/benchmarks/memory_sweep.py decoder_6.7b --memory 80 --budgets 1,0.8 --offload optimizer \
        --buffers 256,8000

The options by hand are every `activation_memory_budget` of `--budgets` with every `offload` of `--offload` (names
joined by "+"; "" for none) and, where that has the optimizer's state, every `offload_buffer_mb` of `--buffers`. Models,
and what is measured of each, are those of `plan_check.py`; each training has a process of its own. `memory` comes
first, and what is cheapest to give up next; nothing begins that `--total` seconds leave no time for. Prints a JSON line
for each, and a last one with the ratio of their steps' times: "ratio" is only about what was tried and held the limit
in steady steps, the first, eager one aside ("held").
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

GIB = 2**30
TRAINING = Path(__file__).with_name("plan_check.py")
BUFFER = "tuning.offload_buffer_mb"


def by_hand(budgets: Iterable[float], offloads: Iterable[str], buffers: Sequence[float] = ()) -> list[dict[str, Any]]:
    """Options of a strategy, those that give up the least time first, as far as anybody knows. The buffers are of what
    has the optimizer's state on the host; without any that is its default."""
    found: list[dict[str, Any]] = []
    for offload, budget in product(offloads, sorted(budgets, reverse=True)):
        one = {"activation_memory_budget": budget, "offload": tuple(filter(None, offload.split("+")))}
        sizes = sorted(buffers, reverse=True) if "optimizer" in one["offload"] else ()
        found += [one | {BUFFER: size} for size in sizes] or [one]
    return found


def command(model: str, options: dict[str, Any], memory: float | None, steps: int) -> list[str]:
    warm = 18 if memory is not None else 8
    found = [sys.executable, str(TRAINING), model, "--train", f"--steps={steps}", f"--warm={warm}"]
    found += [f"--option={name}={json.dumps(value)}" for name, value in options.items()]
    return found if memory is None else [*found, f"--memory={memory}"]


def output_of(command: Sequence[str], seconds: float, errors: int | None = None) -> tuple[str, str, bool]:
    """What a command printed by its end, or until the seconds were over, to stdout and, where ``errors`` is
    ``subprocess.PIPE``, to stderr; and whether it ended by itself."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    try:
        return *process.communicate(timeout=seconds), True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # compilers and ranks among them
        return *process.communicate(), False


def trained(command: Sequence[str], seconds: float) -> dict[str, Any] | None:
    """What a training measured by its end, or until the seconds were over; None where that is nothing."""
    out, _, _ = output_of(command, seconds)
    lines = [line for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
    return json.loads(lines[-1]) if lines else None


def row(options: dict[str, Any], found: dict[str, Any] | None, limit: float) -> dict[str, Any]:
    if found is None:
        return {"options": options, "measured": False}
    steady = found["reserved_steady"] + found["others"]
    sizes = {"gib": round(steady / GIB, 2), "ever_gib": round(found["device"] / GIB, 2)}
    sizes["first_steps"] = found["first_steps"]
    told = {"options": options, "ms": round(found["ms"], 2), **sizes, "held": steady <= limit * GIB}
    chosen = found.get("chosen")
    return told | ({"chosen": chosen["chosen"], "fits": chosen["fits"]} if chosen else {})


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The planned training, which is the first, beside the fastest of the others that held the limit."""
    planned, *others = rows
    held = [one for one in others if one.get("held")]
    best = min(held, key=lambda one: one["ms"], default=None)
    ratio = round(planned["ms"] / best["ms"], 3) if best is not None and planned.get("held") else None
    return {"planned": planned, "best": best, "tried": len(others), "held": len(held), "ratio": ratio}


def numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",") if one]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="of plan_check.py")
    parser.add_argument("--memory", type=float, required=True, metavar="GIB")
    parser.add_argument("--budgets", default="1.0,0.7,0.5,0.4,0.3,0.2")
    parser.add_argument("--offload", default=",optimizer,activations,optimizer+activations")
    parser.add_argument("--buffers", default="", metavar="MB", help="of the device, for what has the state on the host")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=float, default=140, help="seconds for each training")
    parser.add_argument("--total", type=float, default=float("inf"), help="seconds for all of them")
    arguments = parser.parse_args()
    budgets, buffers = numbers(arguments.budgets), numbers(arguments.buffers)
    begun, model, limit = time.perf_counter(), arguments.model, arguments.memory
    tries: list[tuple[dict[str, Any], float | None]] = [({}, limit)]
    tries += [(one, None) for one in by_hand(budgets, arguments.offload.split(","), buffers)]
    rows = []
    for options, memory in tries:
        left = min(arguments.limit, arguments.total - (time.perf_counter() - begun))
        if left < 20:  # nothing starts, compiles and runs in less
            break
        shown = options if memory is None else {"memory": memory}
        rows.append(row(shown, trained(command(model, options, memory, arguments.steps), left), limit))
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"model": model, "memory": limit} | verdict(rows)), flush=True)


if __name__ == "__main__":
    main()
