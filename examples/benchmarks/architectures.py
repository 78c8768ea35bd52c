"""The models that `models.py` trains: sizes, random data, and the loss of a training step.

Each has two sizes: one for a GPU, and a tiny one that shows on the CPU what is compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import bitsandbytes_peer
from plain_models import DiffusionTransformer, GraphNet, UNet

__all__ = ["ARCHITECTURES", "WARMED_UP", "Architecture", "Sizes"]

WARMED_UP = "Warmed up; waits for a line of the input."  # `models.py` prints it, and `model_table.py` waits for it

Batch = dict[str, Any]
Modules = dict[str, nn.Module]  # attributes of the LightningModule


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and of its batches.

    Attributes:
        length: tokens, or pixels along a side, or samples of sound.
        lengths: of batches, in turn, instead of `length`.
        experts: transformers' implementation of experts; "" for its default.
        quantizer: "bitsandbytes" stores frozen weights in NF4 with double quantization; "" leaves that to a strategy.
        cache: transformers' models keep keys and values.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    lengths: tuple[int, ...] = ()
    experts: str = ""
    quantizer: str = ""
    cache: bool = False

    def length_of(self, index: int) -> int:
        """Return the length of the batch of this number."""
        return self.lengths[index % len(self.lengths)] if self.lengths else self.length


TINY = Sizes(layers=2, width=64, heads=2, vocabulary=128, batch=2, length=32)


# -- language models


def gpt2(sizes: Sizes) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=sizes.layers,
        n_embd=sizes.width,
        n_head=sizes.heads,
        vocab_size=sizes.vocabulary,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=sizes.cache,
    )
    return GPT2LMHeadModel(config)


def decoder_sizes(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": max(sizes.heads // 4, 1),
        "vocab_size": sizes.vocabulary,
        "use_cache": sizes.cache,
    }


def without_special_tokens() -> dict[str, Any]:
    return {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def llama(sizes: Sizes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 11 * sizes.width // 4
    config = LlamaConfig(**decoder_sizes(sizes), intermediate_size=width, tie_word_embeddings=True)
    return LlamaForCausalLM(config)


def llama_checkpointed(sizes: Sizes) -> nn.Module:
    model = llama(sizes)
    model.gradient_checkpointing_enable()
    return model


def lora(sizes: Sizes) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(llama(sizes), LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))


def lora_on_llama3(sizes: Sizes) -> nn.Module:
    """Return Llama-3's shape, frozen in bfloat16 on the device, with adapters of rank 16 on all linear layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = 7 * sizes.width // 2
    config = LlamaConfig(**decoder_sizes(sizes), intermediate_size=hidden, rope_theta=5e5, dtype=torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        base = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        base.requires_grad_(False)
        if sizes.quantizer == "bitsandbytes":
            base = bitsandbytes_peer.quantize(base, kept=("lm_head",))
        lora_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(base, lora_config)


def gemma(sizes: Sizes) -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    window, head = max(sizes.length // 4, 1), 256 if sizes.width > 64 else 32
    config = Gemma3TextConfig(
        **decoder_sizes(sizes) | without_special_tokens(),
        intermediate_size=6 * sizes.width,
        head_dim=head,
        sliding_window=window,
        query_pre_attn_scalar=head,
        attn_implementation="sdpa",
    )
    return Gemma3ForCausalLM(config)


def mamba2(sizes: Sizes) -> nn.Module:
    """Chunks are small, because transformers' code without kernels has the product of two of their sizes in memory."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_heads=2 * sizes.width // 64,
        head_dim=64,
        state_size=128 if sizes.width > 64 else 16,
        n_groups=1,
        chunk_size=32 if sizes.width > 64 else 8,
        vocab_size=sizes.vocabulary,
        use_cache=sizes.cache,
        **without_special_tokens(),
    )
    return Mamba2ForCausalLM(config)


def experts_of(sizes: Sizes) -> dict[str, Any]:
    return {"experts_implementation": sizes.experts} if sizes.experts else {}


def mixtral(sizes: Sizes) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    width = 2 * sizes.width
    config = MixtralConfig(
        **decoder_sizes(sizes) | experts_of(sizes) | without_special_tokens(),
        intermediate_size=width,
        num_local_experts=8,
    )
    return MixtralForCausalLM(config)


def qwen3_moe(sizes: Sizes) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **decoder_sizes(sizes) | experts_of(sizes) | without_special_tokens(),
        intermediate_size=2 * sizes.width,
        moe_intermediate_size=sizes.width // 2,
        num_experts=32,
        num_experts_per_tok=4,
        head_dim=sizes.width // sizes.heads,
        output_router_logits=True,
    )
    return Qwen3MoeForCausalLM(config)


def deepseek(sizes: Sizes) -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    head = sizes.width // sizes.heads
    config = DeepseekV3Config(
        **decoder_sizes(sizes) | experts_of(sizes) | without_special_tokens() | {"num_key_value_heads": sizes.heads},
        intermediate_size=2 * sizes.width,
        moe_intermediate_size=sizes.width // 2,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=sizes.width // 2,
        kv_lora_rank=sizes.width // 4,
        qk_nope_head_dim=head,
        qk_rope_head_dim=head // 2,
        v_head_dim=head,
    )
    return DeepseekV3ForCausalLM(config)


def gpt_oss(sizes: Sizes) -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **decoder_sizes(sizes) | experts_of(sizes) | without_special_tokens(),
        intermediate_size=sizes.width,
        num_local_experts=8,
        num_experts_per_tok=2,
        head_dim=sizes.width // sizes.heads,
        sliding_window=max(sizes.length // 4, 1),
    )
    return GptOssForCausalLM(config)


def masked_lm(sizes: Sizes) -> nn.Module:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(bert_config(sizes))


def bert_config(sizes: Sizes) -> Any:
    from transformers import BertConfig

    return BertConfig(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=4 * sizes.width,
        vocab_size=sizes.vocabulary,
    )


def sentences(sizes: Sizes) -> nn.Module:
    from transformers import BertModel

    return BertModel(bert_config(sizes), add_pooling_layer=False)


def t5(sizes: Sizes) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=sizes.width,
        d_kv=sizes.width // sizes.heads,
        d_ff=4 * sizes.width,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        vocab_size=sizes.vocabulary,
        use_cache=sizes.cache,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


# -- images and sound


def vit(sizes: Sizes) -> nn.Module:
    import timm

    if sizes.width > 64:
        return timm.create_model("vit_huge_patch14_224", num_classes=sizes.vocabulary)
    return timm.create_model("test_vit", img_size=sizes.length, num_classes=sizes.vocabulary)


def convnext(sizes: Sizes) -> nn.Module:
    import timm

    name = "convnext_large" if sizes.width > 64 else "test_convnext"
    return timm.create_model(name, num_classes=sizes.vocabulary).to(memory_format=torch.channels_last)


def clip(sizes: Sizes) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    both = {
        "hidden_size": sizes.width,
        "intermediate_size": 4 * sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "projection_dim": sizes.width,
    }
    images = {"image_size": sizes.length, "patch_size": sizes.length // 7 if sizes.length > 64 else 8}
    tokens = {"vocab_size": sizes.vocabulary, "max_position_embeddings": 77, "eos_token_id": sizes.vocabulary - 1}
    return CLIPModel(CLIPConfig(text_config=both | tokens, vision_config=both | images, projection_dim=sizes.width))


def whisper(sizes: Sizes) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=sizes.width,
        encoder_layers=sizes.layers,
        decoder_layers=sizes.layers,
        encoder_attention_heads=sizes.heads,
        decoder_attention_heads=sizes.heads,
        encoder_ffn_dim=4 * sizes.width,
        decoder_ffn_dim=4 * sizes.width,
        vocab_size=sizes.vocabulary,
        max_source_positions=sizes.length // 2,
        max_target_positions=448,
        use_cache=sizes.cache,
        **without_special_tokens() | {"pad_token_id": 0},
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config)


def wav2vec2(sizes: Sizes) -> nn.Module:
    """Masks are drawn on the host, as transformers does by default. Layers are not left out at random."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    tiny = {"conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    config = Wav2Vec2Config(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=4 * sizes.width,
        vocab_size=sizes.vocabulary,
        layerdrop=0.0,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
        mask_time_length=10 if sizes.width > 64 else 2,
        **(tiny if sizes.width <= 64 else {}),
    )
    return Wav2Vec2ForCTC(config)


def vision_language(sizes: Sizes) -> nn.Module:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    head = sizes.width // sizes.heads
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_interleaved": True}
    quarter = head // 8
    rope["mrope_section"] = [head // 2 - 2 * quarter, quarter, quarter]
    text = decoder_sizes(sizes) | {"intermediate_size": 3 * sizes.width, "head_dim": head, "rope_parameters": rope}
    vision = {
        "depth": sizes.layers,
        "hidden_size": sizes.width // 2,
        "intermediate_size": 2 * sizes.width,
        "num_heads": sizes.heads // 2,
        "patch_size": 16,
        "out_hidden_size": sizes.width,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, sizes.layers // 2],
    }
    special = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **special))


def unet(sizes: Sizes) -> nn.Module:
    return UNet(sizes.width, levels=sizes.layers, blocks=2 if sizes.width > 64 else 1)


def dit(sizes: Sizes) -> nn.Module:
    return DiffusionTransformer(sizes.width, sizes.layers, sizes.heads, sizes.length, sizes.vocabulary)


# -- modules that a training step calls one after another


def encoder_of(sizes: Sizes) -> nn.Module:
    width, heads = sizes.width, sizes.heads
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False)


