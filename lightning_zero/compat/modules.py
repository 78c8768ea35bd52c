"""Modules and optimizers."""

from typing import Any

from lightning_zero.compat.lookup import Absent, private
from lightning_zero.compat.patches import Patch

# Suffix of the key under which a state dict stores a module's extra state; weight files have none. (torch 2.11+)
extra_state_suffix = private("torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX")

# Has Dynamo skip a function as a frame, but trace it in traced callers, which torch.compiler.disable would forbid.
# (torch 2.11+)
skip_code = private("torch._dynamo.eval_frame.skip_code")


def skip_frame(function: Any) -> None:
    """Let Dynamo skip a Python function as a frame, where this torch can."""
    if not isinstance(skip_code, Absent):
        skip_code(function.__code__)


# Hooks of register_optimizer_step_pre_hook for all optimizers; a step begins after them. (torch 2.11+)
global_pre_hooks = private("torch.optim.optimizer._global_optimizer_pre_hooks")
# Hooks of register_optimizer_step_post_hook for all optimizers, which may read gradients. (torch 2.11+)
global_post_hooks = private("torch.optim.optimizer._global_optimizer_post_hooks")

# Attributes with hooks that only saving and loading call. (torch 2.11+)
STATE_DICT_HOOKS = {
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
}  # fmt: skip

CHECKPOINT_REGIONS = Patch(
    "a plan knows which regions torch.utils.checkpoint recomputes",
    {
        # Runs before and after a region that is not reentrant. (torch 2.11+)
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator": (
            "fn, preserve_rng_state, context_fn, determinism_check, debug, early_stop, *args, **kwargs",
            "fn, preserve_rng_state, context_fn, determinism_check, debug, early_stop, *args, "
            "respect_saved_tensors_hooks, **kwargs",
        ),
        # Runs a reentrant one.
        "torch.utils.checkpoint.CheckpointFunction": None,
    },
)

ATTRIBUTES = {
    # Registered parameters. Reading one from the module would call the property that gathers. (torch 2.11+)
    "torch.nn.Module._parameters",
    # Registered buffers, including those that are None. (torch 2.11+)
    "torch.nn.Module._buffers",
    # Registered children: a compiled child is replaced by its original. (torch 2.11+)
    "torch.nn.Module._modules",
    # Called instead of _call_impl. nn.Module.compile() sets it too, but pickles the compiled function. (torch 2.11+)
    "torch.nn.Module._compiled_call_impl",
    # A call with hooks and without _compiled_call_impl. (torch 2.11+)
    "torch.nn.Module._call_impl",
    # Hooks of calls by their handles' ids, which are unique: compiled code is for the hooks at that time. (torch 2.11+)
    "torch.nn.Module._forward_hooks",
    # Hooks before calls. (torch 2.11+)
    "torch.nn.Module._forward_pre_hooks",
    # Hooks after the backward of calls. (torch 2.11+)
    "torch.nn.Module._backward_hooks",
    # Hooks before the backward of calls. (torch 2.11+)
    "torch.nn.Module._backward_pre_hooks",
    # Hooks of register_state_dict_post_hook: copies must not have ours. (torch 2.11+)
    "torch.nn.Module._state_dict_hooks",
    # Hooks of register_load_state_dict_pre_hook: copies must not have ours. (torch 2.11+)
    "torch.nn.Module._load_state_dict_pre_hooks",
    # A recurrent module's list of its weights, which would be shards; rebuilt at each read. (torch 2.11+)
    "torch.nn.RNNBase._flat_weights",
    # The names in that list. (torch 2.11+)
    "torch.nn.RNNBase._flat_weights_names",
    # The reset_parameters() of this module. (torch 2.11+)
    "torch.nn.MultiheadAttention._reset_parameters",
    # Buffers that a user excludes from DDP's broadcasts, and from ours. (torch 2.11+)
    "torch.nn.parallel.DistributedDataParallel._ddp_params_and_buffers_to_ignore",
    # Hooks of register_step_post_hook, which cannot prepend: ours must run before the user's. (torch 2.11+)
    "torch.optim.Optimizer._optimizer_step_post_hooks",
    # Hooks of register_step_pre_hook; a step begins after them. (torch 2.11+)
    "torch.optim.Optimizer._optimizer_step_pre_hooks",
    # The loss scaler's note of overflowed gradients; we leave the decision on the device. (torch 2.11+)
    "torch.amp.GradScaler._per_optimizer_states",
}
