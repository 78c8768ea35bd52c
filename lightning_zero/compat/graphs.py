"""Keys of ``Node.meta``, and names of calls in Dynamo's graphs, which torch documents nowhere."""

# A torch.utils.checkpoint.CheckpointPolicy, for the partitioner. (torch 2.11+)
RECOMPUTE = "recompute"

# The number of a checkpointed region; the partitioner reads policies only of nodes with one. (torch 2.11+)
AC_GRAPH_ID = "ac_graph_id"

# In the metadata of a checkpointed region's graph: makes the user's policy of saved tensors. (torch 2.11+)
CHECKPOINT_POLICY = "_checkpoint_context_fn"
# Its attribute that names it in caches; torch's error about a missing one documents it. (torch 2.13+)
CHECKPOINT_POLICY_HASH = "cache_hash"

# The side of the partition that a node must be in. (torch 2.11+)
PARTITIONER_TAG = "partitioner_tag"

# That side for nodes that enqueue gradients. (torch 2.11+)
MUST_BE_IN_BACKWARD = "must_be_in_backward"

# Prefix of the inputs of a backward graph, by which it is recognized. (torch 2.11+)
TANGENTS = "tangents"

# In Dynamo's graphs: a fake tensor for the result, whose storage shows in-place writes. (torch 2.11+)
EXAMPLE_VALUE = "example_value"

# In Dynamo's graphs: the source of an input, which contains a weight's name. (torch 2.11+)
GRAPH_ARG = "grapharg"

# Notes that are copied from graph to graph, such as a weight's name. (torch 2.11+)
CUSTOM = "custom"

# The modules in which a node was called, innermost last; users' policies read their paths. (torch 2.11+)
NN_MODULE_STACK = "nn_module_stack"

# The source lines of a node, as text. (torch 2.11+)
STACK_TRACE = "stack_trace"

# AOTAutograd's description of an input or output. (torch 2.11+)
DESC = "desc"

# Marks values that a custom function keeps without save_for_backward; they follow all other saved values. (torch 2.11+)
NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"

# The outputs that users get, noted before our passes replace some by None, on which Inductor of torch 2.11 fails.
# (torch 2.11+)
USER_VISIBLE_OUTPUTS = "user_visible_output_idxs"

# The functions whose calls became a node, in graphs after Dynamo. (torch 2.11+)
SOURCE_FN_STACK = "source_fn_stack"

# Both stacks of the forward node, in nodes of a backward graph. (torch 2.11+)
FWD_NN_MODULE_STACK, FWD_SOURCE_FN_STACK = "fwd_nn_module_stack", "fwd_source_fn_stack"

# Calls in Dynamo's graphs that change how the nodes between them run: autocast, vmap. (torch 2.11+)
ENTER_CALLS, EXIT_CALLS = {"_enter_autocast", "_vmap_increment_nesting"}, {"_exit_autocast", "_vmap_decrement_nesting"}
# The call that switches gradients on or off. (torch 2.11+)
SET_GRAD_ENABLED = "_set_grad_enabled"

# Calls without an effect on the graph. (torch 2.11+)
NO_OP_CALLS = {"lazy_load_decompositions", "_log_api_usage_once"}
# Calls that return nothing and change no setting. (torch 2.11+)
STATELESS_CALLS = {*NO_OP_CALLS, "setitem", "_assert", "_assert_async"}
