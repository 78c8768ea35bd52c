"""Mixtures of experts train as under DDP.

Experts without tokens, on one rank or on all, and routing biases.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn.parallel import DistributedDataParallel

from lightning_zero.compile.fx_utils import gathers
from lightning_zero.sharding.weight_format import WeightFormat
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import EAGER, adamw, engine_for, whole_grads
from tests.ranks.pool import Ranks

VOCABULARY, WIDTH, EXPERTS, LENGTH = 32, 16, 4, 8
STEPS, ONE_TOKEN = 9, (6, 7)  # steps from the sixth on are replayed
LAYERS = 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Skipping(nn.Module):
    """Call only the experts that some token chose, and balance them by a bias instead of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).sigmoid()
        chosen = (scores + self.bias).topk(2, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.training:
            load = F.one_hot(chosen, EXPERTS).sum((0, 1)).float()
            self.bias += 0.01 * torch.sign(load.mean() - load)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                token, place = mask.nonzero(as_tuple=True)
                mixed = mixed.index_add(0, token, weights[token, place, None] * expert(tokens[token]))
        return x + self.scale * mixed.view_as(x)


class HandWritten(nn.Module):
    """Its loops over layers and experts break graphs; attention is one graph for all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.gains = nn.ParameterList(torch.ones(WIDTH) for _ in range(LAYERS))
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.mixtures = nn.ModuleList(Skipping() for _ in range(LAYERS // 2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for number, attention in enumerate(self.attention):
            gain = self.gains[number]  # eager code has it while attention is captured
            x = x + gain * attention(x)
            if number % 2:
                x = self.mixtures[number // 2](x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())


def make_mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    routing = {"num_local_experts": EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "use_cache": False}
    return MixtralForCausalLM(MixtralConfig(**sizes, **routing, **tokens, num_key_value_heads=1))


def make_deepseek() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    routing = {"n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 2}
    more = {"moe_intermediate_size": WIDTH, "first_k_dense_replace": 0, "n_shared_experts": 1, "num_key_value_heads": 2}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "use_cache": False}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **routing, **more, **tokens))


def make_frozen_experts() -> nn.Module:
    """Return the hand-written model, of which only norms, routers and the embeddings train."""
    model = HandWritten()
    for module in model.modules():
        if isinstance(module, Attention | Expert):
            module.requires_grad_(False)
    return model


def dequantize_frozen(model: nn.Module) -> None:
    """Round the values as ``frozen_dtype="nf4"`` does."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            packing = WeightFormat("nf4", module.weight.shape, module.weight.dtype)
            module.weight.data = packing.decode(packing.encode(module.weight))


MODELS = {
    "hand-written": HandWritten,
    "frozen experts": make_frozen_experts,
    "Mixtral": make_mixtral,
    "DeepSeek": make_deepseek,
}


def batch(step: int, rank: int) -> Tensor:
    """Return tokens of all kinds, then of one kind on each rank, whose experts alone have tokens."""
    if step % STEPS in ONE_TOKEN:
        return torch.full((2, LENGTH), 3 + 5 * rank)
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(2 * step + rank))


