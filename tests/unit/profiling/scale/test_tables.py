"""The tables of examples/benchmarks/scale_model.py: what was measured is met as nearly as the dated file says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[4] / "examples" / "benchmarks" / "scale_model.py"


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    runpy.run_path(str(SCRIPT))["main"](list(arguments))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_model_is_below_what_was_measured_by_at_most_a_sixth(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--measured")
    assert [row[0] for row in found] == ["1.36B, 2x2048", "1.36B, 1x512", "1.36B, 4 accumulated 1x1024", "6.7B, 1x2048"]
    for row in found:
        assert -17 < int(row[3].strip("%")) <= 0
        assert 0.85 < float(row[5]) / float(row[4]) <= 1


def test_there_is_a_row_for_each_model_and_number_of_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--tokens", "4096")
    assert [row[:2] for row in found] == [
        [name, hosts] for name in ("8B", "70B", "405B") for hosts in ("8", "64", "512")
    ]
    assert [row[-1].split()[0] for row in found] == ["host"] * 6 + ["nothing", "all", "all"]


def test_where_the_network_is_slow_the_copy_on_each_host_pays(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--tokens", "1024", "--across", "12.5")
    assert [row[-1].split()[0] for row in found] == ["host"] * 6 + ["nothing", "all", "all"]


def test_bytes_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    for row in rows(capsys, "--roles"):
        *parts, whole = map(float, row[3:])
        assert sum(parts) == pytest.approx(whole, abs=0.35)
