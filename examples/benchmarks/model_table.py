"""Train the models of `architectures.py` under each strategy, each in a process of its own, and print one table.

    python examples/benchmarks/model_table.py --out FOLDER --models mixtral,t5 --jobs 2 --warm-start

Compile caches begin empty for each row. With `--jobs 2`, two processes start at the same time, which makes their starts
longer and needs the memory of both. Their steps are timed one after another. Options after `--` are those of
`models.py`. FOLDER has the log of each row, and `results.jsonl`. A later run with the same options does not repeat the
rows of that file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from architectures import ARCHITECTURES, WARMED_UP

FURTHER = ("small_gpt", "llama_checkpointed", "wrapped_parts", "qwen3_moe", "deepseek", "gpt_oss")
MODELS = [model for model in ARCHITECTURES if model not in FURTHER]  # one of each architecture
STRATEGIES = ("zero3_compile", "fsdp2", "ddp")
HEAD = "| model | strategy | graphs | replayed | ms | 10 to 90 % | peak GiB | reserved GiB | cold s | warm s | loss |"

Result = dict[str, Any]


class Row:
    """One process that trains a model under a strategy.

    Args:
        log: file of what it prints.
        command: of the process, which waits for a line before it times steps.
        cache: folder of what it compiles.
    """

    def __init__(self, model: str, strategy: str, log: Path, command: list[str], cache: Path) -> None:
        self.model, self.strategy, self._log = model, strategy, log
        self._begun, self.ended = time.monotonic(), ""
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [*command, model, "--strategy", strategy],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | caches,
                start_new_session=True,
            )

    @property
    def starting(self) -> bool:
        return self._process.poll() is None and WARMED_UP not in self._log.read_text(errors="replace")

    def end(self, reason: str) -> None:
        """End the process with its data workers and compilers, which are in its session."""
        self.ended = self.ended or reason
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def time_steps(self, limit_s: float) -> Result:
        """Let the process time its steps, and return its result."""
        try:
            self._process.communicate(b"\n", limit_s)
        except subprocess.TimeoutExpired:
            self.ended = f"its steps took more than {limit_s:.0f} s"
        status = self._process.poll()
        self.end(f"exit status {status}" if status else "")
        text = self._log.read_text(errors="replace").splitlines()
        total = {"total_s": round(time.monotonic() - self._begun, 1)}
        found = [line for line in text if line.startswith('{"model"')]
        if found:
            return json.loads(found[-1]) | total
        last = next((line for line in reversed(text) if line.strip()), "")
        return {"model": self.model, "strategy": self.strategy, "failed": f"{self.ended}: {last[:200]}"} | total


class Table:
    """Run rows in rounds, and keep their results in a file.

    The processes of a round start at the same time. As soon as all have warmed up or ended, they time their steps one
    after another.

    Args:
        out: folder of the logs and results.
        more: options of `models.py`.
        limit_s: seconds after which a start is ended.
        warm_start: start each row a second time, with a full compile cache.
        keep: do not repeat rows that the folder has.
    """

    def __init__(self, out: Path, more: list[str], limit_s: float, warm_start: bool, keep: bool) -> None:
        self._out, self._more, self._limit_s, self._warm_start = out, more, limit_s, warm_start
        self._results = out / "results.jsonl"
        self.known: dict[tuple[str, str], Result] = {}
        if keep and self._results.exists():
            lines = map(json.loads, self._results.read_text().splitlines())
            self.known = {(line["model"], line["strategy"]): line for line in lines if line["arguments"] == more}

    def round(self, rows: Sequence[tuple[str, str]]) -> None:
        """Train models under strategies, from cold starts and then from warm ones."""
        for row in rows:
            shutil.rmtree(self._cache(*row), ignore_errors=True)
        results = {(result["model"], result["strategy"]): result for result in self._run(rows, "cold")}
        if self._warm_start:
            for warm in self._run([row for row in rows if "failed" not in results[row]], "warm"):
                results[warm["model"], warm["strategy"]]["warm_start_s"] = warm.get("start_s")
        for row, result in results.items():
            shutil.rmtree(self._cache(*row), ignore_errors=True)
            self.known[row] = result | {"arguments": self._more}
            with self._results.open("a") as file:
                file.write(json.dumps(self.known[row]) + "\n")
            print(line(result), flush=True)

    def _cache(self, model: str, strategy: str) -> Path:
        return self._out / "caches" / f"{model}-{strategy}"

    def _run(self, rows: Sequence[tuple[str, str]], start: str) -> list[Result]:
        script = Path(__file__).with_name("models.py")
        command = [sys.executable, str(script), "--turns", "--devices", "1", *self._more]
        begun = time.monotonic()
        running = [Row(*row, self._out / f"{'-'.join(row)}-{start}.log", command, self._cache(*row)) for row in rows]
        try:
            while any(row.starting for row in running):
                if time.monotonic() - begun > self._limit_s:
                    for row in running:
                        if row.starting:
                            row.end(f"not warmed up within {self._limit_s:.0f} s")
                time.sleep(0.2)
            return [row.time_steps(self._limit_s) for row in running]
        finally:
            for row in running:
                row.end("")


def line(result: Result) -> str:
    """Return a row of the table."""
    name = f"| {result['model']} | {result['strategy']} |"
    if "failed" in result:
        return f"{name} failed: {result['failed']} |"
    breaks = sum(result["graph_breaks"].values())
    graphs = f"{result['graphs']}" + (f", {breaks} breaks" if breaks else "")
    count = result.get("replayed_graphs", 0)
    replayed = result.get("not_replayed", "-") or (f"yes, {count}" if count else "no")
    deciles = " to ".join(map(str, result["ms_10_90"]))
    start = f"{result['start_s']} | {result.get('warm_start_s', '')}"
    memory = f"{result['peak_gib']} | {result['reserved_gib']}"
    return f"{name} {graphs} | {replayed} | {result['ms']} | {deciles} | {memory} | {start} | {result['last_loss']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of logs and results")
    parser.add_argument("--models", default=",".join(MODELS), help="with commas, or all")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="with commas")
    parser.add_argument("--limit", type=float, default=150, metavar="SECONDS", help="of each start")
    parser.add_argument("--total", type=float, default=3600, metavar="SECONDS", help="begin no row after them")
    parser.add_argument("--jobs", type=int, default=1, help="processes that start at the same time")
    parser.add_argument("--warm-start", action="store_true", help="start a second time, with a full compile cache")
    parser.add_argument("--again", action="store_true", help="repeat rows that the folder has")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:split])
    models = list(ARCHITECTURES) if args.models == "all" else args.models.split(",")
    if unknown := [model for model in models if model not in ARCHITECTURES]:
        parser.error(f"argument --models: no {', '.join(unknown)}; there are {', '.join(ARCHITECTURES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    # timeout(1) sends it; without a handler, rows would go on in their sessions.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    table = Table(args.out, sys.argv[split + 1 :], args.limit, args.warm_start, not args.again)
    begun = time.monotonic()

    rows = [(model, strategy) for model in models for strategy in args.strategies.split(",")]
    todo = [row for row in rows if row not in table.known]
    while todo and time.monotonic() - begun < args.total:
        now, todo = todo[: args.jobs], todo[args.jobs :]
        table.round(now)
    results = [table.known[row] for row in rows if row in table.known]
    print("\n".join(["", HEAD, "|" + "---|" * (HEAD.count("|") - 1), *map(line, results)]))
    if todo:
        print(f"Not begun within {args.total:.0f} s: {len(todo)} of {len(rows)} rows.")


if __name__ == "__main__":
    main()
