"""Draws chart.png, the README's picture, of chart.json: what the files of this folder have measured.

    python examples/benchmarks/chart.py

Each bar in chart.json names the file that it was copied from, and a test looks its numbers up there. The bars of a row
are of one run, but for those whose name ends in a star: another machine of the kind, another day. Their length is time
over that of the row's first bar.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first)

HERE = Path(__file__).parent
OWN = "#4477aa"
OTHERS = {"FSDP": "#bbbbbb", "DDP": "#bbbbbb", "DeepSpeed": "#ddcc77", "one GPU alone": "#eebbaa"}
BAR, GAP, HEAD = 1.0, 0.55, 0.85  # of bars, between rows, and for a row's name


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    count = sum(len(row["bars"]) for row in rows)
    figure, axes = plt.subplots(figsize=(10, 0.6 + 0.235 * (count + len(rows) * (GAP + HEAD))), layout="constrained")
    y = 0.0
    for row in rows:
        unit = row["bars"][0]["ms"]
        axes.text(0, y + 0.1, row["label"], fontsize=8.5, fontweight="bold", va="center")
        y += HEAD
        for bar in row["bars"]:
            length = bar["ms"] / unit
            colour = next((known for name, known in OTHERS.items() if bar["who"].startswith(name)), OWN)
            axes.barh(y, length, 0.86 * BAR, color=colour)
            memory = f", {bar['gib']:g} GiB" if "gib" in bar else ""
            axes.text(length + 0.03, y, f"{bar['ms']:g} ms{memory}", fontsize=8, va="center")
            axes.text(0.03, y, bar["who"], fontsize=8, va="center", color="white" if colour == OWN else "black")
            y += BAR
        y += GAP
    axes.set(xlim=(0, 6.6), ylim=(y - GAP - 0.4, -0.6), yticks=[], xlabel="time over that of zero3_compile")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_size(8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads((HERE / "chart.json").read_text()), HERE / "chart.png")
