"""Tensors, their subclasses, and containers of them."""

from lightning_zero.compat.lookup import private

# While a graph is traced, the derivative of a gather has to return a gradient instead of keeping it. (torch 2.11+)
FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor")

# Inside, tensors have shapes and no memory: what a plan is made on. (torch 2.11+)
FakeTensorMode = private("torch._subclasses.fake_tensor.FakeTensorMode")

# Inside, no mode sees what is done: those that count, fake and trace lie one on the other. (torch 2.11+)
no_dispatch_modes = private("torch.utils._python_dispatch._disable_current_modes")

# The same, while AOTAutograd traces: it wraps the fake ones. (torch 2.11+)
FunctionalTensor = private("torch._subclasses.functional_tensor.FunctionalTensor")

# Inside, torch looks for no way of Python's to run an op, as it does while a graph with symbols is traced: what only
# makes a tensor takes a third of the time. (torch 2.11+)
no_python_dispatcher = private("torch._C._DisablePythonDispatcher")

# Inside, shards are plain tensors: torch asks no subclass. torch's notes on extending it name it. (torch 2.11+)
DisableTorchFunctionSubclass = private("torch._C.DisableTorchFunctionSubclass")

# Inside, torch asks no mode either (torch.set_default_device is one), which Dynamo would follow without end.
# (torch 2.11+)
DisableTorchFunction = private("torch._C.DisableTorchFunction")

# A subclass with this in the place of __torch_function__ gives plain tensors as results. (torch 2.11+)
disabled_torch_function = private("torch._C._disabled_torch_function_impl")

# How a pickled nn.Parameter is made again: a file must not name our subclass. (torch 2.11+)
rebuild_parameter = private("torch._utils._rebuild_parameter")

# Many small copies in one kernel. (torch 2.11+)
foreach_copy = private("torch._foreach_copy_")

# Many small norms in one kernel. (torch 2.11+)
foreach_norm = private("torch._foreach_norm")

# The tensors anywhere in what a module returned; torch has no public name for its trees. (torch 2.11+)
tree_leaves = private("torch.utils._pytree.tree_leaves")

# Likewise, with what it takes to build the same containers again. (torch 2.11+)
tree_flatten = private("torch.utils._pytree.tree_flatten")

# Builds them. (torch 2.11+)
tree_unflatten = private("torch.utils._pytree.tree_unflatten")

# The same containers of other values. (torch 2.11+)
tree_map = private("torch.utils._pytree.tree_map")

# The arguments of a node with symbolic sizes replaced, for torch's own formulas of floating-point operations.
# (torch 2.11+)
tree_map_only = private("torch.utils._pytree.tree_map_only")

# A tensor that has a shape and a dtype, and asks its class for everything else: what a checkpoint's values are before
# they are read. torch's notes on extending it name it. (torch 2.11+)
make_wrapper_subclass = private("torch.Tensor._make_wrapper_subclass")

# Sees every op that runs eagerly inside of it, in backward passes, too. torch's notes on extending it name it.
# (torch 2.11+)
TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")

ATTRIBUTES = {
    # Takes kernels away again that were registered for a while. (torch 2.11+)
    "torch.library.Library._destroy",
    # How often a tensor was written to in place: what a saved weight or a captured graph's input is checked by.
    # (torch 2.11+)
    "torch.Tensor._version",
    # What a view is a view of; a saved view of a weight is made again from it. (torch 2.11+)
    "torch.Tensor._base",
    # Hooks of register_hook: whether a parameter has any; and None takes away those of C++, too. (torch 2.11+)
    "torch.Tensor._backward_hooks",
    # The same for register_post_accumulate_grad_hook. (torch 2.11+)
    "torch.Tensor._post_accumulate_grad_hooks",
    # Which storage a fake tensor has: it has no address. (torch 2.11+)
    "torch.UntypedStorage._cdata",
    # Functions of torch on lists of tensors: only this beginning of their names tells. (torch 2.11+)
    "torch._foreach_",
    # Fused ones of optimizers, likewise. (torch 2.11+)
    "torch._fused_",
}
