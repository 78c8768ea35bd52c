"""Map arguments of other strategies to their equivalent here, for the error about an unknown option.

The names are those of FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy and DDPStrategy, and torch's if these
strategies pass them on.
"""

from __future__ import annotations

# Names, separated by spaces, and their hint.
_HINTS = (
    (
        "auto_wrap_policy wrap_policy",
        "There is no wrap policy: every parameter is sharded on its own, and repeated layers are compiled once.",
    ),
    ("ignored_modules", "Every parameter is sharded; freeze parameters with requires_grad_(False)."),
    ("use_orig_params", "Parameters always stay the same objects."),
    ("limit_all_gathers", "Graph passes place gathers; tuning=Tuning(prefetch_mb=...) limits those in flight."),
    (
        "forward_prefetch backward_prefetch",
        "Gathers start ahead of their use; tuning=Tuning(prefetch=False) turns that off.",
    ),
    ("sync_module_states", "All ranks always start from rank 0's initial values."),
    (
        "cpu_offload offload_policy offload_optimizer offload_parameters offload_params_device "
        "offload_optimizer_device",
        "Pass offload=('optimizer',): optimizer state is stored in pinned host memory, and the step runs on the "
        "device; add 'parameters' for the float32 master weights of mixed precision. Gradients stay on the "
        "device.",
    ),
    ("nvme_path", "There is no offload to disk; offload= names the state that is stored in host memory."),
    (
        "mixed_precision mp_policy",
        "Pass precision= to the Trainer ('bf16-mixed', 'bf16-true', ...), and reduce_dtype= for the dtype of "
        "gradient reduction.",
    ),
    (
        "sharding_strategy",
        "State is sharded over all ranks: 'FULL_SHARD' is the default, 'SHARD_GRAD_OP' is "
        "reshard_after_forward=False (stage=2 keeps weights from one optimizer step to the next). With several "
        "hosts, the weights that compiled code reads are sharded within each host "
        "(Tuning(compute_shard_group=...)); 'HYBRID_SHARD' is Tuning(replicate_over='hosts').",
    ),
    (
        "device_mesh mesh data_parallel_size",
        "Sharding is over all ranks; hosts are detected, see tuning=Tuning(ranks_per_host=..., "
        "compute_shard_group=..., replicate_over=...).",
    ),
    ("tensor_parallel_size", "There is no tensor parallelism here; ModelParallelStrategy has it."),
    (
        "activation_checkpointing activation_checkpointing_policy partition_activations cpu_checkpointing",
        "Use activation_memory_budget= (0 to 1), torch.utils.checkpoint in the model, or "
        "gradient_checkpointing_enable().",
    ),
    ("save_distributed_checkpoint", "Pass state_dict_type='sharded' for True, and 'full' for False."),
    ("zero_optimization", "Pass stage=1, 2 or 3 (the default)."),
    ("config", "There is no configuration file: each option is an argument."),
    (
        "bucket_cap_mb allgather_bucket_size reduce_bucket_size prefetch_bucket_size",
        "Sizes of transfers are tuning=Tuning(gather_group_mb=..., reduce_bucket_mb=...), and seldom need to change.",
    ),
    ("max_live_parameters", "Pass tuning=Tuning(prefetch_mb=..., unsharded_cache_mb=...)."),
    ("param_persistence_threshold", "Pass tuning=Tuning(unsharded_cache_mb=...), the MiB that stay until backward."),
    ("overlap_comm", "Communication always overlaps with compute."),
    ("contiguous_gradients", "Gradients are always contiguous in memory."),
    ("find_unused_parameters", "Steps may always leave parameters unused; leave the argument out."),
    ("static_graph", "The graph needs no declaration; leave the argument out."),
    ("gradient_as_bucket_view", "Gradients are always contiguous in memory; leave the argument out."),
    (
        "ddp_comm_hook ddp_comm_state ddp_comm_wrapper",
        "There are no communication hooks; reduce_dtype= sets the dtype of gradient reduction.",
    ),
    ("start_method", "The Trainer starts processes as scripts, or torchrun does; leave the argument out."),
    (
        "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale",
        "Pass plugins=MixedPrecision('16-mixed', 'cuda', GradScaler(...)) to the Trainer, as elsewhere.",
    ),
    ("zero_allow_untested_optimizer", "Any elementwise optimizer works; others are refused by name."),
    ("load_full_weights", "The kind of a checkpoint is detected when it is loaded; leave the argument out."),
    ("exclude_frozen_parameters", "Checkpoints hold all parameters; remove entries in on_save_checkpoint()."),
    ("logging_batch_size_per_gpu", "The batch size is the data loader's; leave the argument out."),
    ("remote_device", "Parameters are created on each rank's device, or as shards by configure_model."),
    (
        "params_buffer_count params_buffer_size max_in_cpu optimizer_buffer_count block_size queue_depth "
        "single_submit overlap_events thread_count pin_memory",
        "The staging buffer for offloaded state is Tuning(offload_buffer_mb=...); there is no offload to disk.",
    ),
    ("model_averaging_period", "Models are not averaged: all ranks train one."),
)
MIGRATION_HINTS = {name: hint for names, hint in _HINTS for name in names.split()}
