"""Options by their names alone, wherever they belong."""

from datetime import timedelta
from typing import Any

import torch

from lightning_zero.config import EngineConfig, Tuning
from lightning_zero.config.engine_config import DTYPES
from lightning_zero.config.schema import option_fields

WORDS = {dtype: word for word, dtype in DTYPES.items()}


def arguments(**chosen: Any) -> dict[str, Any]:
    """As ``ZeroStrategy`` takes them: those of ``Tuning`` in one."""
    inside = {name: value for name, value in chosen.items() if name in option_fields(Tuning)}
    outside = {name: value for name, value in chosen.items() if name not in inside}
    return outside | ({"tuning": Tuning(**inside)} if inside else {})


def config(**chosen: Any) -> EngineConfig:
    """An engine's. ``reduce_dtype`` may be a dtype."""
    if isinstance(chosen.get("reduce_dtype"), torch.dtype):
        chosen["reduce_dtype"] = WORDS[chosen["reduce_dtype"]]
    return EngineConfig(**arguments(**chosen))


def _again(op: str, nbytes: int, path: str) -> bool | None:
    return None


# For each option a value that is not its default.
OTHERS: dict[str, Any] = {
    "compile": False,
    "cuda_graphs": False,
    "stage": 2,
    "reshard_after_forward": False,
    "memory": 1000.0,
    "activation_memory_budget": 0.5,
    "offload": ("optimizer",),
    "reduce_dtype": "bf16",
    "linear_dtype": "fp8",
    "frozen_dtype": "nf4",
    "frozen_exclude": ("*.head.weight",),
    "fp8_products": ("forward",),
    "fp8_exclude": ("*.head.weight",),
    "fp8_min_gain": 2.0,
    "fp8_gradient_format": "e4m3",
    "fp8_recipe": "rowwise",
    "fp8_health_every": 5,
    "fp8_shards": True,
    "broadcast_buffers": False,
    "state_dict_type": "sharded",
    "async_save": True,
    "timeout": timedelta(seconds=77),
    "process_group_backend": "mpi",
    "unsharded_cache_mb": 0.02,
    "unsharded_cache_until": "step",
    "recompute": _again,
    "offload_buffer_mb": 1.0,
    "state_dtype": "bf16",
    "bf16_stochastic_round": True,
    "offload_activations_mb": 1.0,
    "free_reduce_buckets": True,
    "grad_aliasing": True,
    "prefetch": False,
    "prefetch_mb": 1.0,
    "gather_group_mb": 1.0,
    "reduce_group_mb": 1.0,
    "reduce_bucket_mb": 1.0,
    "matrix_bucket_mb": 128.0,
    "reduce_double_buffer": False,
    "gather_transport": "collective",
    "reduce_transport": "copy",
    "ranks_per_host": 1,
    "compute_shard_group": "all",
    "replicate_over": "hosts",
    "cross_host_reduce": "step",
    "consensus_timeout_s": 7.0,
    "cuda_graph_step": False,
    "cuda_graph_model": False,
    "compile_backend": "aot_eager",
    "compile_dynamic": True,
    "compile_whole_graphs": True,
    "report_stall_after_s": 7.0,
    "sync_collectives": True,
    "nan_fill": True,
    "emulate_cross_host_gb_per_s": 1000.0,
    "emulate_cuda_graph_step": True,
    "emulate_cuda_graph_model": True,
    "share_capture_memory": False,
}
