"""Write the pictures of examples/docs/images/ with a headless Chromium.

``python -m tests.helpers.screenshots REPORT SITE`` takes the ``report.html`` of a training with ``PlanReport``, and the
folder that ``python -m mkdocs build --site-dir SITE`` has made.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers.browser import DEADLINE_S, NAMES, installed_browser

IMAGES = Path(__file__).parents[2] / "examples" / "docs" / "images"
WIDTH, HEIGHT = 1000, 760  # pixels
PAGES = {"docs-index.png": "index.html", "docs-recipe.png": "recipes/out_of_memory.html"}  # picture: page of the site
MOST_BYTES = 150_000  # of a picture, so that clones stay small


def capture(browser: str, page: Path, picture: Path) -> None:
    """Write the upper part of a page as PNG.

    Raises:
        ValueError: The browser wrote no picture, or one that is too large for the repository.
    """
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}"]
        command += ["--virtual-time-budget=3000", page.resolve().as_uri()]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if not picture.is_file():
        raise ValueError(f"{browser} wrote no picture of {page}: {ran.stderr[-1000:]}")
    if picture.stat().st_size > MOST_BYTES:
        raise ValueError(f"{picture} has {picture.stat().st_size} bytes, more than {MOST_BYTES}. Lower HEIGHT.")


def pages(report: Path, site: Path) -> Mapping[str, Path]:
    """Return the page of each picture."""
    return {"report.png": report} | {picture: site / page for picture, page in PAGES.items()}


def main(arguments: Sequence[str]) -> int:
    """Write the pictures, and return the exit status."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    browser = installed_browser()
    if browser is None:
        print(f"No browser: install one of {', '.join(NAMES)}.", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    for picture, page in pages(*map(Path, arguments)).items():
        capture(browser, page, IMAGES / picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