def parts(sizes: Sizes) -> Modules:
    return {
        "embedding": nn.Embedding(sizes.vocabulary, sizes.width),
        "encoder": encoder_of(sizes),
        "head": nn.Linear(sizes.width, sizes.vocabulary),
    }


def wrapped_parts(sizes: Sizes) -> nn.Module:
    return nn.Sequential(*parts(sizes).values())


def encoder_decoder(sizes: Sizes) -> Modules:
    width, heads = sizes.width, sizes.heads
    layer = nn.TransformerDecoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
    return parts(sizes) | {"decoder": nn.TransformerDecoder(layer, sizes.layers)}


def graph_net(sizes: Sizes) -> nn.Module:
    return GraphNet(sizes.width, sizes.layers)


# -- random data


def tokens(sizes: Sizes, generator: Generator, index: int) -> Tensor:
    return torch.randint(10, sizes.vocabulary, (sizes.batch, sizes.length_of(index)), generator=generator)


def next_tokens(sizes: Sizes, generator: Generator, index: int) -> Batch:
    ids = tokens(sizes, generator, index)
    return {"input_ids": ids, "labels": ids}


def padded(sizes: Sizes, generator: Generator, index: int) -> Batch:
    """Tokens of sentences, of which one has the full length."""
    ids = tokens(sizes, generator, index)
    ends = torch.randint(ids.shape[1] // 4, ids.shape[1], (sizes.batch, 1), generator=generator)
    ends[0] = ids.shape[1]
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < ends).long()}


