"""Show progress bars of long saves and loads on the terminal of a Trainer."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_zero.integrations.trainer import trainer_checkpoints
from tests.helpers.trainer import Regression, close, make_loader, make_trainer
from tests.ranks.pool import Ranks


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _said(home: str, kind: str, out: io.StringIO, after_s: float, shown: bool = True) -> str:
    """Return the output of a training that is saved, and of one that resumes."""
    path = f"{home}/{kind}.ckpt"
    with redirect_stdout(out), mock.patch.object(trainer_checkpoints, "BAR_DELAY_S", after_s):
        for resumes in (None, path):
            module = Regression()
            trainer = make_trainer(
                "eager",
                state_dict_type=kind,
                max_epochs=2 if resumes else 1,
                enable_progress_bar=shown,
                callbacks=[TQDMProgressBar()] if shown else [],
            )
            trainer.fit(module, make_loader("eager"), ckpt_path=resumes)
            if not resumes:
                trainer.save_checkpoint(path)
            close(module)
    return out.getvalue()


def _all(home: str) -> dict[str, str]:
    return {
        **{kind: _said(home, kind, Terminal(), 0.0) for kind in ("full", "sharded")},
        "at once": _said(home, "sharded", Terminal(), trainer_checkpoints.BAR_DELAY_S),
        "a log": _said(home, "sharded", io.StringIO(), 0.0),
        "none": _said(home, "full", Terminal(), 0.0, shown=False),
    }


@pytest.mark.parametrize("world_size", [2])
def test_bars_are_shown_to_who_looks_where_it_takes_long(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    for rank, said in enumerate(ranks.run(world_size, _all, str(tmp_path))):
        for name, text in said.items():
            parts = set(re.findall(r"(Saving|Comparing|Loading weights|Loading the state of AdamW)\b[^\r]*%\|", text))
            wanted = {"Saving", "Comparing", "Loading weights", "Loading the state of AdamW"}
            assert parts == (wanted if rank == 0 and name in ("full", "sharded") else set()), (name, text[-2000:])
