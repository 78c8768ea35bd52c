"""A picture of a run's losses."""

import csv
from pathlib import Path


def draw_losses(metrics: Path, picture: Path) -> None:
    """Of the columns train_loss and val_loss that CSVLogger wrote."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, style in (("train_loss", "-"), ("val_loss", "o")):
        points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