def masked_tokens(sizes: Sizes, generator: Generator, index: int) -> Batch:
    batch = padded(sizes, generator, index)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    hidden = (torch.rand(ids.shape, generator=generator) < 0.15) & mask.bool()
    return batch | {"input_ids": ids.where(~hidden, 3), "labels": ids.where(hidden, -100)}


def pairs(sizes: Sizes, generator: Generator, index: int) -> Batch:
    left, right = padded(sizes, generator, index), padded(sizes, generator, index + 1)
    return {"left": left, "right": right}


def pixels(sizes: Sizes, generator: Generator, channels: int = 3) -> Tensor:
    return torch.randn(sizes.batch, channels, sizes.length, sizes.length, generator=generator)


def labelled_images(sizes: Sizes, generator: Generator, index: int) -> Batch:
    images = pixels(sizes, generator)
    return {"images": images, "labels": torch.randint(sizes.vocabulary, (sizes.batch,), generator=generator)}


def noised_images(sizes: Sizes, generator: Generator, index: int) -> Batch:
    return {
        "images": pixels(sizes, generator),
        "noise": pixels(sizes, generator),
        "step": torch.randint(1000, (sizes.batch,), generator=generator),
    }


def noised_latents(sizes: Sizes, generator: Generator, index: int) -> Batch:
    return {
        "images": pixels(sizes, generator, 4),
        "noise": pixels(sizes, generator, 4),
        "step": torch.randint(1000, (sizes.batch,), generator=generator),
        "label": torch.randint(sizes.vocabulary, (sizes.batch,), generator=generator),
    }


