"""Run the strategy in processes started by the Trainer, by torchrun, and by the command line."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI

from tests.helpers.command import run
from tests.helpers.trainer import Regression, make_loader, make_trainer
from tests.ranks.pool import Ranks
from tests.trainer.launched import Model, Write, check, results

SCRIPT = Path(__file__).with_name("launched.py")


@pytest.fixture(scope="module")
def by_the_trainer(native_library: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the observations of the ranks that the Trainer started."""
    home = tmp_path_factory.mktemp("trainer")
    done = run(str(SCRIPT), str(home), "zero3_compile", "2", cwd=home)
    assert done.returncode == 0, done.stdout
    return results(home)


@pytest.mark.exhaustive  # test_sigterm.py does the same with an eager strategy
def test_started_by_the_trainer(by_the_trainer: list[dict[str, Any]]) -> None:
    check(by_the_trainer, "LightningEnvironment")


@pytest.mark.exhaustive  # the pool's ranks are started as torchrun starts them
def test_started_by_torchrun(native_library: None, by_the_trainer: list[dict[str, Any]], tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(*torchrun, str(SCRIPT), str(tmp_path), "zero3_compile", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    found = results(tmp_path)
    check(found, "TorchElasticEnvironment")
    # shuffled alike, from the same seed of the sampler
    assert [rank["weight"] for rank in found] == [rank["weight"] for rank in by_the_trainer]


def _contradict(kind: str) -> str:
    """The pool's ranks are started as torchrun starts them."""
    with pytest.raises(ValueError, match="You set `devices=1`") as found:
        make_trainer(kind, devices=1).fit(Regression(), make_loader(kind))
    return str(found.value)


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_devices_that_contradict_torchrun_are_an_error(ranks: Ranks, kind: str) -> None:
    for message in ranks.run(2, _contradict, kind):
        assert "does not match the world size (2)" in message


CONFIG = """
    trainer:
      accelerator: cpu
      devices: 1
      max_epochs: 1
      logger: false
      enable_checkpointing: false
      strategy:
        class_path: lightning_zero.ZeroStrategy
        init_args:
          compile: false
          reduce_dtype: bf16
          timeout: null
          tuning:
            reduce_bucket_mb: 0.5
"""


def _by_command_line(arguments: list[str], home: str) -> None:
    LightningCLI(Model, args=arguments, trainer_defaults={"callbacks": [Write(home)]}, save_config_callback=None)


def test_command_line_by_class_path(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    config = tmp_path / "config.yaml"
    config.write_text(textwrap.dedent(CONFIG))
    nested = "--trainer.strategy.init_args.tuning.prefetch_mb=3"
    ranks.run(1, _by_command_line, ["fit", "--config", str(config), "--model.width=7", nested], str(tmp_path))
    (result,) = results(tmp_path)
    assert result["strategy"] == "ZeroStrategy"
    assert len(result["weight"]) == 7
    assert result["options"] == (
        "EngineConfig(compile=False, reduce_dtype='bf16', timeout=None, tuning=Tuning(prefetch_mb=3.0, reduce_bucket_mb=0.5))"
    )
