"""GPUs of one machine as several hosts, with networks between them as fast as NVLink and slower, with a copy of the
weights on each host and without (which, on hosts of one GPU, is flat ZeRO-3): one training by `step_time.py` for each,
a JSON line for each, and a table.

    python examples/benchmarks/hosts.py --devices 2 --ranks-per-host 1 --across 50 12.5 -- --batch 2 --length 2048

What stands behind `--` goes to `step_time.py`. A network is emulated: what crosses hosts arrives no sooner than at so
many GB/s for each GPU (`Tuning(emulate_cross_host_gb_per_s=...)`).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

STEP_TIME = Path(__file__).with_name("step_time.py")
COPIES = {"host": "a copy on each host", "all": "no copies"}


def measured(rest: list[str], devices: int, **tuning: Any) -> dict[str, Any] | None:
    """What step_time.py prints; None where it fails."""
    options = [f"--option=tuning.{name}={json.dumps(value)}" for name, value in tuning.items() if value is not None]
    command = [sys.executable, str(STEP_TIME), f"--devices={devices}", *options, *rest]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"failed ({done.returncode}): {' '.join(command)}", file=sys.stderr, flush=True)
        return None
    print(lines[-1], flush=True)
    return json.loads(lines[-1])


def cell(found: dict[str, Any] | None) -> str:
    return "failed" if found is None else f"{found['ms']} ms ({found['peak_gib']} GiB)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--across", type=float, nargs="*", default=[50, 12.5], help="GB/s, besides no limit")
    parser.add_argument("--copies", nargs="*", default=list(COPIES), choices=COPIES)
    parser.add_argument("--one-host", action="store_true", help="measure that, too")
    own = sys.argv[1:]
    split = own.index("--") if "--" in own else len(own)
    arguments, rest = parser.parse_args(own[:split]), own[split + 1 :]
    rows = [("across hosts", *(COPIES[copies] for copies in arguments.copies))]
    if arguments.one_host:
        found = cell(measured(rest, arguments.devices))
        rows.append(("one host", *(found for _ in arguments.copies)))
    for limit in (None, *arguments.across):
        cells = []
        for copies in arguments.copies:
            chosen = {"compute_shard_group": copies, "emulate_cross_host_gb_per_s": limit}
            cells.append(cell(measured(rest, arguments.devices, ranks_per_host=arguments.ranks_per_host, **chosen)))
        rows.append((f"{limit:g} GB/s" if limit else "as it is", *cells))
    rows.insert(1, ("---",) * len(rows[0]))
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))


if __name__ == "__main__":
    main()
