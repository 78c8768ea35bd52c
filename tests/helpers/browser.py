"""Opens pages in a headless Chromium, where one is installed, and finds faults in how they are laid out."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DEADLINE_S = 90

# Collects errors of scripts and of files that do not load, before anything else runs.
WATCH = """<script>
window.__errors = [];
window.addEventListener("error", e => window.__errors.push(
  e.message || "does not load: " + (e.target.src || e.target.href)), true);
const __error = console.error;
console.error = (...words) => { window.__errors.push(words.join(" ")); __error(...words); };
</script>"""

# Unfolds everything; then compares the rectangles of all texts with each other, with their boxes and with the window.
LOOK = """<script>
window.addEventListener("load", () => setTimeout(() => {
  document.querySelectorAll("details").forEach(one => one.open = true);
  const texts = [], faults = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, parent = node.parentElement;
    if (!node.data.trim() || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(parent.tagName)) continue;
    if (!parent.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects())
      if (rect.width > 1 && rect.height > 1) texts.push({node, rect, parent});
  }
  const words = one => one.node.data.trim().slice(0, 40);
  for (const one of texts) {
    const scrolls = one.parent.closest("pre, nav, .navbar");
    if (!scrolls && (one.rect.right > innerWidth + 1 || one.rect.left < -1)) faults.push("outside: " + words(one));
    const box = one.parent.closest("td, th, section, li, p, h1, h2, h3, dd, dt, summary");
    if (box && !scrolls && one.rect.right > box.getBoundingClientRect().right + 1)
      faults.push("overflows its " + box.tagName + ": " + words(one));
  }
  texts.sort((a, b) => a.rect.top - b.rect.top);
  for (let i = 0; i < texts.length; i++)
    for (let j = i + 1; j < texts.length && texts[j].rect.top < texts[i].rect.bottom; j++) {
      const a = texts[i].rect, b = texts[j].rect;
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (texts[i].node !== texts[j].node && wide > 2 && high > 0.4 * Math.min(a.height, b.height))
        faults.push("overlap: " + words(texts[i]) + " | " + words(texts[j]));
    }
  if (document.documentElement.scrollWidth > innerWidth + 1) faults.push("the page is wider than the window");
  const result = document.createElement("pre");
  result.id = "looked";
  result.textContent = JSON.stringify({
    errors: window.__errors, faults, width: innerWidth, scale: devicePixelRatio, title: document.title,
    headings: [...document.querySelectorAll("h1, h2, h3")].map(one => one.textContent.trim()),
    texts: texts.length,
  });
  document.body.append(result);
}, 100));
</script>"""


@dataclass(frozen=True)
class Looked:
    """The appearance of a page: ``errors`` of the console and of loading, ``faults`` of its layout."""

    errors: list[str]
    faults: list[str]
    width: int
    scale: float
    title: str
    headings: list[str]
    texts: int


def installed_browser() -> str | None:
    """Return the path of a Chromium, or None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def find_browser() -> str:
    """The path of a Chromium; skips the test where there is none."""
    found = installed_browser()
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    return found


def look_at(page: Path, folder: Path, width: int = 1280, scale: int = 1) -> Looked:
    """Opens a page, with all of it unfolded. ``folder`` takes the browser's files."""
    text = page.read_text()
    assert "<head>" in text
    assert "</body>" in text
    changed = page.with_name(f"looked_at_{page.name}")
    changed.write_text(text.replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{LOOK}</body>", 1))
    command = [find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    command += ["--enable-logging=stderr", "--allow-file-access-from-files", f"--user-data-dir={folder / 'browser'}"]
    command += [f"--window-size={width},900", f"--force-device-scale-factor={scale}", "--virtual-time-budget=3000"]
    try:
        ran = subprocess.run([*command, changed.as_uri()], capture_output=True, text=True, timeout=DEADLINE_S)
    finally:
        changed.unlink()
    found = re.search(r'<pre id="looked">(.*?)</pre>', ran.stdout, re.S)
    assert found is not None, ran.stderr[-2000:]
    looked: dict[str, Any] = json.loads(unescape(found[1]))
    said = re.findall(r':CONSOLE[^"]*"(.*?)", source', ran.stderr)
    looked["errors"] += [line for line in said if re.search("error|uncaught|failed|not allowed", line, re.I)]
    return Looked(**looked)
