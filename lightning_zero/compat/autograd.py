"""What autograd and the transforms of ``torch.func`` are doing at this moment, which no public function tells."""

from lightning_zero.compat.lookup import private

# Whether a backward runs on this thread (-1: none): a checkpointed module is called again inside it. (torch 2.11+)
graph_task_id = private("torch._C._current_graph_task_id")

# Whether the backward that runs leaves its graph for another one (retain_graph=True), for which compiled code has to
# keep what it saved. (torch 2.11+)
retains_graph = private("torch._C._autograd._get_current_graph_task_keep_graph")

# Whether a user's hooks for saved tensors lie on top of ours, which then must stay where they are. (torch 2.11+)
top_saved_tensors_hooks = private("torch._C._autograd._top_saved_tensors_default_hooks")

# Whether the caller is inside torch.func (grad, vmap, ...), where compiled code cannot run. (torch 2.11+)
inside_functorch = private("torch._C._are_functorch_transforms_active")

# Whether a tensor stands for another one inside torch.func; a shard behind it must be recognised. (torch 2.11+)
is_functorch_wrapped = private("torch._C._functorch.is_functorch_wrapped_tensor")

# What that other tensor is. (torch 2.11+)
functorch_unwrapped = private("torch._C._functorch.get_unwrapped")

# Buffers are broadcast between a forward and its backward, as DDP does it, without spoiling what autograd has saved.
# (torch 2.11+)
preserve_versions = private("torch.autograd._unsafe_preserve_version_counter")
