"""Modules and optimizers."""

from lightning_zero.compat.lookup import private
from lightning_zero.compat.patches import Patch

# All layers that torch.nn.SyncBatchNorm.convert_sync_batchnorm() would have replaced. (torch 2.11+)
BatchNorm = private("torch.nn.modules.batchnorm._BatchNorm")

# How the key ends under which a state dict holds what a module adds by itself: files of weights have none.
# (torch 2.11+)
extra_state_suffix = private("torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX")

# Has Dynamo run a function as it is where nobody traces it, and trace it where it is called by what is traced, which
# torch.compiler.disable would forbid. (torch 2.11+)
skip_code = private("torch._dynamo.eval_frame.skip_code")

# Hooks of register_optimizer_step_pre_hook, of all optimizers, behind which a step begins. (torch 2.11+)
global_pre_hooks = private("torch.optim.optimizer._global_optimizer_pre_hooks")

# Where modules keep hooks that only saving and loading call. (torch 2.11+)
STATE_DICT_HOOKS = {
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
}  # fmt: skip

CHECKPOINT_REGIONS = Patch(
    "a plan knows which regions torch.utils.checkpoint computes again",
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
    # What is registered. Reading it from the module would ask the property that gathers; Dynamo traces this, too.
    # (torch 2.11+)
    "torch.nn.Module._parameters",
    # What is registered, with buffers that are None. (torch 2.11+)
    "torch.nn.Module._buffers",
    # What is registered: a compiled child is replaced by what it was made from. (torch 2.11+)
    "torch.nn.Module._modules",
    # What calls of a module run instead of _call_impl; nn.Module.compile() sets it, but would take the compiled
    # function's place in pickles and for other arguments. (torch 2.11+)
    "torch.nn.Module._compiled_call_impl",
    # A call with hooks, and without _compiled_call_impl. (torch 2.11+)
    "torch.nn.Module._call_impl",
    # Hooks of a module's calls by their handles' ids, which no two hooks share: what is compiled is for those that were
    # there. (torch 2.11+)
    "torch.nn.Module._forward_hooks",
    # Likewise, before calls. (torch 2.11+)
    "torch.nn.Module._forward_pre_hooks",
    # Likewise, behind the backward of calls. (torch 2.11+)
    "torch.nn.Module._backward_hooks",
    # Likewise, before it. (torch 2.11+)
    "torch.nn.Module._backward_pre_hooks",
    # Hooks of register_state_dict_post_hook by their handles' ids: copies must not have ours. (torch 2.11+)
    "torch.nn.Module._state_dict_hooks",
    # Hooks of register_load_state_dict_pre_hook, likewise. (torch 2.11+)
    "torch.nn.Module._load_state_dict_pre_hooks",
    # A recurrent module's own list of its weights, which would be shards; made anew at each reading. (torch 2.11+)
    "torch.nn.RNNBase._flat_weights",
    # The names for that list. (torch 2.11+)
    "torch.nn.RNNBase._flat_weights_names",
    # Some modules' reset_parameters() is called so. (torch 2.11+)
    "torch.nn.MultiheadAttention._reset_parameters",
    # Buffers that a user has told DDP not to broadcast are not broadcast by us either. (torch 2.11+)
    "torch.nn.parallel.DistributedDataParallel._ddp_params_and_buffers_to_ignore",
    # Hooks of register_step_post_hook by their handles' ids, which has no `prepend`: ours must come before the user's.
    # (torch 2.11+)
    "torch.optim.Optimizer._optimizer_step_post_hooks",
    # Hooks of register_step_pre_hook, behind which a step begins. (torch 2.11+)
    "torch.optim.Optimizer._optimizer_step_pre_hooks",
    # What checkpoint() asks: a generator, advanced once before the function runs and once after; put aside where its
    # regions are wanted, and no second computation. (torch 2.11+)
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
    # Where a loss scaler notes whether gradients overflowed; we leave the decision to the device. (torch 2.11+)
    "torch.amp.GradScaler._per_optimizer_states",
}
