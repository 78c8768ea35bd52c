"""``plan`` on a machine without a GPU: of built-in models and of users' own."""

import json
from pathlib import Path

import pytest
import torch

from lightning_zero.cli.main import main
from lightning_zero.cli.status_line import StatusLine

SCRIPT = """
import lightning as L, torch

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(40, 30)
        {more}

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""
DATA = """
    def train_dataloader(self):
        return [torch.randn(8, 40)]
"""


def test_of_an_own_module_bytes_are_those_of_its_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text("print('Importing.')\n" + SCRIPT.format(more="print('Building.')") + DATA)
    command = ["plan", f"{tmp_path / 'own.py'}:Module", "--ranks", "2", "--device", "h100"]
    assert main([*command, "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert "Importing.\n" in shown.err
    assert "Building.\n" in shown.err
    assert (found["parameters"], found["ranks"], found["device"], found["fits"]) == (40 * 30 + 30, 2, "H100", True)
    assert found["bytes"]["master_shard"] >= (40 * 30 + 30) * 4 / 2
    assert found["bytes"]["optimizer_state"] >= 2 * found["bytes"]["master_shard"]
    assert found["not_traced"] == ""
    assert found["seconds"]["total"] > 0
    assert main([*command, "--option", "stage=2"]) == 0
    text = capsys.readouterr().out
    assert "Estimate for 1,230 parameters on each of 2 H100" in text
    assert "The training fits" in text
    assert " MiB  " in text


def test_what_cannot_be_planned_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.py"
    own.write_text(SCRIPT.format(more=""))
    assert main(["plan", f"{own}:Module"]) == 1
    assert "has to give a batch by its train_dataloader()" in capsys.readouterr().err
    own.write_text(SCRIPT.format(more="self.known = self.net.weight.sum().item()") + DATA)
    assert main(["plan", f"{own}:Module"]) == 0
    assert "Module cannot be built on the meta device" in capsys.readouterr().err
    assert main(["plan", f"{own}:Other"]) == 1
    assert "has no LightningModule called 'Other'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("stagee=2", "no option 'stagee'. Did you mean stage"),
        ("tuning.x=2", "Tuning has no option 'x'"),
        ("stage=7", "stage=7 must be 1, 2 or 3"),
    ],
)
def test_a_wrong_option_is_an_error_of_the_command_line(
    option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "tiny", "--option", option]) == 2
    shown = capsys.readouterr()
    assert "error: argument --option: " in shown.err
    assert words in shown.err
    assert not shown.out


def test_the_parts_of_the_work_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT.format(more="") + DATA)
    seen: list[str] = []
    monkeypatch.setattr(StatusLine, "update", lambda self, text: seen.append(text))
    assert main(["plan", f"{tmp_path / 'own.py'}:Module"]) == 0
    assert seen == [
        "importing torch and Lightning",
        "building the model",
        "tracing and partitioning the compiled step",
        "tracing the first step, which is not compiled",
    ]


def test_what_does_not_fit_ends_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(SCRIPT.format(more="self.large = torch.nn.Linear(100_000, 100_000)") + DATA)
    assert main(["plan", f"{tmp_path / 'own.py'}:Module", "--device", "L4", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


READS = """
class Reads(torch.nn.Linear):
    def forward(self, x):
        mask = torch.ones(len(x))
        if not torch.compiler.is_compiling() and not isinstance(mask, torch._subclasses.FakeTensor) and mask.all():
            raise AssertionError("the plan is of code that is not compiled")
        return super().forward(x)
"""


def test_code_that_reads_values_unless_it_is_compiled_is_planned_as_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers does with masks."""
    text = SCRIPT.format(more="self.net = Reads(40, 30)").replace("class Module", f"{READS}\nclass Module") + DATA
    (tmp_path / "own.py").write_text(text)
    assert main(["plan", f"{tmp_path / 'own.py'}:Module", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_traced"] == ""
    assert not torch.compiler.is_compiling()
