"""Train the models of `architectures.py` under each strategy, each in a process of its own, and print one table.

    python examples/benchmarks/model_table.py --out FOLDER --models mixtral,t5 --jobs 2 --warm-start

Compile caches begin empty for each row. With `--jobs 2`, two processes start at the same time, which makes their starts
longer. Their steps are timed one after another. Options after `--` are those of `models.py`. FOLDER has the log of each
row, and `results.jsonl`. A later run with the same options does not repeat the rows of that file.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from architectures import ARCHITECTURES

FURTHER = ("small_gpt", "llama_checkpointed", "wrapped_parts", "qwen3_moe", "deepseek", "gpt_oss")
MODELS = [model for model in ARCHITECTURES if model not in FURTHER]  # one of each architecture
STRATEGIES = ("zero3_compile", "fsdp2", "ddp")
HEAD = (
    "| model | strategy | graphs | replayed | ms | 10 to 90 % | peak GiB | GiB of the device | cold s | warm s | loss |"
)

Result = dict[str, Any]


class Table:
    """Run rows, and keep their results in a file.

    Args:
        out: folder of the logs and results.
        more: options of `models.py`.
        limit_s: seconds after which a process is ended.
    """

    def __init__(self, out: Path, more: list[str], limit_s: float, warm_start: bool, keep: bool) -> None:
        self._out, self._more, self._limit_s, self._warm_start = out, more, limit_s, warm_start
        self._results = out / "results.jsonl"
        self._lock = Lock()
        self._known: dict[tuple[str, str], Result] = {}
        if keep and self._results.exists():
            lines = map(json.loads, self._results.read_text().splitlines())
            self._known = {(line["model"], line["strategy"]): line for line in lines if line["arguments"] == more}

    def row(self, model: str, strategy: str) -> Result:
        """Return the results of one model and strategy, from a cold start and then from a warm one."""
        if (model, strategy) in self._known:
            return self._known[model, strategy]
        cache = self._out / "caches" / f"{model}-{strategy}"
        shutil.rmtree(cache, ignore_errors=True)
        result = self._run(model, strategy, cache, "cold")
        if self._warm_start and "failed" not in result:
            warm = self._run(model, strategy, cache, "warm")
            result["warm_start_s"] = warm.get("start_s")
        shutil.rmtree(cache, ignore_errors=True)
        result |= {"arguments": self._more}
        with self._lock, self._results.open("a") as file:
            file.write(json.dumps(result) + "\n")
            print(line(result), flush=True)
        return result

    def _run(self, model: str, strategy: str, cache: Path, what: str) -> Result:
        log = self._out / f"{model}-{strategy}-{what}.log"
        command = [sys.executable, str(Path(__file__).with_name("models.py")), model, "--strategy", strategy]
        command += ["--devices", "1", "--turns", str(self._out / "turns"), *self._more]
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        begun, ended = time.monotonic(), ""
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | caches, start_new_session=True
            )
            try:
                status = process.wait(self._limit_s)
                ended = f"exit status {status}" if status else ""
            except subprocess.TimeoutExpired:
                ended = f"no result within {self._limit_s:.0f} s"
            finally:
                # its data workers and compilers are in its session
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = log.read_text(errors="replace")
        found = [text for text in text.splitlines() if text.startswith('{"model"')]
        total = {"total_s": round(time.monotonic() - begun, 1)}
        if found:
            return json.loads(found[-1]) | total
        last = next((text for text in reversed(text.splitlines()) if text.strip()), "")
        return {"model": model, "strategy": strategy, "failed": f"{ended}: {last[:200]}"} | total


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
    memory = f"{result['peak_gib']} | {result['device_gib']}"
    return f"{name} {graphs} | {replayed} | {result['ms']} | {deciles} | {memory} | {start} | {result['last_loss']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of logs and results")
    parser.add_argument("--models", default=",".join(MODELS), help="with commas, or all")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="with commas")
    parser.add_argument("--limit", type=float, default=150, metavar="SECONDS", help="of each process")
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
    table = Table(args.out, sys.argv[split + 1 :], args.limit, args.warm_start, not args.again)
    begun = time.monotonic()

    def run(row: tuple[str, str]) -> Result | None:
        return table.row(*row) if time.monotonic() - begun < args.total else None

    rows = [(model, strategy) for model in models for strategy in args.strategies.split(",")]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = [result for result in pool.map(run, rows) if result is not None]
    print("\n".join(["", HEAD, "|" + "---|" * (HEAD.count("|") - 1), *map(line, results)]))
    if len(results) < len(rows):
        print(f"Not begun within {args.total:.0f} s: {len(rows) - len(results)} of {len(rows)} rows.")


if __name__ == "__main__":
    main()
