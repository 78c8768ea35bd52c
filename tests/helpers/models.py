"""Small models, each with something a sharding compiler may get wrong."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Any, ...]


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _regression(seed: int, n: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    rng = _rng(seed)
    return torch.randn(n, inputs, generator=rng), torch.randn(n, outputs, generator=rng)


def _tokens(seed: int, n: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(vocabulary, (n, length + 1), generator=_rng(seed))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


class Case(nn.Module):
    """A batch is (*inputs, target), with samples along each tensor's first dimension."""

    # expected with another order of sums; bf16 parameters round their gradients, too
    rtol = 1e-5
    # the loss of a batch is the mean of the losses of its equal parts
    mean_of_parts = True
    # some ranks are meant to hold nothing of some matrices: see tests/helpers/spread.py
    empty_ranks = False

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        raise NotImplementedError

    def criterion(self, output: Any, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def loss(self, batch: Batch, call: Any = None) -> Tensor:
        """`call` stands in for self: an attribute of a compiled wrapper is the plain model's."""
        *inputs, target = batch
        # compared with None, as the truth of a compiled module is its length
        output = self(*inputs) if call is None else call(*inputs)
        return self.criterion(output, target)


class OddMLP(Case):
    """Parameters with fewer elements than ranks, with none, 0-dim, and no multiple of 2 or 3."""

    empty_ranks = True

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 11, bias=False)
        self.third = nn.Linear(11, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.pair = nn.Parameter(torch.randn(2))
        self.empty = nn.Parameter(torch.empty(0))

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        return _regression(seed, n, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        x = torch.relu(self.second(x)) + self.empty.sum()
        return self.third(x) * self.pair[0] + self.pair[1]


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        n, length, dim = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(n, length, dim))


class _TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = _Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class NextToken(Case):
    """Return sequences of tokens, by default of 8, from 61."""

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        return _tokens(seed, n, 8, 61)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())


class TinyTransformer(NextToken):
    tied = False

    def __init__(self, dim: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(61, dim)
        self.positions = nn.Embedding(8, dim)
        self.blocks = nn.ModuleList(_TransformerBlock(dim, 4) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 61, bias=False)
        if self.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class OneBlock(TinyTransformer):
    def __init__(self) -> None:
        super().__init__(blocks=1)


class OneMLP(OneBlock):
    """A block without attention, which takes most of the time of compiling one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].attention = nn.Identity()


class TiedTransformer(TinyTransformer):
    """One parameter under two names, used first and last."""

    tied = True


class TiedBlock(OneBlock):
    tied = True


def made_one_mlp(model: TinyTransformer) -> None:
    """Only the first block's MLP remains, where compiling must be fast and the built modules matter: dropout in it, or
    calls of blocks.
    """
    del model.blocks[1:]
    model.blocks[0] = model.blocks[0].mlp  # type: ignore[assignment]


class OneLayer(OneBlock):
    """Two matrices in place of a block, where compiling must be fast: embeddings and a norm are unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


class TiedLayer(OneLayer):
    tied = True


class _Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, x.shape[-1:])
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Deep(Case):
    """Six equal layers, whose weights are larger than a group may be made."""

    width = 24

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Gated(self.width) for _ in range(6)))
        self.head = nn.Linear(self.width, self.width)

    @classmethod
    def make_batch(cls, seed: int, n: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, cls.width, generator=generator), torch.randn(n, cls.width, generator=generator)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class _BreakingBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim + 3)
        self.down = nn.Linear(dim + 3, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        torch._dynamo.graph_break()
        return x + self.down(hidden)


class TwelveBlocks(Case):
    """Each block is cut in two, and Dynamo may run one graph with twelve sets of parameters.

    Twelve, as code that it compiles anew for each block passes the recompile limit of eight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_BreakingBlock(8) for _ in range(12)))

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        return _regression(seed, n, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class TiedAcrossBreak(NextToken):
    """Two graphs each hold a part of one parameter's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(29, 19)
        self.middle = nn.Linear(19, 19)
        self.head = nn.Linear(19, 29)
        self.head.weight = self.tokens.weight

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        return _tokens(seed, n, 4, 29)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.tokens(ids)))
        torch._dynamo.graph_break()
        return self.head(x)


