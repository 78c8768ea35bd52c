"""``checkpoint verify``: whether checkpoints are what was saved."""

from __future__ import annotations

import json
from argparse import Namespace

from lightning_zero.cli.checkpoint.found import Found, checkpoints_in
from lightning_zero.cli.progress import progress_bar
from lightning_zero.cli.show import show_table
from lightning_zero.errors import CheckpointError

__all__ = ["verify"]


def verify(arguments: Namespace) -> int:
    """Compares each checkpoint at a path with its checksums; 1 where one is damaged."""
    rows = []
    for path in checkpoints_in(arguments.path):
        try:
            found = Found(path)
            with progress_bar(path, sum(found.sizes().values())) as read:
                rows.append({"path": path, "good": True, "why": f"compared: {found.check(read)}"})
        except (CheckpointError, OSError) as error:
            rows.append({"path": path, "good": False, "why": str(error)})
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        show_table("", ("", "", ""), [("ok" if row["good"] else "NOT GOOD", row["path"], row["why"]) for row in rows])  # type: ignore[misc]
    return 0 if all(row["good"] for row in rows) else 1
