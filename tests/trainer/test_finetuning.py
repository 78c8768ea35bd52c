"""``BackboneFinetuning`` freezes, unfreezes and adds groups; on every rank the same ones.

DDP never reduces the gradients of parameters that are unfrozen after setup, so the oracle is a single process.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint

from tests.helpers.lightning_modules import Finetuned, backbone_later
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    RTOL,
    check_captured,
    close,
    global_losses,
    make_loader,
    make_trainer,
    whole_state,
)
from tests.ranks.pool import Ranks


class Halves(BaseFinetuning):
    """Unfreezes the second layer first, then the first."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(module.backbone[4 - 2 * epoch : 6 - 2 * epoch], optimizer, lr=1e-2)


CALLBACKS: dict[str, Any] = {"backbone": backbone_later, "halves": Halves}


def _finetuned(kind: str, name: str, home: str, **arguments: Any) -> Any:
    """Three epochs with checkpoints; and the last one again, from the checkpoint before it."""
    # single processes, one on each rank, have files of their own
    folder = Path(home) / (f"single-{dist.get_rank()}" if kind == "single" else kind)
    checkpoint = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    module = Finetuned()
    trainer = make_trainer(
        kind, max_epochs=3, callbacks=[CALLBACKS[name](), checkpoint], enable_checkpointing=True, **arguments
    )
    trainer.fit(module, make_loader(kind, 2))
    check_captured(trainer)
    saved = torch.load(folder / "epoch=2.ckpt", weights_only=False)
    first = global_losses(kind, module), whole_state(module), saved["optimizer_states"], module.groups
    close(module)
    module = Finetuned()
    trainer = make_trainer(kind, max_epochs=3, callbacks=[CALLBACKS[name]()], **arguments)
    trainer.fit(module, make_loader(kind, 2), ckpt_path=folder / "epoch=1.ckpt", weights_only=False)
    check_captured(trainer)
    again = global_losses(kind, module), whole_state(module), module.groups
    close(module)
    return first, again


def _finetuned_under(kinds: list[str], *args: Any) -> dict[str, Any]:
    return {kind: _finetuned(kind, *args) for kind in kinds}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("eager", "backbone"),
        ("captured", "backbone"),
        ("captured", "halves"),
        pytest.param("compiled", "backbone", marks=pytest.mark.slow),
    ],
)
@pytest.mark.exhaustive_variants("compiled-backbone")
def test_unfrozen_parameters_train_as_on_a_single_device(ranks: Ranks, tmp_path: Path, kind: str, name: str) -> None:
    for result in ranks.run(2, _finetuned_under, ["single", kind], name, str(tmp_path)):
        (*ours, groups), again = result[kind][0], result[kind][1]
        (*single, expected), single_again = result["single"][0], result["single"][1]
        assert groups == expected
        assert [len(group) for group in expected[::2]] == ([1, 2, 2] if name == "backbone" else [1, 2, 3])
        assert sum(len(names) for _, names in expected[-1]) == 8
        assert_close_relative(ours, single, 3 * RTOL)
        assert again[2] == single_again[2]
        assert_close_relative(again[:2], single_again[:2], 3 * RTOL)
