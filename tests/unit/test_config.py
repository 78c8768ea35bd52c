"""Options check themselves, and say what to pass instead."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from lightning_zero.config import CompileConfig, EngineConfig, ReduceConfig
from lightning_zero.integrations.trainer.strategy import ZeroStrategy

# What is built, with which arguments, and what the message says.
WRONG = [
    (ReduceConfig, {"bucket_mb": 0}, r"bucket_mb=0 must be a positive number of MiB\. Try 64"),
    (ReduceConfig, {"bucket_mb": -1.5}, r"bucket_mb=-1\.5 must be a positive"),
    (ReduceConfig, {"bucket_mb": math.nan}, r"bucket_mb=nan must be a positive"),
    (ReduceConfig, {"bucket_mb": math.inf}, r"bucket_mb=inf must be a positive"),
    (ReduceConfig, {"bucket_mb": "64"}, r"bucket_mb='64' must be a positive"),
    (ReduceConfig, {"dtype": torch.int8}, r"reduce_dtype=torch\.int8 is no floating point type\. Try torch\.bfloat16"),
    (EngineConfig, {"gather_by": "mail"}, r"gather_by='mail' must be 'auto', 'collective' or 'copy'"),
    (EngineConfig, {"capture_step": "yes"}, r"capture_step='yes' must be True, False or 'auto'"),
    (CompileConfig, {"backend": "eager"}, r"compile_backend='eager' is unknown\. Choose one of inductor, aot_eager"),
    (CompileConfig, {"gather_group_mb": 0}, r"gather_group_mb=0 must be a positive number of MiB\. Try 128"),
    (CompileConfig, {"gather_group_mb": math.nan}, r"gather_group_mb=nan must be a positive"),
    (CompileConfig, {"gather_group_mb": math.inf}, r"gather_group_mb=inf must be a positive"),
    (CompileConfig, {"gather_group_mb": "128"}, r"gather_group_mb='128' must be a positive"),
    (CompileConfig, {"prefetch_mb": 0}, r"prefetch_mb=0 must be a positive number of MiB\. Try 256"),
    (CompileConfig, {"prefetch_mb": math.inf}, r"prefetch_mb=inf must be a positive"),
    (CompileConfig, {"reduce_group_mb": 0}, r"reduce_group_mb=0 must be a positive number of MiB\. Try 64"),
    (CompileConfig, {"persist_mb": -1}, r"persist_mb=-1 must be a number of MiB: 0 to keep no weight"),
    (CompileConfig, {"persist_mb": math.nan}, r"persist_mb=nan must be a number of MiB"),
    (CompileConfig, {"persist_mb": "all"}, r"persist_mb='all' must be .*float\('inf'\) to keep all"),
    (CompileConfig, {"persist_mb": "Auto"}, r"persist_mb='Auto' must be .*or 'auto', for what the first steps leave"),
    (CompileConfig, {"persist_until": "epoch"}, r"persist_until='epoch' must be 'backward' or 'step'"),
    (CompileConfig, {"persist_until": "step"}, r"persist_until='step' keeps nothing without a budget.*Set persist_mb"),
    (CompileConfig, {"persist_until": "step", "persist_mb": 1, "prefetch": False}, r"leave prefetch on"),
    (CompileConfig, {"activation_memory_budget": 1.5}, r"activation_memory_budget=1\.5 must lie between 0"),
    (CompileConfig, {"activation_memory_budget": -0.1}, r"activation_memory_budget=-0\.1 must lie between 0"),
    (EngineConfig, {"agreement_timeout_s": 0}, r"agreement_timeout_s=0 must be a positive number of seconds\. Try 25"),
    (EngineConfig, {"agreement_timeout_s": math.inf}, r"agreement_timeout_s=inf must be a positive"),
    (ZeroStrategy, {"persist_until": "step"}, r"Set persist_mb"),
    (ZeroStrategy, {"agreement_timeout_s": -1}, r"agreement_timeout_s=-1 must be a positive"),
    (ZeroStrategy, {"reduce_dtype": "fp8"}, r"reduce_dtype='fp8' is unknown\. Choose one of 'bf16', '16', '32'"),
    (ZeroStrategy, {"reduce_dtype": torch.bfloat16}, r"reduce_dtype=torch\.bfloat16 is unknown\. Choose one of 'bf16'"),
    (ZeroStrategy, {"reduce_bucket_mb": 0}, r"bucket_mb=0 must be a positive"),
    (ZeroStrategy, {"compile_backend": "cudagraphs"}, r"compile_backend='cudagraphs' is unknown"),
    (ZeroStrategy, {"prefetch_mb": -1}, r"prefetch_mb=-1 must be a positive"),
    (ZeroStrategy, {"gather_group_mb": -1}, r"gather_group_mb=-1 must be a positive"),
]


@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    WRONG,
    ids=[f"{m.__name__}-{'-'.join(f'{k}={v}' for k, v in a.items())}" for m, a, _ in WRONG],
)
def test_a_wrong_option_is_refused_by_name_with_the_remedy(make: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**arguments)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_may_travel_in_any_floating_point_dtype(dtype: torch.dtype | None) -> None:
    assert ReduceConfig(dtype=dtype).dtype == dtype


def test_options_cannot_be_changed_behind_the_engines_back() -> None:
    for config in (EngineConfig(), EngineConfig().reduce, EngineConfig().compile):
        for field in dataclasses.fields(config):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(config, field.name, None)


def test_equal_options_are_equal() -> None:
    # An engine compiles again when these differ.
    assert EngineConfig() == EngineConfig(ReduceConfig(), CompileConfig())
    assert EngineConfig() != EngineConfig(compile=CompileConfig(dynamic=True))


def test_a_budget_that_is_to_be_measured_is_none_yet() -> None:
    assert CompileConfig(persist_mb="auto").persist_bytes == 0
    assert CompileConfig(persist_mb=1.5).persist_bytes == 1.5 * 2**20
    assert CompileConfig(persist_mb="auto", persist_until="step").persist_until == "step"