class CalledTwice(Case):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(19, 25), nn.Tanh(), nn.Linear(25, 19))
        self.last = nn.Linear(19, 23)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        return _regression(seed, n, 19, 23)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(self.shared(x)))


class BranchByStep(Case):
    """Each seed's parity picks the branch: with seed = step, A is unused on odd steps, B on even."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(19, 25)
        self.a = nn.Linear(25, 19)
        self.b = nn.Sequential(nn.Linear(25, 23), nn.ReLU(), nn.Linear(23, 19))

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        x, y = _regression(seed, n, 19, 19)
        return x, seed, y

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = torch.relu(self.first(x))
        return self.a(x) if step % 2 == 0 else self.b(x)


class _LowRankLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, rank: int = 13) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) * 0.3)
        # zero, as is customary, would leave `down` without gradient on the first step
        self.up = nn.Parameter(torch.randn(outputs, rank) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class LoRA(Case):
    def __init__(self) -> None:
        super().__init__()
        self.first = _LowRankLinear(19, 25)
        self.second = _LowRankLinear(25, 19)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        return _regression(seed, n, 19, 19)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class NeverUsed(Case):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(19, 23)
        self.idle = nn.Linear(19, 25)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        return _regression(seed, n, 19, 23)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class ReturnsParameter(Case):
    """A parameter is an output of the graph; its gathered form must outlive the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(23, 19)
        self.prior = nn.Parameter(torch.randn(19, 23))

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        return _regression(seed, n, 23, 19)

    def criterion(self, output: Any, target: Tensor) -> Tensor:
        prediction, prior = output
        return F.mse_loss(prediction, target) + prior.square().mean()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) + F.linear(x, self.prior), self.prior


class MixedDtypes(Case):
    """fp32 and bf16 parameters in one graph, the latter cast up where used."""

    rtol = 2e-2

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(19, 25)
        self.middle = nn.Linear(25, 25).to(torch.bfloat16)
        self.last = nn.Linear(25, 23)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        return _regression(seed, n, 19, 23)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(F.linear(x, self.middle.weight.float(), self.middle.bias.float()))
        return self.last(x)


class NonContiguous(Case):
    """A parameter whose memory order is not its logical order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(25, 19) * 0.3).t())
        self.last = nn.Linear(25, 23)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        return _regression(seed, n, 19, 23)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x @ self.weight))


class BatchNormNet(Case):
    """Buffers written in the forward; and each rank normalises by its own share."""

    mean_of_parts = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(19, 25)
        self.norm = nn.BatchNorm1d(25)
        self.last = nn.Linear(25, 23)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        return _regression(seed, n, 19, 23)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class _Disabled(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class CompilerDisabled(Case):
    """Parameters that no graph ever sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(19, 25)
        self.eager = _Disabled(25)
        self.last = nn.Linear(25, 23)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        return _regression(seed, n, 19, 23)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.eager(torch.relu(self.first(x))))


class LSTMNet(Case):
    """nn.LSTM keeps a list of its weights in addition to the attributes, and Dynamo runs it eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(23, 19, num_layers=2, batch_first=True)
        self.head = nn.Linear(19, 25)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = _rng(seed)
        return torch.randn(n, 4, 23, generator=rng), torch.randn(n, 25, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


CASES: dict[str, type[Case]] = {
    case.__name__: case
    for case in (
        OddMLP,
        TinyTransformer,
        TiedTransformer,
        OneBlock,
        TiedBlock,
        TwelveBlocks,
        TiedAcrossBreak,
        CalledTwice,
        BranchByStep,
        LoRA,
        NeverUsed,
        ReturnsParameter,
        MixedDtypes,
        NonContiguous,
        BatchNormNet,
        CompilerDisabled,
        LSTMNet,
    )
}


def build(case: str | type[Case], seed: int = 0) -> Case:
    """Return equal weights on every rank and in every process, after any random draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (CASES[case] if isinstance(case, str) else case)()


def make_batches(case: str | type[Case], steps: int, n: int) -> list[Batch]:
    """One global batch of `n` samples per step."""
    kind = CASES[case] if isinstance(case, str) else case
    return [kind.make_batch(step, n) for step in range(steps)]
