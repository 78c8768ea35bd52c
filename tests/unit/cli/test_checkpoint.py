"""``python -m lightning_zero checkpoint``: inspect, verify, consolidate."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_zero.cli.main import main
from tests.helpers.folders import write_folder


def test_inspect_shows_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.ckpt"
    write_folder(path)
    assert main(["checkpoint", "inspect", str(path), "--json", "--tensors"]) == 0
    [facts] = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["epoch"], facts["global_step"], facts["ranks"]) == ("sharded", 3, 12, 1)
    assert (facts["weights"], facts["elements"], facts["optimizers"]) == (4, 7 * 5 * 2 + 4 + 1, 1)
    assert facts["dtypes"] == {"float32": 2, "bfloat16": 1, "int64": 1}
    assert facts["hyper_parameters"] == {"width": "5"}
    assert facts["also"] == ["mine"]
    assert facts["written_by"].startswith("lightning")
    assert facts["tensors"][0] == {"name": "a.weight", "shape": [7, 5], "dtype": "float32"}
    assert main(["checkpoint", "inspect", str(path)]) == 0
    assert "global step" in capsys.readouterr().out


def test_all_of_a_folder_are_verified_and_the_bad_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "a.ckpt")
    write_folder(tmp_path / "b.ckpt")
    torch.save({"state_dict": {"w": torch.randn(100)}}, tmp_path / "c.ckpt")
    assert main(["checkpoint", "verify", str(tmp_path), "--json"]) == 0
    assert [row["good"] for row in json.loads(capsys.readouterr().out)] == [True] * 3
    data = bytearray((tmp_path / "b.ckpt" / "__0_0.distcp").read_bytes())
    data[700] ^= 4
    (tmp_path / "b.ckpt" / "__0_0.distcp").write_bytes(data)
    whole = bytearray((tmp_path / "c.ckpt").read_bytes())
    whole[-1500] ^= 4
    (tmp_path / "c.ckpt").write_bytes(whole)
    assert main(["checkpoint", "verify", str(tmp_path), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["good"] for row in rows] == [True, False, False]
    assert "b.ckpt/__0_0.distcp is damaged" in rows[1]["why"]
    assert main(["checkpoint", "verify", str(tmp_path / "b.ckpt")]) == 1
    assert "NOT GOOD" in capsys.readouterr().out


def test_consolidate_makes_the_file_of_a_single_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = write_folder(tmp_path / "x.ckpt")
    assert main(["checkpoint", "consolidate", str(tmp_path / "x.ckpt")]) == 0
    output = Path(capsys.readouterr().out.strip())
    assert output == tmp_path / "x.ckpt.consolidated"
    whole = torch.load(output)
    assert list(whole["state_dict"]) == list(state)
    for key, value in state.items():
        assert torch.equal(whole["state_dict"][key], value), key
    assert whole["state_dict"]["tied.weight"].data_ptr() == whole["state_dict"]["a.weight"].data_ptr()
    [optimizer] = whole["optimizer_states"]
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": [0, 1]}]
    assert optimizer["state"][0]["exp_avg"].tolist() == [1.0] * 4
    assert (whole["epoch"], whole["mine"]) == (3, [1])
    assert main(["checkpoint", "consolidate", str(tmp_path / "x.ckpt")]) == 1
    assert "something at" in capsys.readouterr().err


def test_what_is_no_checkpoint_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(tmp_path / "gone")]) == 1
    assert "CheckpointError: There is nothing at" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["checkpoint", "inspect", str(tmp_path / "empty")]) == 1
    assert "holds no sharded checkpoint" in capsys.readouterr().err


def test_export_writes_what_hugging_face_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = write_folder(tmp_path / "x.ckpt")
    torch.save({"state_dict": {f"net.{key}": value for key, value in state.items()}}, tmp_path / "y.ckpt")
    for path, prefix in (("x.ckpt", ""), ("y.ckpt", "net.")):
        output = tmp_path / f"{path}-out"
        words = ["--output", str(output), "--prefix", prefix, "--max-shard-size", "100B", "--dtype", "float32"]
        assert main(["checkpoint", "export", str(tmp_path / path), *words, "--json"]) == 0
        names = json.loads(capsys.readouterr().out)["files"]
        assert len(names) == 2
        found = {key: value for name in names for key, value in load_file(output / name).items()}
        assert found.keys() == {"a.weight", "b.bias", "count"}
        assert torch.equal(found["b.bias"], state["b.bias"].float())
        assert torch.equal(found["a.weight"], state["a.weight"])
    assert main(["checkpoint", "export", str(tmp_path / "x.ckpt"), "--output", "o", "--prefix", "z."]) == 1
    assert "no weights whose names begin with 'z.'" in capsys.readouterr().err
    for path, hint in (("x.ckpt", ""), ("y.ckpt", "pass --prefix net.")):
        assert main(["checkpoint", "export", str(tmp_path / path), "--output", str(tmp_path / f"{path}-all")]) == 0
        said = capsys.readouterr().err
        assert (hint in said) if hint else not said
