"""Unshard a model between two trainings, add a layer on every rank, and fit it again."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_zero
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL, Regression, close, global_losses, is_ours, make_trainer, seeded, whole_state
from tests.ranks.pool import Ranks
from tests.ranks.report import RankFailure

TOKENS, WIDTH, LENGTH, STEPS = 37, 23, 3, 4


class Growing(Regression):
    """Tokens are embedded, and classified by a head of their own. ``grow`` adds rows to the embedding."""

    def __init__(self, tokens: int = TOKENS) -> None:
        super().__init__()
        del self.net
        with seeded():
            self.embedding = nn.Embedding(tokens, WIDTH)
            self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)

    def grow(self, rows: int = 6) -> None:
        old = self.embedding.weight.detach().clone()
        self.embedding = nn.Embedding(TOKENS + rows, WIDTH)
        with torch.no_grad():
            self.embedding.weight[:TOKENS] = old
            self.embedding.weight[TOKENS:] = old.mean(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(x))))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())


class GrowsInside(Growing):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.grow()
            self.optimizers().optimizer.add_param_group({"params": [self.embedding.weight]})  # type: ignore[union-attr]


def loader(kind: str, tokens: int) -> DataLoader:
    rng, count = torch.Generator().manual_seed(tokens), STEPS * 4
    inputs = torch.randint(0, tokens, (count, LENGTH), generator=rng)
    data = TensorDataset(inputs, torch.randint(0, TOKENS, (count, LENGTH), generator=rng))
    if kind == "single":
        return DataLoader(data, batch_size=4)
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))


def _grown(kind: str, resumed: bool) -> Any:
    module = Growing()
    make_trainer(kind).fit(module, loader(kind, TOKENS))
    before = whole_state(module)
    if is_ours(kind):
        lightning_zero.unshard(module)
    kept = [param for name, param in module.named_parameters() if name != "embedding.weight"]
    assert_close_relative(dict(module.named_parameters()), before, 0)
    module.grow()
    trainer = make_trainer(kind)
    trainer.fit(module, loader(kind, TOKENS + 6))
    assert all(one is other for one, other in zip(kept, list(module.parameters())[1:], strict=True))
    result = [before, global_losses(kind, module), whole_state(module)]
    if resumed:
        path = f"{kind}.ckpt"
        trainer.save_checkpoint(path)
        again = Growing(TOKENS + 6)
        make_trainer(kind, max_epochs=2).fit(again, loader(kind, TOKENS + 6), ckpt_path=path)
        result += [global_losses(kind, again), whole_state(again)]
        close(again)
    close(module)
    return result


def _grown_under(*kinds: str) -> dict[str, Any]:
    return {kind: _grown(kind, resumed=True) for kind in kinds}


def test_a_model_that_is_unsharded_and_grows_trains_as_in_a_single_process(ranks: Ranks) -> None:
    for result in ranks.run(2, _grown_under, "single", "eager", "compiled", "captured", deadline=120):
        for kind in ("eager", "compiled", "captured"):
            assert_close_relative(result[kind], result["single"], 4 * RTOL, what=kind)


def _grows_inside(kind: str) -> None:
    module = GrowsInside()
    try:
        make_trainer(kind).fit(module, loader(kind, TOKENS))
    finally:
        close(module)


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_a_layer_that_is_replaced_within_a_training_is_refused_with_what_to_do(ranks: Ranks, kind: str) -> None:
    with pytest.raises(RankFailure, match=r"(?s)lightning_zero\.unshard\(model\).*fit again.*starts anew"):
        ranks.run(2, _grows_inside, kind)
