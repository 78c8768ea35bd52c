"""The strategy in processes of its own: found by name, started by the Trainer, by torchrun and by the command line."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import run
from tests.helpers.trainer import Regression, make_loader, make_trainer
from tests.ranks.pool import Ranks

SCRIPT = Path(__file__).with_name("launched.py")


def _results(home: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(home.glob("*.json"))]


@pytest.fixture(scope="module")
def by_the_trainer(native_library: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks saw that the Trainer itself started."""
    home = tmp_path_factory.mktemp("trainer")
    done = run(str(SCRIPT), str(home), "zero3_compile", "2", cwd=home)
    assert done.returncode == 0, done.stdout
    return _results(home)


def _check(ranks: list[dict[str, Any]], environment: str) -> None:
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["world_size"] == 2
        assert rank["strategy"] == "ZeroStrategy"
        assert rank["launcher"] == "TrainerLauncher"
        assert rank["environment"] == environment
        assert rank["weight"] == ranks[0]["weight"]
    seen = [set(rank["seen"]) for rank in ranks]
    assert seen[0]
    assert not seen[0] & seen[1], "without a distributed sampler every rank trains on the same data"


def test_started_by_the_trainer(by_the_trainer: list[dict[str, Any]]) -> None:
    _check(by_the_trainer, "LightningEnvironment")


@pytest.mark.slow
def test_started_by_torchrun(native_library: None, by_the_trainer: list[dict[str, Any]], tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(*torchrun, str(SCRIPT), str(tmp_path), "zero3_compile", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    results = _results(tmp_path)
    _check(results, "TorchElasticEnvironment")
    # shuffled alike, from the same seed of the sampler
    assert [rank["weight"] for rank in results] == [rank["weight"] for rank in by_the_trainer]


def _contradict(kind: str) -> str:
    """The pool's ranks are started as torchrun starts them."""
    with pytest.raises(ValueError, match="You set `devices=1`") as found:
        make_trainer(kind, devices=1).fit(Regression(), make_loader(kind))
    return str(found.value)


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_devices_that_contradict_torchrun_are_an_error(ranks: Ranks, kind: str) -> None:
    for message in ranks.run(2, _contradict, kind):
        assert "does not match the world size (2)" in message


NAMES = """
    import importlib
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import StrategyRegistry

    options = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    for name in ("zero3", "zero3_compile", "zero2_compile", "zero1_compile"):
        try:
            pl.Trainer(strategy=name, **options)
        except ValueError as error:
            assert "invalid strategy name" in str(error), error
        else:
            raise AssertionError(f"{name} is known before the import")

    import lightning_zero
    names = [("zero3", False, 3), ("zero3_compile", True, 3), ("ZeRO3_Compile", True, 3)]
    for name, compiles, stage in [*names, ("zero2_compile", True, 2), ("zero1_compile", True, 1)]:
        strategy = pl.Trainer(strategy=name, **options).strategy
        assert type(strategy) is lightning_zero.ZeroStrategy
        assert (strategy._options.compile, strategy._options.stage) == (compiles, stage)
        assert StrategyRegistry[name.lower()]["description"]

    before = StrategyRegistry.available_strategies()
    importlib.reload(lightning_zero)
    assert StrategyRegistry.available_strategies() == before
    assert pl.Trainer(strategy="zero3_compile", **options).strategy._options.compile
    print("all is well")
"""


@pytest.mark.slow
def test_names_are_registered_by_importing_once_or_twice(tmp_path: Path) -> None:
    done = run("-c", textwrap.dedent(NAMES), cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all is well"), done.stdout


CLI = """
    import sys
    from lightning.pytorch.cli import LightningCLI
    sys.path.insert(0, {folder!r})
    from launched import Model, Write

    if __name__ == "__main__":
        LightningCLI(Model, trainer_defaults=dict(callbacks=[Write({home!r})]), save_config_callback=None)
"""

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


@pytest.mark.slow
def test_command_line_by_class_path(native_library: None, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    script, config = tmp_path / "cli.py", tmp_path / "config.yaml"
    script.write_text(textwrap.dedent(CLI).format(folder=str(SCRIPT.parent), home=str(tmp_path)))
    config.write_text(textwrap.dedent(CONFIG))
    nested = "--trainer.strategy.init_args.tuning.prefetch_mb=3"
    done = run(str(script), "fit", "--config", str(config), "--model.width=7", nested, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    (result,) = _results(tmp_path)
    assert result["strategy"] == "ZeroStrategy"
    assert len(result["weight"]) == 7
    assert result["options"] == (
        "EngineConfig(compile=False, reduce_dtype='bf16', timeout=None, tuning=Tuning(prefetch_mb=3.0, reduce_bucket_mb=0.5))"
    )
