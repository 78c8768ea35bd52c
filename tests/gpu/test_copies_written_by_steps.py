"""Replayed steps write the copies in the compute dtype, also over the gradients that they have read."""

import pytest
import torch

from tests.helpers.written_copies import EDITS, WAYS, Edit, train
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(1)


def on_gpu(edit: Edit | None, way: str) -> dict[str, object]:
    device = f"cuda:{torch.cuda.current_device()}"
    options = {name: value for name, value in WAYS[way].items() if name != "emulate_cuda_graph_model"}
    return train(edit, options, clip=None if way == "float16" else 0.5, backend="inductor", device=device)


def every_way() -> dict[str, dict[str, object]]:
    return {way: on_gpu(None, way) for way in WAYS} | {
        edit.__name__: on_gpu(edit, way)
        for edit, way in zip(EDITS, [*WAYS, *WAYS][: len(EDITS)], strict=True)
        if way != "float16"
    }


def test_copies_equal_master_weights_in_every_forward(ranks: Ranks) -> None:
    [found] = ranks.run(1, every_way, backend="cpu:gloo,cuda:nccl", deadline=400)
    for name, result in found.items():
        assert not result["wrong"], (name, result)
        assert result["replays"] > 0, name
        if name in WAYS:
            assert not any(result["passes"][4:]), (name, result)
