"""Models whose activations are checkpointed in the ways in which users write it, and the same without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.helpers.models import Batch, Case, NextToken

WRAPPED = "_checkpoint_wrapped_module."  # a wrapper's part of the names of parameters

Call = Callable[[nn.Module, Tensor], Tensor]


def no_shard_dispatch(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


class _Block(nn.Module):
    """Without attention, which takes most of the time of compiling one."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Blocks(NextToken):
    """Two blocks, each called by ``call``. Dropout at rates that a seed of the batch decides."""

    call: Call = staticmethod(no_shard_dispatch)
    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(61, 24)
        self.blocks = nn.ModuleList(_Block(24, self.dropout) for _ in range(2))
        self.head = nn.Linear(24, 61)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = type(self).call(block, x)
        return self.head(x)

    def loss(self, batch: Batch, call: Any = None) -> Tensor:
        torch.manual_seed(int(batch[0].sum()))  # the same numbers for the same samples, on each rank
        return super().loss(batch, call)


def _products_saved(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


class Dropping(Blocks):
    dropout = 0.3


class NonReentrant(Dropping):
    call = staticmethod(partial(checkpoint, use_reentrant=False))


class Reentrant(Dropping):
    call = staticmethod(partial(checkpoint, use_reentrant=True))


class Selective(Blocks):
    call = staticmethod(
        partial(
            checkpoint,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, _products_saved),
        )
    )


class EndsInAView(Blocks):
    @staticmethod
    def call(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda x: block(x).flatten(0, 1), x, use_reentrant=False).view_as(x)


class PartOfEach(Blocks):
    """Nothing but the MLP of each block."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp = checkpoint_wrapper(block.mlp, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


class Wrapped(Blocks):
    kind = CheckpointImpl.NO_REENTRANT

    def __init__(self) -> None:
        super().__init__()
        apply_activation_checkpointing(
            self,
            checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=self.kind),
            check_fn=lambda module: any(module is block for block in self.blocks),
        )


class WrappedReentrant(Wrapped):
    kind = CheckpointImpl.REENTRANT


class Shared(Blocks):
    """Its blocks are one, as in ALBERT: two regions read the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 2)


class SharedAndCheckpointed(Shared):
    call = staticmethod(partial(checkpoint, use_reentrant=False))


class _Transformers(NextToken):
    """A model of the library transformers, checkpointed by its own method."""

    checkpointed: bool | None = None  # None: not at all; else whether the reentrant way

    def __init__(self) -> None:
        super().__init__()
        self.net = self.make()
        if self.checkpointed is not None:
            self.net.gradient_checkpointing_enable({"use_reentrant": self.checkpointed})

    def make(self) -> Any:
        raise NotImplementedError

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(0, 61, (n, 8), generator=rng) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(input_ids=ids, use_cache=False).logits


class Llama(_Transformers):
    def make(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=61, num_hidden_layers=2, **sizes))


class CheckpointedLlama(Llama):
    checkpointed = False


class ReentrantLlama(Llama):
    checkpointed = True


class GPT2(_Transformers):
    def make(self) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=8, **quiet))


class CheckpointedGPT2(GPT2):
    checkpointed = False


class DeepGPT2(_Transformers):
    """As its authors configure it, with dropout."""

    checkpointed = False

    def make(self) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=8))


class T5Encoder(_Transformers):
    """The first layer has another class than the later ones, which get its result."""

    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 61)

    def make(self) -> Any:
        from transformers import T5Config, T5EncoderModel

        return T5EncoderModel(T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=5, num_heads=4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.net(input_ids=ids).last_hidden_state)


# Each with its counterpart.
WAYS: dict[str, tuple[type[Case], type[Case]]] = {
    "checkpoint": (NonReentrant, Dropping),
    "reentrant checkpoint": (Reentrant, Dropping),
    "checkpoint_wrapper": (Wrapped, Blocks),
    "reentrant checkpoint_wrapper": (WrappedReentrant, Blocks),
    "products saved": (Selective, Blocks),
    "regions that end in a view": (EndsInAView, Blocks),
    "a part of each layer": (PartOfEach, Blocks),
    "weights of two regions": (SharedAndCheckpointed, Shared),
}
TRANSFORMERS: dict[str, tuple[type[Case], type[Case]]] = {
    "Llama": (CheckpointedLlama, Llama),
    "Llama, reentrant": (ReentrantLlama, Llama),
    "GPT-2": (CheckpointedGPT2, GPT2),
}
