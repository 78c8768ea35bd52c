"""Sets runs of train_gpt.py side by side: one picture of their losses, one Markdown table of their speed.

    python examples/benchmarks/compare_runs.py runs/ddp runs/zero3 --out runs/comparison

reads metrics.csv and run.json in each folder and writes runs/comparison.png and runs/comparison.md. The first run is
the one that the others are measured against.
"""

import argparse
import csv
import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first)


@dataclass(frozen=True)
class Run:
    label: str
    info: dict
    train: dict[int, float]
    validation: dict[int, float]


def read_column(rows: list[dict[str, str]], name: str) -> dict[int, float]:
    return {int(row["step"]): float(row[name]) for row in rows if row.get(name)}


def read_run(folder: Path) -> Run:
    for name in ("metrics.csv", "run.json"):
        if not (folder / name).is_file():
            raise SystemExit(f"{folder} has no {name}. Give the --out folder of a finished run of train_gpt.py.")
    info = json.loads((folder / "run.json").read_text())
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    count = info["processes"]
    label = f"{folder.name}: {info['arguments']['strategy']}, {count} process{'es' if count > 1 else ''}"
    return Run(label, info, read_column(rows, "train_loss"), read_column(rows, "val_loss"))


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred mean over about a twentieth of the run; the window shrinks at the ends instead of inventing values."""
    half = max(1, len(values) // 40)
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def differences(run: Run, reference: Run) -> tuple[np.ndarray, np.ndarray]:
    """The steps that both runs logged, and this run's train loss minus the reference's there."""
    steps = np.array(sorted(run.train.keys() & reference.train.keys()), dtype=int)
    return steps, np.array([run.train[s] - reference.train[s] for s in steps])


def draw(runs: list[Run], path: Path, title: str) -> None:
    figure, (losses, gaps) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 1), layout="constrained")
    dashes = ["-", "--", "-.", ":"]  # so that curves which coincide can all be seen
    for index, run in enumerate(runs):
        colour, dash = f"C{index}", dashes[index % len(dashes)]
        steps, values = np.array(list(run.train)), np.array(list(run.train.values()))
        losses.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        losses.plot(steps, smooth(values), color=colour, linestyle=dash, label=run.label)
        if run.validation:
            points = list(run.validation), list(run.validation.values())
            losses.plot(*points, color=colour, linestyle="none", marker="ox+D"[index % 4], fillstyle="none")
        if index:
            steps, gap = differences(run, runs[0])
            gaps.plot(steps, gap, color=colour, linewidth=1)
    losses.set(ylabel="loss (nats per byte)", title=title)
    losses.plot([], [], color="grey", linestyle="none", marker="o", fillstyle="none", label="validation")
    losses.legend()
    gaps.axhline(0, color="C0", linewidth=0.5)
    gaps.set(xlabel="step", ylabel=f"train loss minus\n{runs[0].label.split(':')[0]}")
    gaps.xaxis.get_major_locator().set_params(integer=True)
    for axes in (losses, gaps):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(runs: list[Run]) -> list[str]:
    header = ["run", "ms per step", "ratio", "first step, s", "peak GiB", "wall, s", "train loss", "val loss"]
    header += ["max abs. difference", "mean abs. difference"]
    lines = [row(*header), row("---", *["---:"] * (len(header) - 1))]
    for run in runs:
        info, final = run.info, run.info["final"]
        gap = np.abs(differences(run, runs[0])[1])
        if run is runs[0]:
            gap_cells = ["", ""]
        else:
            gap_cells = [f"{gap.max():.2e}", f"{gap.mean():.2e}"] if len(gap) else ["no common step", ""]
        lines.append(
            row(
                run.label,
                f"{1000 * info['median_step_s']:.1f}",
                f"{info['median_step_s'] / runs[0].info['median_step_s']:.3f}",
                f"{info['first_step_s']:.1f}",
                "" if info["peak_gib"] is None else f"{info['peak_gib']:.2f}",
                f"{info['wall_s']:.0f}",
                *(f"{final[name]:.4f}" if name in final else "" for name in ("train_loss", "val_loss")),
                *gap_cells,
            )
        )
    return lines


def environment(run: Run) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.info["versions"].items())
    return f"{run.info['device']} ({versions})"


def write_report(runs: list[Run], path: Path, picture: Path, title: str) -> None:
    lines = [f"# {title}", "", f"![losses]({picture.name})", "", *table(runs), ""]
    lines += ["ms per step: median over the last half of the steps. Ratio and differences: against the first run, the"]
    lines += ["differences over the train losses of all steps that both logged.", ""]
    lines += [f"Measured on {place}." for place in sorted({environment(run) for run in runs})]
    lines += ["", "```", *(run.info["command"] for run in runs), "```"]
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="output folders of train_gpt.py, the reference first")
    parser.add_argument("--out", default=Path("runs/comparison"), type=Path, help="where to write, without a suffix")
    parser.add_argument("--title", default="Training runs compared")
    args = parser.parse_args()
    if len(args.runs) < 2:
        parser.error("give at least two runs to compare")
    runs = [read_run(folder) for folder in args.runs]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    picture, report = (args.out.parent / f"{args.out.name}{suffix}" for suffix in (".png", ".md"))
    draw(runs, picture, args.title)
    write_report(runs, report, picture, args.title)
    print(report.read_text())
    print(f"written: {picture}, {report}")


if __name__ == "__main__":
    main()
