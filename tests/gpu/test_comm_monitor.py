"""The numbers of a training on two GPUs: replays, memory, and the waiting that its plan shows."""

from typing import Any

import pytest
import torch

from lightning_zero import CommMonitor
from tests.helpers.callbacks import Lines
from tests.helpers.trainer import Regression, close, make_loader, make_strategy, make_trainer
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(2, apart=True)


def _logged() -> list[dict[str, float]]:
    lines, module = Lines(), Regression()

    class Watched(CommMonitor):
        def on_train_batch_end(self, *args: Any) -> None:
            # Inside, waits of the host for the device are errors.
            torch.cuda.set_sync_debug_mode("error")
            try:
                super().on_train_batch_end(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    trainer = make_trainer(
        "compiled",
        accelerator="gpu",
        strategy=make_strategy("compiled"),
        precision="bf16-mixed",
        logger=lines,
        callbacks=[Watched(every_n_steps=10)],
    )
    trainer.fit(module, make_loader("compiled", 40))
    close(module)
    return [values for _, values in lines.lines if "comm/gathered_mib" in values]


def test_steps_on_gpus_are_seen_without_waiting_for_them(ranks: Ranks) -> None:
    [logged, nothing] = ranks.run(2, _logged, deadline=180)
    assert not nothing, "rank 0 alone logs"
    assert len(logged) == 4, "the last one, too, whenever the device was done with it"
    for values in logged[2:]:
        assert values["replays/forward_backward"] == values["replays/optimizer_step"] == 1
        assert 0 <= values["comm/exposed_ms_estimated"] <= values["throughput/step_ms"]
        assert 0 < values["throughput/mfu"] < 1
        assert 0 < values["memory/peak_mib"] <= values["memory/reserved_mib"]
        assert values["memory/captures_mib"] > 0