def captioned_images(sizes: Sizes, generator: Generator, index: int) -> Batch:
    ids = torch.randint(10, sizes.vocabulary - 1, (sizes.batch, 77), generator=generator)
    ids[:, -1] = sizes.vocabulary - 1
    return {"input_ids": ids, "pixel_values": pixels(sizes, generator), "return_loss": True}


def spectrograms(sizes: Sizes, generator: Generator, index: int) -> Batch:
    ids = torch.randint(10, sizes.vocabulary, (sizes.batch, 128), generator=generator)
    return {"input_features": torch.randn(sizes.batch, 80, sizes.length, generator=generator), "labels": ids}


def sound(sizes: Sizes, generator: Generator, index: int) -> Batch:
    ids = torch.randint(1, sizes.vocabulary, (sizes.batch, 6), generator=generator)
    return {"input_values": torch.randn(sizes.batch, sizes.length_of(index), generator=generator), "labels": ids}


def images_in_text(sizes: Sizes, generator: Generator, index: int) -> Batch:
    """One image of 8x8 patches and more, which makes a quarter as many tokens, at the begin of each text."""
    ids, side = tokens(sizes, generator, index), 32 if sizes.width > 64 else 4
    images = (side // 2) ** 2
    ids[:, 0], ids[:, 1 : 1 + images], ids[:, 1 + images] = 7, 5, 8
    grid = torch.tensor([[1, side, side]] * sizes.batch)
    patches = torch.randn(sizes.batch * side**2, 3 * 2 * 16 * 16, generator=generator)
    kinds = (ids == 5).int()
    return {
        "input_ids": ids,
        "labels": ids.where(kinds == 0, -100),
        "pixel_values": patches,
        "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }


def graphs(sizes: Sizes, generator: Generator, index: int) -> Batch:
    """Graphs of different sizes, joined to one."""
    counts = torch.randint(sizes.length // 2, sizes.length, (sizes.batch,), generator=generator)
    ends = counts.cumsum(0)
    graph = torch.repeat_interleave(torch.arange(sizes.batch), counts)
    source = torch.arange(len(graph)).repeat(4)
    begin, count = (ends - counts)[graph[source]], counts[graph[source]]
    target = begin + (torch.rand(len(source), generator=generator) * count).long()
    return {
        "nodes": torch.randn(len(graph), 16, generator=generator),
        "edges": torch.stack([source, target]),
        "graph": graph,
        "graphs": sizes.batch,
        "labels": torch.randint(10, (sizes.batch,), generator=generator),
    }


# -- losses, of a LightningModule that has the modules as attributes


def own_loss(module: Any, batch: Batch) -> Tensor:
    return module.net(**batch).loss


def loss_of_known_arguments(module: Any, batch: Batch) -> Tensor:
    """Leave out what this version of transformers does not take."""
    known = inspect.signature(module.net.forward).parameters
    return module.net(**{name: value for name, value in batch.items() if name in known}).loss


def classified_images(module: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(module.net(batch["images"]).float(), batch["labels"])


def classified_channels_last(module: Any, batch: Batch) -> Tensor:
    images = batch["images"].contiguous(memory_format=torch.channels_last)
    return F.cross_entropy(module.net(images).float(), batch["labels"])


def predicted_noise(module: Any, batch: Batch) -> Tensor:
    share = torch.cos(batch["step"] / 1000 * (torch.pi / 2))[:, None, None, None]
    noised = share * batch["images"] + (1 - share.square()).sqrt() * batch["noise"]
    more = (batch["label"],) if "label" in batch else ()
    return F.mse_loss(module.net(noised, batch["step"], *more).float(), batch["noise"])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def wrapped_loss(module: Any, batch: Batch) -> Tensor:
    return cross_entropy(module.net(batch["input_ids"]), batch["labels"])


def parts_loss(module: Any, batch: Batch) -> Tensor:
    return cross_entropy(module.head(module.encoder(module.embedding(batch["input_ids"]))), batch["labels"])


def decoded_loss(module: Any, batch: Batch) -> Tensor:
    embedded = module.embedding(batch["input_ids"])
    mask = nn.Transformer.generate_square_subsequent_mask(embedded.shape[1], device=embedded.device)
    decoded = module.decoder(embedded, module.encoder(embedded), tgt_mask=mask, tgt_is_causal=True)
    return cross_entropy(module.head(decoded), batch["labels"])


def mean_pooled(module: Any, batch: Batch) -> Tensor:
    mask = batch["attention_mask"][..., None]
    hidden = module.net(**batch).last_hidden_state
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def contrastive_loss(module: Any, batch: Batch) -> Tensor:
    left, right = mean_pooled(module, batch["left"]), mean_pooled(module, batch["right"])
    return F.cross_entropy(20 * left.float() @ right.float().T, torch.arange(len(left), device=left.device))


def classified_graphs(module: Any, batch: Batch) -> Tensor:
    logits = module.net(batch["nodes"], batch["edges"], batch["graph"], batch["graphs"])
    return F.cross_entropy(logits.float(), batch["labels"])


# -- the table


@dataclass(frozen=True)
class Architecture:
    """A model with its data and loss.

    Attributes:
        make: returns the model, or the modules that a training step calls by their names.
        sizes: for a GPU.
        blocks: names of the classes that FSDP2 compiles and shards.
        inputs: returns the batch of a number.
        loss: of a LightningModule and a batch.
        tiny: sizes for the CPU.
    """

    make: Callable[[Sizes], nn.Module | Modules]
    sizes: Sizes
    blocks: tuple[str, ...]
    inputs: Callable[[Sizes, Generator, int], Batch] = next_tokens
    loss: Callable[[Any, Batch], Tensor] = own_loss
    tiny: Sizes = TINY


def _tiny(**changed: Any) -> Sizes:
    return replace(TINY, **changed)


_LLAMA = Sizes(24, 2048, 16, 32000, batch=2, length=2048)
_EXPERTS = Sizes(8, 1024, 16, 32000, batch=4, length=1024)
_PARTS = Sizes(12, 1024, 16, 32000, batch=4, length=512)
_LENGTHS, _FEW_LENGTHS = (512, 384, 448, 320), (32, 16, 24)
_ENCODER, _DECODER = "TransformerEncoderLayer", "TransformerDecoderLayer"

ARCHITECTURES = {
    "gpt2": Architecture(gpt2, Sizes(48, 1600, 25, 50257, batch=4, length=1024), ("GPT2Block",)),
    "small_gpt": Architecture(gpt2, Sizes(12, 768, 12, 50257, batch=4, length=512), ("GPT2Block",)),
    "llama": Architecture(llama, _LLAMA, ("LlamaDecoderLayer",)),
    "llama_checkpointed": Architecture(llama_checkpointed, replace(_LLAMA, batch=4), ("LlamaDecoderLayer",)),
    "convnext": Architecture(
        convnext,
        Sizes(36, 1536, 0, 1000, batch=64, length=224),
        ("ConvNeXtBlock",),
        labelled_images,
        classified_channels_last,
        _tiny(length=64),
    ),
    "vit": Architecture(
        vit,
        Sizes(32, 1280, 16, 1000, batch=64, length=224),
        ("Block",),
        labelled_images,
        classified_images,
    ),
    "t5": Architecture(t5, Sizes(12, 768, 12, 32128, batch=8, length=512), ("T5Block",)),
    "encoder_decoder": Architecture(encoder_decoder, _PARTS, (_ENCODER, _DECODER), loss=decoded_loss),
    "parts": Architecture(parts, _PARTS, (_ENCODER,), loss=parts_loss),
    "wrapped_parts": Architecture(wrapped_parts, _PARTS, (_ENCODER,), loss=wrapped_loss),
    "lora": Architecture(lora, replace(_LLAMA, layers=16), ("LlamaDecoderLayer",)),
    "lora_8b": Architecture(
        lora_on_llama3, Sizes(32, 4096, 32, 128256, batch=1, length=4096), ("LlamaDecoderLayer",), tiny=_tiny(width=128)
    ),
    "mixtral": Architecture(mixtral, _EXPERTS, ("MixtralDecoderLayer",)),
    "qwen3_moe": Architecture(qwen3_moe, _EXPERTS, ("Qwen3MoeDecoderLayer",)),
    "deepseek": Architecture(deepseek, _EXPERTS, ("DeepseekV3DecoderLayer",)),
    "gpt_oss": Architecture(gpt_oss, _EXPERTS, ("GptOssDecoderLayer",)),
    "whisper": Architecture(
        whisper,
        Sizes(12, 768, 12, 51865, batch=8, length=3000),
        ("WhisperEncoderLayer", "WhisperDecoderLayer"),
        spectrograms,
    ),
    "clip": Architecture(
        clip, Sizes(12, 768, 12, 49408, batch=128, length=224), ("CLIPEncoderLayer",), captioned_images
    ),
    "mamba2": Architecture(mamba2, Sizes(12, 768, 0, 50280, batch=2, length=512), ("Mamba2Block",)),
    "unet": Architecture(
        unet, Sizes(4, 128, 0, 0, batch=16, length=64), ("ResidualBlock",), noised_images, predicted_noise
    ),
    "dit": Architecture(
        dit, Sizes(12, 768, 12, 1000, batch=64, length=32), ("DiffusionBlock",), noised_latents, predicted_noise
    ),
    "sentences": Architecture(
        sentences,
        Sizes(12, 768, 12, 30522, batch=32, length=128, lengths=(128, 64, 96, 112)),
        ("BertLayer",),
        pairs,
        contrastive_loss,
        _tiny(lengths=_FEW_LENGTHS),
    ),
    "wav2vec2": Architecture(
        wav2vec2,
        Sizes(12, 768, 12, 32, batch=8, length=80000),
        ("Wav2Vec2EncoderLayer",),
        sound,
        tiny=_tiny(length=8000, vocabulary=32),
    ),
    "graph_net": Architecture(
        graph_net,
        Sizes(8, 512, 0, 0, batch=32, length=128),
        ("MessagePassing",),
        graphs,
        classified_graphs,
    ),
    "gemma": Architecture(gemma, Sizes(12, 1152, 4, 64000, batch=2, length=2048), ("Gemma3DecoderLayer",)),
    "vision_language": Architecture(
        vision_language,
        Sizes(12, 1024, 16, 32000, batch=4, length=1024),
        ("Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"),
        images_in_text,
        loss_of_known_arguments,
    ),
    "masked_lm": Architecture(
        masked_lm,
        Sizes(12, 1024, 16, 30522, batch=16, length=512, lengths=_LENGTHS),
        ("BertLayer",),
        masked_tokens,
        tiny=_tiny(lengths=_FEW_LENGTHS),
    ),
}
