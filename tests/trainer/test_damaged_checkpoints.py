"""Refuse damaged checkpoints by name on every rank, before the model changes.

Covers ``ckpt_path=``, ``load_from_checkpoint`` and ``fabric.load``. All kinds of damage are tried in
tests/unit/checkpoint/sharded/test_damage.py.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_zero.errors import CheckpointError
from tests.helpers.damage import RanCode, cut, flip, into_folder
from tests.helpers.fabric import closing, make_fabric, network, set_up
from tests.helpers.fabric import whole_state as fabric_state
from tests.helpers.saved import Scheduled
from tests.helpers.trainer import close, make_loader, make_trainer, whole_state
from tests.ranks.pool import Ranks


def _code(path: Path) -> None:
    torch.save({"state_dict": {}, "code": RanCode(path.parent / "ran")}, path)


FOLDER: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda at: cut(at / "__1_0.distcp", 0.7), r"__1_0\.distcp is damaged"),
    "flipped": (lambda at: flip(at / "__0_0.distcp", 0.5), r"__0_0\.distcp is damaged"),
    "missing": (lambda at: (at / "meta.pt").unlink(), r"meta\.pt is missing"),
    "incomplete": (lambda at: (at / "manifest.json").unlink(), r"x\.ckpt is not complete"),
    "code": (lambda at: _code(at / "meta.pt"), r"meta\.pt is damaged"),
    "empty": (lambda at: [file.unlink() for file in at.iterdir()], r"x\.ckpt holds no sharded checkpoint"),
}
FILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda at: cut(at, 0.7), r"x\.ckpt is damaged"),
    "flipped": (lambda at: flip(at, 0.5), r"x\.ckpt is damaged"),
    "empty": (lambda at: cut(at, 0.0), r"x\.ckpt is empty"),
    "code": (_code, r"x\.ckpt cannot be read"),
    "a folder": (into_folder, r"x\.ckpt holds no sharded checkpoint"),
    "something else": (lambda at: at.write_bytes(b"text" * 99), r"x\.ckpt cannot be read"),
}
KINDS = {"sharded": FOLDER, "full": FILE}


def _said(load: Callable[[], object]) -> str:
    try:
        load()
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return f"another error: {error!r}"
    return "it was loaded"


def _by_trainer(path: str) -> tuple[str, bool]:
    module = Scheduled(seed=7)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    trainer = make_trainer("eager", max_epochs=2)
    said = _said(lambda: trainer.fit(module, make_loader("eager"), ckpt_path=path))
    after = whole_state(module)
    same = before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())
    close(module)
    return said, same and trainer.global_step == 0


def _by_fabric(path: str) -> tuple[str, bool]:
    fabric = make_fabric("eager")
    model, optimizer = set_up(fabric, network())
    with closing(model):
        before = fabric_state(model)
        said = _said(lambda: fabric.load(path, {"state_dict": model, "optimizer": optimizer}))
        after = fabric_state(model)
        return said, all(torch.equal(value, after[key]) for key, value in before.items())


def _tried(kind: str, home: str) -> dict[tuple[str, str], Any]:
    module, trainer = Scheduled(), make_trainer("eager", state_dict_type=kind)
    trainer.fit(module, make_loader("eager"))
    trainer.save_checkpoint(f"{home}/good.ckpt")
    close(module)
    found: dict[tuple[str, str], Any] = {}
    path = Path(home, "x.ckpt")
    for name, (damage, _) in KINDS[kind].items():
        if dist.get_rank() == 0:
            (shutil.copytree if kind == "sharded" else shutil.copy)(f"{home}/good.ckpt", path)
            damage(path)
        dist.barrier()
        found[name, "ckpt_path"] = _by_trainer(str(path))
        found[name, "fabric.load"] = _by_fabric(str(path))
        found[name, "load_from_checkpoint"] = _said(lambda: Scheduled.load_from_checkpoint(path)), True
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_in_refuse_what_is_damaged(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    for found in ranks.run(2, _tried, kind, str(tmp_path), deadline=120):
        assert len(found) == 3 * len(KINDS[kind])
        for (name, how), (said, same) in found.items():
            assert re.search(KINDS[kind][name][1], said), f"{name}, {how}: {said}"
            assert same, f"{name}, {how}: the model is not what it was"
    assert not (tmp_path / "ran").exists()


# -- the ones that Lightning finds


def _go_on(kind: str, home: str) -> tuple[int, list[str], str]:
    """Resume at SLURM's requeue, where a kill has interrupted the save of the newer checkpoint."""
    module, trainer = Scheduled(), make_trainer("eager", state_dict_type=kind, max_epochs=1, default_root_dir=home)
    trainer.fit(module, make_loader("eager"))
    for number in (1, 2):
        trainer.save_checkpoint(f"{home}/hpc_ckpt_{number}.ckpt")
    dist.barrier()
    if dist.get_rank() == 0:
        Path(home, "hpc_ckpt_2.ckpt").rename(f"{home}/hpc_ckpt_2.ckpt.incomplete")
    dist.barrier()
    close(module)
    module = Scheduled(seed=7)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(SLURMEnvironment, "detect", staticmethod(lambda: True))
        trainer = make_trainer("eager", max_epochs=2, default_root_dir=home)
        trainer.fit(module, make_loader("eager"))
        began = trainer.global_step - len(module.losses)
    close(module)
    return began, [str(warning.message) for warning in caught], "hpc_ckpt_1.ckpt"


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_the_newest_whole_one(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    found = ranks.run(2, _go_on, kind, str(tmp_path))
    assert [began for began, _, _ in found] == [4, 4]
    _, warned, older = found[0]
    assert any(older in text and "newest complete checkpoint" in text for text in warned)
