"""Test the command line: calls, arguments and exit status."""

from argparse import Namespace

import pytest

from lightning_zero.cli.command import Command, UsageError
from lightning_zero.cli.main import COMMANDS, main
from lightning_zero.errors import NativeBuildError
from lightning_zero.version import __version__


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
    assert "the following arguments are required: command" in capsys.readouterr().err


def test_errors_that_users_can_fix_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def run(arguments: Namespace) -> int:
        raise NativeBuildError("there is no compiler")

    assert main(["look"], [Command("look", "Looks.", lambda parser: None, run)]) == 1
    assert capsys.readouterr().err == "NativeBuildError: there is no compiler\n"


def test_a_wrong_value_that_the_command_detects_names_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    def run(arguments: Namespace) -> int:
        raise UsageError("argument --far: 7 is too far")

    assert main(["look"], [Command("look", "Looks.", lambda parser: None, run)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: argument --far: 7 is too far",
        "For the arguments, run: lightning-zero look --help",
    ]


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"lightning_zero {__version__}\n"
