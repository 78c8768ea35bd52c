"""The documentation as a site.

It builds without warnings, its links lead somewhere, and browsers show its pages.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import lightning_zero
from tests.helpers.browser import find_browser, look_at

REPO = Path(__file__).parents[2]
DOCS = REPO / "examples" / "docs"

pytestmark = pytest.mark.exhaustive


class Links(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        self.links += [found[name] for name in ("href", "src") if name in found]


def broken_links(site: Path, pages: list[Path]) -> Iterator[str]:
    """Links of these pages that lead to no file of the site, or to no anchor of it."""
    parsed = {page: Links(page) for page in site.rglob("*.html")}
    for page in pages:
        for link in parsed[page].links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.exists():
                yield f"{page.relative_to(site)}: {link}: no such file"
            elif parts.fragment and target in parsed and unquote(parts.fragment) not in parsed[target].anchors:
                yield f"{page.relative_to(site)}: {link}: no such anchor"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of the site, and the output of mkdocs."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e .[docs]")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install -e .[docs]")
    site = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    ran = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return site, ran.stderr


def pages_of(site: Path) -> list[Path]:
    """The pages that are made of those of examples/docs."""
    return [site / source.relative_to(DOCS).with_suffix(".html") for source in sorted(DOCS.rglob("*.md"))]


def test_the_site_builds_without_warnings_and_has_all_pages(built: tuple[Path, str]) -> None:
    site, said = built
    assert not re.findall(r"^(?:WARNING|ERROR).*", said, re.M)
    # mkdocs makes index.html of a README.md.
    missing = [page for page in pages_of(site) if not page.exists() and page.stem != "README"]
    assert not missing


def test_links_lead_somewhere(built: tuple[Path, str]) -> None:
    site, _ = built
    assert not list(broken_links(site, [page for page in pages_of(site) if page.exists()]))


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html">b</a><a href="#x">x</a><img src="c.png"><a href="d.html#y">y</a>'
    )
    (tmp_path / "d.html").write_text('<h1 id="z">')
    found = list(broken_links(tmp_path, [tmp_path / "a.html"]))
    assert [line.split(": ")[1] for line in found] == ["b.html", "#x", "c.png", "d.html#y"]


def test_the_api_pages_show_all_public_names_with_their_options(built: tuple[Path, str]) -> None:
    site, _ = built
    shown = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    for name in lightning_zero.__all__:
        assert name.startswith("_") or f'id="lightning_zero.{name}"' in shown, name
    strategies = (site / "api" / "strategies.html").read_text()
    for option in ("reshard_after_forward", "activation_memory_budget", "unsharded_cache_mb"):
        assert f"<b>{option}</b>" in strategies or f"<code>{option}</code>" in strategies, option
    assert ":class:" not in shown
    assert "::</p>" not in shown


def test_a_browser_shows_each_page_with_its_headings(built: tuple[Path, str], tmp_path: Path) -> None:
    find_browser()
    site, _ = built
    faults = {}
    for page in (page for page in pages_of(site) if page.exists()):
        looked = look_at(page, tmp_path)
        assert looked.headings, page
        assert looked.texts > 10, page
        if looked.errors or looked.faults:
            faults[str(page.relative_to(site))] = looked.errors + looked.faults[:5]
    assert not faults
