"""Emulate a sharder on one rank without an executor. The rank may be one of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.sharding.flat_memory import FlatBuffer
from lightning_zero.sharding.layout import ShardLayout

__all__ = ["OneRank"]

CPU = torch.device("cpu")


class OneRank:
    """Stand for a Sharder. ``params``, and the gradients of :meth:`bring`, are views of flat buffers."""

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        state_blocks: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rank = rank
        self.memory = SimpleNamespace(steps_write_copies=False)
        self.mesh = SimpleNamespace(
            world_size=1,
            replicated=False,
            shard_host_count=1,
            shard_group=SimpleNamespace(gather_group=None, size=1, rank=0),
        )
        layouts = [
            ShardLayout.from_shape(torch.Size(shape), dtype, world_size, state_blocks=state_blocks) for shape in shapes
        ]
        pieces = [(layout, dtype) for layout in layouts]
        shards, grads = FlatBuffer(pieces, CPU), FlatBuffer(pieces, CPU)
        rng = torch.Generator().manual_seed(seed)
        self.live = []
        for index, ((layout, _), shard) in enumerate(zip(pieces, shards.views, strict=True)):
            layout.write(shard, torch.randn(layout.numel, generator=rng).view(layout.shape), rank)
            param = nn.Parameter(shard.view(layout.visible_shape))
            self.live.append(
                SimpleNamespace(
                    index=index,
                    name=f"p{index}",
                    param=param,
                    layout=layout,
                    shard=shard,
                    spec=SimpleNamespace(shard_index=rank, wrap=lambda tensor: tensor),
                    gradient=grads.views[index],
                    visible_grad=None,
                    on_host=None,
                )
            )
        self.params = [record.param for record in self.live]
        self.key = 0
        self.collectives: list[str] = []
        self.executor: Any = SimpleNamespace(
            device=CPU,
            gradients=SimpleNamespace(attachment_key=lambda: self.key, may_write_gradient=lambda index: True),
            weights=SimpleNamespace(
                valid_compute_shards=list,
                mark_compute_shards_written=lambda indices, written: None,
                user_write_count=lambda: 0,
            ),
            collective=self._collective,
            start_collective=None,  # nothing is sent by one rank
            waiting=None,
        )

    def _collective(self, what: str, lane: Any, start: Callable[..., Any]) -> None:
        self.collectives.append(what)  # of one rank: the sum is there

    def find(self, param: Tensor) -> Any:
        return next((record for record in self.live if record.param is param), None)

    def bring(self, step: int, without: Sequence[int] = ()) -> None:
        """Set gradients as after a backward, except for parameters that are left out."""
        self.key += 1
        for index, param in enumerate(self.params):
            if index in without:
                param.grad = None
                continue
            layout, gradient = self.live[index].layout, self.live[index].gradient
            rng = torch.Generator().manual_seed(100 * step + index)
            layout.write(gradient, torch.randn(layout.numel, generator=rng).view(layout.shape), self.rank)
            param.grad = gradient.view(param.shape)
