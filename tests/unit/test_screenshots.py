"""Pictures of the documentation: small, shown on a page, and made by a script."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.helpers import screenshots
from tests.helpers.browser import find_browser
from tests.helpers.readme import pages
from tests.helpers.screenshots import HEIGHT, IMAGES, MOST_BYTES, WIDTH, capture, main


def test_each_picture_is_made_by_the_script_is_small_and_is_shown_on_a_page() -> None:
    made = screenshots.pages(Path("report.html"), Path("site"))
    assert {picture.name for picture in IMAGES.iterdir()} == set(made)
    text = "".join(page.read_text() for page in pages())
    for name in made:
        assert (IMAGES / name).stat().st_size <= MOST_BYTES
        assert f"images/{name})" in text


def test_pages_of_the_site_are_those_of_the_documentation() -> None:
    sources = {page.relative_to(IMAGES.parent).with_suffix(".html").as_posix() for page in pages()[1:]}
    assert set(screenshots.PAGES.values()) <= sources


def test_the_script_names_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([]) == 2
    monkeypatch.setattr(screenshots, "installed_browser", lambda: None)
    assert main(["report.html", "site"]) == 1
    assert "No browser: install one of chromium" in capsys.readouterr().err


@pytest.mark.exhaustive  # a browser takes seconds to start
def test_a_page_is_captured(tmp_path: Path) -> None:
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    page.write_text("<h1>A page</h1>")
    capture(find_browser(), page, picture)
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (WIDTH, HEIGHT)
