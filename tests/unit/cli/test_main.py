"""Test the command line: calls, arguments and exit status."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from lightning_zero.cli.command import Command
from lightning_zero.cli.main import COMMANDS, main
from lightning_zero.errors import NativeBuildError


def test_a_command_plugs_in_by_standing_in_the_list() -> None:
    seen: list[Namespace] = []

    def run(arguments: Namespace) -> int:
        seen.append(arguments)
        return 3

    command = Command("look", "Looks.", lambda parser: parser.add_argument("--far", type=int), run)
    assert main(["look", "--far", "2", "--json"], [command]) == 3
    assert (seen[0].far, seen[0].json) == (2, True)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_explains_itself(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command.name, "--help"])
    shown = capsys.readouterr().out
    assert command.summary.split()[0] in shown
    assert "--json" in shown


def test_without_a_command_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "COMMAND" in capsys.readouterr().err


def test_errors_that_users_can_fix_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def run(arguments: Namespace) -> int:
        raise NativeBuildError("there is no compiler")

    assert main(["look"], [Command("look", "Looks.", lambda parser: None, run)]) == 1
    assert capsys.readouterr().err == "NativeBuildError: there is no compiler\n"


def test_build_prints_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def build(cache: Path | None, deadline_s: float, report: object) -> Path:
        asked.append((cache, deadline_s))
        return tmp_path / "lightning_zero.so"

    monkeypatch.setattr("lightning_zero.cli.main.build", build)
    assert main(["build", "--cache", str(tmp_path), "--deadline", "7"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'lightning_zero.so'}\n"
    assert main(["build", "--cache", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(tmp_path / "lightning_zero.so")
    assert found["was_built_before"] is False
    assert asked[0] == (tmp_path, 7.0)
