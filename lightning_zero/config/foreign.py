"""What arguments of other strategies are here: whoever comes from there passes them first."""

from __future__ import annotations

__all__ = ["FOREIGN"]

_NO_POLICY = (
    "There is no wrap policy: every parameter is sharded by itself, and layers that are alike are compiled once."
)
_OFFLOAD = (
    "Pass offload=('optimizer',): the optimizer's state lies in pinned memory of the host, and the device steps; "
    "with 'parameters' beside it so do the float32 weights of mixed precision. Gradients stay on the device."
)
_NO_DISKS = "Nothing can lie on disks; in the host's memory what offload= names."
_BUCKETS = "Sizes of transfers are tuning=Tuning(gather_group_mb=..., reduce_bucket_mb=...), and seldom need to change."
_COMPUTE = (
    "Pass precision= to the Trainer ('bf16-mixed', 'bf16-true', ...), and reduce_dtype= for gradients on the wire."
)
_STAGE = "Pass stage=1, 2 or 3 (the default)."
_RECOMPUTE = (
    "Use activation_memory_budget= (0 to 1), torch.utils.checkpoint in the model, or gradient_checkpointing_enable()."
)
_SHARDING = (
    "What is sharded is so over all ranks: 'FULL_SHARD' is the default, 'SHARD_GRAD_OP' is "
    "reshard_after_forward=False (stage=2 keeps weights from one optimizer step to the next), and with several hosts "
    "the weights that compiled code reads lie on each host (Tuning(compute_shard_group=...)); 'HYBRID_SHARD' is "
    "Tuning(replicate_over='hosts')."
)
_MESH = (
    "Sharding is over all ranks; hosts are found out, see tuning=Tuning(ranks_per_host=..., compute_shard_group=..., "
    "replicate_over=...)."
)
_LOSS_SCALE = "Pass plugins=MixedPrecision('16-mixed', 'cuda', GradScaler(...)) to the Trainer, as elsewhere."

# FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy, DDPStrategy; torch's own words where these pass them on.
FOREIGN = (
    {
        "auto_wrap_policy": _NO_POLICY,
        "wrap_policy": _NO_POLICY,
        "ignored_modules": "Every parameter is sharded; freeze what is not to be trained by requires_grad_(False).",
        "use_orig_params": "Parameters always stay the objects that they were.",
        "limit_all_gathers": "Graph passes place gathers; tuning=Tuning(prefetch_mb=...) limits what is in flight.",
        "forward_prefetch": "Gathers start ahead of their use; tuning=Tuning(prefetch=False) turns that off.",
        "backward_prefetch": "Gathers start ahead of their use; tuning=Tuning(prefetch=False) turns that off.",
        "sync_module_states": "Rank 0's initial values are always those of all ranks.",
        "cpu_offload": _OFFLOAD,
        "offload_policy": _OFFLOAD,
        "offload_optimizer": _OFFLOAD,
        "offload_parameters": _OFFLOAD,
        "offload_params_device": _OFFLOAD,
        "offload_optimizer_device": _OFFLOAD,
        "nvme_path": _NO_DISKS,
        "mixed_precision": _COMPUTE,
        "mp_policy": _COMPUTE,
        "sharding_strategy": _SHARDING,
        "device_mesh": _MESH,
        "mesh": _MESH,
        "data_parallel_size": _MESH,
        "tensor_parallel_size": "There is no tensor parallelism here; ModelParallelStrategy has it.",
        "activation_checkpointing": _RECOMPUTE,
        "activation_checkpointing_policy": _RECOMPUTE,
        "partition_activations": _RECOMPUTE,
        "cpu_checkpointing": _RECOMPUTE,
        "save_distributed_checkpoint": "Pass state_dict_type='sharded'; True there is that, False is 'full'.",
        "zero_optimization": _STAGE,
        "config": "There is no configuration file: each option is an argument.",
        "bucket_cap_mb": _BUCKETS,
        "allgather_bucket_size": _BUCKETS,
        "reduce_bucket_size": _BUCKETS,
        "prefetch_bucket_size": _BUCKETS,
        "max_live_parameters": "Pass tuning=Tuning(prefetch_mb=..., unsharded_cache_mb=...).",
        "param_persistence_threshold": "Pass tuning=Tuning(unsharded_cache_mb=...): so many MiB stay until backward.",
        "overlap_comm": "Transfers always run beside what the model computes.",
        "contiguous_gradients": "Gradients always lie in one piece of memory.",
        "find_unused_parameters": "Steps may always leave parameters out; leave the argument out, too.",
        "static_graph": "Nothing need be said about the graph; leave the argument out.",
        "gradient_as_bucket_view": "Gradients always lie in one piece of memory; leave the argument out.",
        "ddp_comm_hook": "There are no hooks on communication; reduce_dtype= chooses what gradients travel in.",
        "ddp_comm_state": "There are no hooks on communication; reduce_dtype= chooses what gradients travel in.",
        "ddp_comm_wrapper": "There are no hooks on communication; reduce_dtype= chooses what gradients travel in.",
        "start_method": "Processes are started by the Trainer as scripts, or by torchrun; leave the argument out.",
        "loss_scale": _LOSS_SCALE,
        "initial_scale_power": _LOSS_SCALE,
        "loss_scale_window": _LOSS_SCALE,
        "hysteresis": _LOSS_SCALE,
        "min_loss_scale": _LOSS_SCALE,
        "zero_allow_untested_optimizer": "Any elementwise optimizer may be used; others are refused by name.",
        "load_full_weights": "Checkpoints of either kind are found out when they are loaded; leave the argument out.",
        "exclude_frozen_parameters": "Checkpoints hold all parameters; remove entries in on_save_checkpoint().",
        "logging_batch_size_per_gpu": "The batch size is the data loader's; leave the argument out.",
        "remote_device": "Parameters are made on each rank's device, or by configure_model as shards.",
    }
    | dict.fromkeys(
        (
            *("params_buffer_count", "params_buffer_size", "max_in_cpu", "optimizer_buffer_count", "block_size"),
            *("queue_depth", "single_submit", "overlap_events", "thread_count", "pin_memory"),
        ),
        "Where what lies on the host passes through is Tuning(offload_buffer_mb=...), and nothing can lie on disks.",
    )
    | {
        "model_averaging_period": "Models are not averaged: all ranks train one.",
    }
)
