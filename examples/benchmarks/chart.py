"""Draw chart.png, the README's picture, from chart.json.

    python examples/benchmarks/chart.py

chart.json names the table in this folder that its numbers are from, and a test looks each number up there.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first)

HERE = Path(__file__).parent
# Blue and greys differ in lightness too, for eyes that do not tell red from green, and in print.
COLOURS = {"zero3_compile": "#0b559f", "FSDP2 in a CUDA graph": "#9aa5b1", "FSDP2 + torch.compile": "#cfd6dd"}
PANELS = {"ms": "Time per training step, ms", "gib": "Memory of each GPU, GiB"}
GROUP_GAP = 1.1  # in bars, for the model's name


def draw(chart: dict[str, Any], path: Path) -> None:
    """Draw one panel for the time and one for the memory. Both have a group of bars for each model."""
    figure, panels = plt.subplots(1, len(PANELS), figsize=(9, 3.3), layout="constrained", sharey=True)
    for axes, (unit, title) in zip(panels, PANELS.items(), strict=True):
        y, ticks = 0.0, []
        longest = max(bar[unit] for group in chart["groups"] for bar in group["bars"])
        for group in chart["groups"]:
            if axes is panels[0]:
                axes.text(-0.02, y, group["model"], fontsize=9.5, weight="bold", ha="right", va="center",
                          transform=axes.get_yaxis_transform())  # fmt: skip
            y += 1
            for bar in group["bars"]:
                own = bar["who"] == "zero3_compile"
                axes.barh(y, bar[unit], 0.8, color=COLOURS[bar["who"]])
                axes.text(bar[unit] + 0.015 * longest, y, f"{bar[unit]:.1f}", fontsize=9.5, va="center",
                          weight="bold" if own else "normal")  # fmt: skip
                ticks.append((y, bar["who"]))
                y += 1
            y += GROUP_GAP - 1
        axes.set_title(title, fontsize=10.5, loc="left")
        axes.set(xlim=(0, 1.13 * longest), ylim=(y - GROUP_GAP + 0.6, -0.6))
        axes.set_yticks([place for place, _ in ticks], [who for _, who in ticks], fontsize=9.5)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8.5)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(chart["machine"], fontsize=8.5, color="#444444")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads((HERE / "chart.json").read_text()), HERE / "chart.png")
