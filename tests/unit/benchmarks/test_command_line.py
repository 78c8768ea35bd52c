"""The command line of the comparison, before anything trains."""

import json
from pathlib import Path
from typing import Any

import pytest

from compare.command_line import main


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the jobs that would run, in place of the given rows."""
    seen: list[Any] = []

    def compare(job: Any, names: Any, devices: Any, say: Any, known: Any, keep: Any) -> list[dict[str, Any]]:
        seen.extend((job, names, devices.ranks, known))
        return [
            {
                "peer": "zero3_compile",
                "title": "z",
                "ms": 2.0,
                "ratio": 1.0,
                "start_s": 1.0,
                "failed": "",
                "last_loss": 1.0,
            }
            | dict.fromkeys(("peak_gib", "reserved_gib", "device_gib")),
            {"peer": "ddp", "title": "d", "ratio": None, "failed": "x\nno memory"},
        ]

    monkeypatch.setattr("compare.command_line.compare", compare)
    monkeypatch.setattr("compare.command_line.build", lambda **options: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return seen


def test_the_smallest_model_on_two_ranks_is_what_a_cpu_gets(
    asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "a" / "b")]) == 0
    job, names, ranks, known = asked
    assert known == []
    assert (job.model, job.length, job.precision, ranks) == ("tiny", 128, "32-true", 2)
    assert {"floor", "zero3_compile", "ddp", "fsdp", "fsdp2", "fsdp2_graph", "deepspeed", "deepcompile"} == set(names)
    shown = capsys.readouterr().out
    assert "ddp: no memory" in shown
    assert "chart." in shown
    found = json.loads((tmp_path / "a" / "b" / "bench.json").read_text())
    assert found["rows"][1]["failed"] == "x\nno memory"
    assert len(list((tmp_path / "a" / "b").glob("chart.*"))) == 1


def test_json_is_all_that_is_printed(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "--only", "zero3_compile", "--option", "cuda_graphs=false", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["ms"] == 2.0
    assert asked[0].options == ("cuda_graphs=false",)
    assert asked[1] == ["zero3_compile"]


def test_what_is_resumed_must_be_the_same(asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = ["tiny", "--resume", "--out", str(tmp_path)]
    assert main(again) == 0
    assert asked[3] == []
    assert main(again) == 0
    assert [row["peer"] for row in asked[7]] == ["zero3_compile", "ddp"]
    assert main([*again, "--steps", "50"]) == 1
    assert "has another job" in capsys.readouterr().err
    (tmp_path / "bench.json").write_text("[]")
    assert main(again) == 1
    assert "was not written by this command" in capsys.readouterr().err
    assert main(again[:2]) == 1
    assert "--resume needs --out DIR" in capsys.readouterr().err
    assert len(asked) == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "ddp,horovod"], "There is no peer called horovod. Choose of floor"),
        (["--steps", "5", "--warm", "4"], "too few are measured"),
        (["nothing.py:Model"], "is none of tiny"),
    ],
)
def test_what_cannot_be_is_said_at_once(
    arguments: list[str], words: str, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert words in capsys.readouterr().err
    assert not asked
