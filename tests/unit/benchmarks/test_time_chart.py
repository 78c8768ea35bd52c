"""Bars of times, in either form."""

import struct
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from compare.time_chart import draw

ROWS = [
    {"peer": "floor", "title": "one device", "ms": 10.0},
    {"peer": "zero3_compile", "title": "zero3_compile", "ms": 20.0},
    {"peer": "ddp", "title": "DDP <compiled>", "ms": 40.0},
    {"peer": "fsdp", "title": "FSDP", "failed": "needs GPUs"},
]
SVG = "{http://www.w3.org/2000/svg}"


def test_an_svg_is_drawn_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compare.time_chart.find_spec", lambda name: None)
    path = draw(ROWS, "a & b", tmp_path)
    assert path == tmp_path / "chart.svg"
    root = ET.fromstring(path.read_text())
    widths = [float(rect.attrib["width"]) for rect in root.iter(f"{SVG}rect") if rect.attrib["width"] != "100%"]
    assert len(widths) == 2, "a row without a time has no bar, and the floor is a line"
    assert widths[1] == pytest.approx(2 * widths[0], rel=1e-2)
    [line] = root.iter(f"{SVG}line")
    left = next(float(rect.attrib["x"]) for rect in root.iter(f"{SVG}rect") if "x" in rect.attrib)
    assert float(line.attrib["x1"]) - left == pytest.approx(widths[0] / 2, abs=0.2)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a & b", "DDP <compiled>", "20.0", "40.0"} <= set(texts)


def test_a_png_where_matplotlib_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = draw(ROWS, "a $ b", tmp_path)
    assert path == tmp_path / "chart.png"
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert width > height > 100


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert draw([ROWS[-1]], "", tmp_path) is None
    assert list(tmp_path.iterdir()) == []
