"""Test the arguments and the help of the commands."""

import shlex
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_zero.cli.commands import COMMANDS, DEVICE_NAMES, DTYPES, PRECISIONS, parse_option
from lightning_zero.cli.main import build_parser, main
from lightning_zero.native.build import LOCK_DEADLINE_S
from lightning_zero.planning.fake_step import Precision
from lightning_zero.profiling.devices import DEVICES


def parsers(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


ALL = {parser.prog: parser for parser in parsers(build_parser(COMMANDS))}


@pytest.mark.parametrize("name", ALL)
def test_help_has_full_sentences_and_an_example(name: str) -> None:
    parser = ALL[name]
    assert "example" in (parser.epilog or "")
    assert parser.description
    assert parser.description.endswith(".")
    for action in parser._actions:
        if not isinstance(action, _SubParsersAction):
            assert action.help, action.dest
            text = action.help
            assert text[0].isupper(), text
            assert text.endswith("."), text
        else:
            assert all((choice.help or "").endswith(".") for choice in action._choices_actions)


@pytest.mark.parametrize("name", ALL)
def test_examples_are_command_lines_that_parse(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").touch()
    for line in (ALL[name].epilog or "").splitlines()[1:]:
        words = shlex.split(line.split("&&")[0].split(">")[0], comments=True)
        assert words[0] == "lightning-zero"
        if words[-1] == "--help":
            continue
        build_parser(COMMANDS).parse_args(words[1:])


def test_names_in_the_help_are_those_that_the_commands_take() -> None:
    assert tuple(device.name for device in DEVICES) == DEVICE_NAMES
    assert {Precision.of(name).name for name in PRECISIONS} == set(PRECISIONS)
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES)
    assert f"The default is {LOCK_DEADLINE_S:g}." in " ".join(ALL["lightning-zero build"].format_help().split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "plan 9b",
            "'9b' is none of tiny, 350m, 700m, 1b, 7b, 8b, llama8b, and not a file with a class. Write FILE.py:CLASS",
        ),
        ("plan absent.py:Module", "there is no file 'absent.py'"),
        ("plan tiny --ranks 0", "argument --ranks: '0' is not a whole number of at least 1"),
        ("plan tiny --ranks two", "argument --ranks: 'two' is not a whole number of at least 1"),
        ("plan tiny --device V100", "'V100' is none of H200"),
        ("plan tiny --precision bf16", "argument --precision: invalid choice: 'bf16' (choose from"),
        ("plan tiny --memory lots", "'lots' is neither a number of GiB above 0 nor 'auto'. Write --memory 40"),
        ("plan tiny --option stage", "'stage' is not NAME=VALUE with a value in JSON. Write stage=2"),
        ("doctor --timeout -3", "argument --timeout: '-3' is not a number of seconds above 0"),
        ("checkpoint export x", "the following arguments are required: --output"),
        ("checkpoint show x", "invalid choice: 'show'"),
        ("trane", "invalid choice: 'trane'"),
    ],
)
def test_a_wrong_argument_ends_with_status_2_and_names_the_help(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    shown = capsys.readouterr()
    error, hint = shown.err.splitlines()
    assert words in error
    assert hint.startswith("For the arguments, run: lightning-zero ")
    assert hint.endswith(" --help")
    assert not shown.out


def test_a_gpu_is_found_in_any_case() -> None:
    arguments = build_parser(COMMANDS).parse_args(["plan", "tiny", "--device", "rtx 4090"])
    assert arguments.device == "RTX-4090"


def test_json_may_come_before_or_after_an_action() -> None:
    for line in ("checkpoint --json inspect x", "checkpoint inspect x --json"):
        assert build_parser(COMMANDS).parse_args(line.split()).json is True
    assert build_parser(COMMANDS).parse_args(["checkpoint", "inspect", "x"]).json is False


def test_options_have_values_in_json() -> None:
    assert parse_option("stage=2") == ("stage", 2)
    assert parse_option('reduce_dtype="32"') == ("reduce_dtype", "32")
    for text in ("stage", "=2", "reduce_dtype=32-true"):
        with pytest.raises(ValueError, match="is not NAME=VALUE"):
            parse_option(text)
