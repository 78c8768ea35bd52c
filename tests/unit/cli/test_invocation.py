"""Test that help and wrong arguments import neither torch nor Lightning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_zero
from lightning_zero.cli.invocation import is_command_line, program_name

REPO = Path(lightning_zero.__file__).parents[1]
LINES = ["--help", "--version", "doctor --help", "build --help", "plan --help", "checkpoint --help"]
LINES += [f"checkpoint {action} --help" for action in ("inspect", "verify", "consolidate", "export")]
LINES += ["", "trane", "plan", "plan 9b", "plan tiny --ranks 0", "build --timeout x"]
# Runs each line in one process, as the console script does, and prints its status and the heavy packages so far.
PROGRAM = """
import contextlib, io, sys
sys.argv[0] = "/somewhere/bin/lightning-zero"
from lightning_zero.cli.main import main
for line in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            status = main(line.split())
        except SystemExit as end:
            status = end.code
    print(status, *sorted({"torch", "lightning", "numpy", "rich"} & sys.modules.keys()))
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=True, timeout=180
    )


def test_help_and_wrong_arguments_import_neither_torch_nor_lightning() -> None:
    expected = ["0" if line.endswith(("--help", "--version")) else "2" for line in LINES]
    assert run("-c", PROGRAM, *LINES).stdout.splitlines() == expected, "a status, and then the packages"


def test_the_module_imports_neither_torch_nor_lightning_for_help() -> None:
    imported = run("-X", "importtime", "-m", "lightning_zero", "plan", "--help")
    names = {line.rpartition("|")[2].strip() for line in imported.stderr.splitlines()}
    assert "lightning_zero.cli.main" in names
    assert not names & {"torch", "lightning", "numpy", "rich"}
    assert "  python -m lightning_zero plan 1b --ranks 2" in imported.stdout


def test_names_of_the_package_are_imported_on_demand_by_a_command() -> None:
    program = (
        "import sys; sys.argv = ['lightning-zero']; import lightning_zero; assert 'torch' not in sys.modules; "
        "print(lightning_zero.UnsupportedError.__name__, hasattr(lightning_zero, 'absent')); "
        "from lightning.pytorch.strategies import StrategyRegistry; print('zero3_compile' in StrategyRegistry)"
    )
    assert run("-c", program).stdout.split() == ["UnsupportedError", "False", "True"]


@pytest.mark.parametrize(
    ("arguments", "original", "expected"),
    [
        (["/opt/venv/bin/lightning-zero", "plan"], ["python", "/opt/venv/bin/lightning-zero", "plan"], True),
        (["-m", "--help"], ["python", "-m", "lightning_zero", "--help"], True),
        (["-m"], ["python", "-X", "dev", "-m", "lightning_zero"], True),
        (["-m"], ["python", "-mlightning_zero"], True),
        (["-m", "lightning_zero"], ["python", "-m", "pytest", "lightning_zero"], False),
        (["train.py", "-m", "lightning_zero"], ["python", "train.py", "-m", "lightning_zero"], False),
        (["-c"], ["python", "-c", "import lightning_zero"], False),
        ([""], ["python"], False),
        ([], [], False),
    ],
)
def test_only_the_program_itself_imports_on_demand(arguments: list[str], original: list[str], expected: bool) -> None:
    assert is_command_line(arguments, original) is expected


def test_a_program_of_the_user_may_have_the_same_name(tmp_path: Path) -> None:
    folder, script = tmp_path / "lightning-zero", tmp_path / "bin" / "lightning-zero"
    folder.mkdir()
    script.parent.mkdir()
    (folder / "__main__.py").write_text("import lightning_zero")
    assert not is_command_line([str(folder)], ["python", str(folder)])
    script.write_text("import lightning_zero\nlightning_zero.plan()\n")
    assert not is_command_line([str(script)], ["python", str(script)])
    script.write_text("#!python\nfrom lightning_zero.cli.main import main\nmain()\n")
    assert is_command_line([str(script)], ["python", str(script)])


def test_usage_names_the_program_as_it_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/lightning_zero/__main__.py", "plan"])
    assert program_name() == "python -m lightning_zero"
    monkeypatch.setattr(sys, "argv", ["/x/bin/lightning-zero"])
    assert program_name() == "lightning-zero"
