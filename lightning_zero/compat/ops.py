"""Ops of the dispatcher, as they stand in graphs. Not all of them have a public name."""

from lightning_zero.compat.lookup import private

# The type of what a node of a graph calls. (torch 2.11+)
OpOverload = private("torch._ops.OpOverload")

# An op with all its overloads. (torch 2.11+)
OpOverloadPacket = private("torch._ops.OpOverloadPacket")

# Tensor.to() in graphs. (torch 2.11+)
to_copy = private("torch.ops.aten._to_copy.default")

# What a matrix product of more than two dimensions makes of Tensor.view(). (torch 2.11+)
unsafe_view = private("torch.ops.aten._unsafe_view.default")

# Ends a functional collective: where graphs of users' own collectives wait. (torch 2.11+)
wait_tensor = private("torch.ops._c10d_functional.wait_tensor.default")

# Attention, for which torch has a formula of floating-point operations. (torch 2.11+)
flash_attention = private("torch.ops.aten._scaled_dot_product_flash_attention")

# Its derivative, likewise. (torch 2.11+)
flash_attention_backward = private("torch.ops.aten._scaled_dot_product_flash_attention_backward")

# The same on the CPU, for which torch has none. (torch 2.11+)
flash_attention_on_cpu = private("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu")

# Its derivative, likewise. (torch 2.11+)
flash_attention_on_cpu_backward = private("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")

# Where Inductor's random numbers come from: their places in a list differ between equal layers. (torch 2.11+)
inductor_seeds = {private(f"torch._inductor.inductor_prims.{name}") for name in ("seed", "seeds", "lookup_seed")}

# The list itself. (torch 2.11+)
draw_seeds = private("torch._inductor.inductor_prims.seeds")

# Calls in Dynamo's graphs of what is inside torch.utils.checkpoint: the graph of it, then its inputs. (torch 2.11+)
CHECKPOINTS = {
    private(f"torch.ops.higher_order.{name}") for name in ("tag_activation_checkpoint", "wrap_activation_checkpoint")
}

# Calls there of users' autograd functions: the graphs of forward and backward, then their inputs. (torch 2.11+)
function_call = private("torch.ops.higher_order.autograd_function_apply")

ATTRIBUTES = {
    # Its name after the dot: an op is pickled by its names. (torch 2.11+)
    "torch._ops.OpOverload._overloadname",
    # Which arguments an op writes to, or returns views of. (torch 2.11+)
    "torch._ops.OpOverload._schema",
    # The namespace of torch's functional collectives. (torch 2.11+)
    "torch.ops._c10d_functional",
}