def balance(model: nn.Module) -> None:
    """Move DeepSeek's biases after the step, as its recipe does; here by another amount on each rank."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += 0.01 * (1 + torch.distributed.get_rank()) * torch.arange(EXPERTS)


class Run:
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grads: list[dict[str, Tensor | None]] = []
        self.buffers: list[dict[str, Tensor]] = []
        self.params: dict[str, Tensor] = {}
        self.replayed = 0


def train(kind: str, backend: str | None, rank: int, accumulate: int) -> Run:
    """Train a model under DDP (no backend) or sharded."""
    torch.manual_seed(5)
    model, run = MODELS[kind](), Run()
    sharded, options = nullcontext(), {"frozen_dtype": "nf4"} if kind == "frozen experts" else {}
    if options and backend is None:
        dequantize_frozen(model)
    if backend is not None:
        torch._dynamo.reset()
        sharded = engine_for(model, backend, emulate_cuda_graph_model=backend != EAGER, **options)
    ddp = DistributedDataParallel(model, find_unused_parameters=True) if backend is None else None
    with sharded as engine:
        optimizer = adamw(model)
        for step in range(STEPS):
            for part in range(accumulate):
                ids = batch(STEPS * part + step, rank)
                with engine.train_step() if engine is not None else nullcontext():
                    out = (ddp or model)(input_ids=ids, labels=ids)
                loss = out if isinstance(out, Tensor) else out.loss
                (loss / accumulate).backward()
                run.losses.append(loss.item())
            if engine is None:
                trained = {name: param.grad for name, param in model.named_parameters() if param.requires_grad}
                run.grads.append({name: None if grad is None else grad.clone() for name, grad in trained.items()})
                optimizer.step()
            else:
                run.grads.append(whole_grads(engine, model))
                with engine.optimizers.stepping(optimizer):
                    optimizer.step()
            optimizer.zero_grad()
            balance(model)
            run.buffers.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        if engine is None:
            run.params = {name: param.detach().clone() for name, param in model.named_parameters()}
        else:
            with engine.full_parameters(writeback=False):
                run.params = {name: param.detach().clone() for name, param in model.named_parameters()}
            run.replayed = engine.executor.counters().get("replayed_graphs", 0)
    return run


def train_all(kind: str, accumulate: int) -> dict[str, Run]:
    rank = torch.distributed.get_rank()
    return {str(backend): train(kind, backend, rank, accumulate) for backend in (None, EAGER, "aot_eager")}


@pytest.mark.parametrize(
    ("kind", "accumulate"), [("hand-written", 1), ("frozen experts", 1), ("Mixtral", 2), ("DeepSeek", 1)]
)
def test_a_mixture_trains_as_under_ddp(ranks: Ranks, kind: str, accumulate: int) -> None:
    pytest.importorskip("transformers")
    of_ranks = ranks.run(2, train_all, kind, accumulate, deadline=180)
    for runs in of_ranks:
        expected = runs.pop("None")
        for run in runs.values():
            assert_close_relative(run.losses, expected.losses, 1e-6, what="losses")
            assert_close_relative(run.grads, expected.grads, 1e-5, atol=1e-8, what="gradients")
            assert_close_relative(run.buffers, expected.buffers, 1e-6, what="buffers")
            assert_close_relative(run.params, expected.params, 1e-6, atol=2e-8, what="weights")
        layers = 1 if kind in ("Mixtral", "DeepSeek") else LAYERS  # of a graph of their own
        assert runs["aot_eager"].replayed >= 2 * layers * (STEPS - 5)
    if kind != "frozen experts":
        check_unused_experts(kind, of_ranks[0][EAGER].grads)


def check_unused_experts(kind: str, grads: list[dict[str, Tensor | None]]) -> None:
    """Check that the data has the property of this test."""
    if kind == "hand-written":
        missing = [[name for name, grad in step.items() if grad is None] for step in grads]
        assert all(missing[step] for step in ONE_TOKEN)
        assert not missing[0], missing
    else:
        name = next(name for name in grads[0] if name.endswith("experts.down_proj"))
        idle = [(step[name].flatten(1).count_nonzero(1) == 0).sum().item() for step in grads]  # type: ignore[union-attr]
        assert all(idle[step] for step in ONE_TOKEN)
        assert idle[0] == 0, idle


class StackedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("eoi,...i->...o", self.down, F.gelu(torch.einsum("eoi,...i->...o", self.up, x)))


def adapt_experts() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: Any = nn.ModuleDict({"experts": StackedExperts()})
    model.forward = lambda x: model["experts"](x)
    targets = ["experts.up", "experts.down"]
    return get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, target_parameters=targets))


def train_adapters() -> list[list[Tensor]]:
    """Return the parameters after training under DDP, in eager code and in compiled code, and after :func:`unshard`."""
    found = []
    for backend in (None, EAGER, "aot_eager"):
        torch.manual_seed(7)
        torch._dynamo.reset()
        model = adapt_experts()
        ddp = DistributedDataParallel(model) if backend is None else None
        with nullcontext() if backend is None else engine_for(model, backend) as engine:
            optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.01)
            for step in range(4):
                x = torch.randn(
                    3, WIDTH, generator=torch.Generator().manual_seed(2 * step + torch.distributed.get_rank())
                )
                with engine.train_step() if engine is not None else nullcontext():
                    loss = (ddp or model)(x).square().mean()
                loss.backward()
                with engine.optimizers.stepping(optimizer) if engine is not None else nullcontext():
                    optimizer.step()
                optimizer.zero_grad()
            if engine is not None:
                engine.unshard()
        found.append([param.detach().clone() for param in model.parameters()])
        found.append([model(torch.ones(2, WIDTH)).detach()])
    return found


def test_adapters_of_stacked_experts_train_as_under_ddp(ranks: Ranks) -> None:
    pytest.importorskip("peft")
    for params, result, *others in ranks.run(2, train_adapters, deadline=120):
        for other in others[0::2]:
            assert_close_relative(other, params, 1e-6, what="parameters")
        for other in others[1::2]:
            assert_close_relative(other, result, 1e-5, what="results of the plain module")


def train_in_bfloat16() -> tuple[list[str], list[str], list[float]]:
    """Return the dtypes of gathered experts, the products of all graphs, and the losses, of a compiled Mixtral."""
    torch.manual_seed(5)
    torch._dynamo.reset()
    model, losses = make_mixtral(), []
    gathered, products = list[str](), list[str]()

    def observe(what: str, graph: Graph) -> None:
        if what == "before":
            experts = [node for node in gathers(graph) if node.meta["val"].dim() == 3]
            gathered.extend(str(user.meta["val"].dtype) for node in experts for user in node.users)
            called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
            products.extend(name for name in called if "grouped_mm" in name)

    with engine_for(model, "aot_eager", observe=observe, compute_dtype=torch.bfloat16) as engine:
        optimizer = adamw(model)
        for step in range(3):
            ids = batch(step, engine.rank)
            with engine.train_step(), torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return gathered, products, losses


def test_under_autocast_experts_are_gathered_and_multiplied_in_bfloat16(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    for gathered, products, losses in ranks.run(2, train_in_bfloat16, deadline=120):
        assert set(gathered) == {"torch.bfloat16"}  # of casts, which the passes fuse into the gathers
        assert products == ["aten._grouped_mm.default"] * 6  # in forward, and two in backward for each
        assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.6)
