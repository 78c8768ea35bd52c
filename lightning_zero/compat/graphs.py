"""What the parts of torch.compile leave for each other in a graph. Without underscores, and documented nowhere: keys of
``Node.meta`` and names, as texts.
"""

# What the partitioner is told of a node, a torch.utils.checkpoint.CheckpointPolicy. (torch 2.11+)
RECOMPUTE = "recompute"

# The number of a region; the partitioner honours what it is told only among nodes that have one. (torch 2.11+)
AC_GRAPH_ID = "ac_graph_id"

# In the meta data of a checkpointed region's graph: a function that makes users' choice of what is saved. (torch 2.11+)
CHECKPOINT_POLICY = "_checkpoint_context_fn"
# Its attribute by which they name it for caches: documented where torch misses it. (torch 2.13+)
CHECKPOINT_POLICY_HASH = "cache_hash"

# On which side of the partition a node has to be, whatever it depends on. (torch 2.11+)
PARTITIONER_TAG = "partitioner_tag"

# That side, for what hands gradients over. (torch 2.11+)
MUST_BE_IN_BACKWARD = "must_be_in_backward"

# What AOTAutograd calls the inputs of a backward, with a number: by these a backward is recognised. (torch 2.11+)
TANGENTS = "tangents"

# In Dynamo's graphs: a fake tensor for the result, whose storage shows in-place edits. (torch 2.11+)
EXAMPLE_VALUE = "example_value"

# In Dynamo's graphs: where an input comes from, in whose path a weight's name stands. (torch 2.11+)
GRAPH_ARG = "grapharg"

# What is carried on from graph to graph: a weight's name. (torch 2.11+)
CUSTOM = "custom"

# In which modules a node was called, innermost last: users' policies read paths. (torch 2.11+)
NN_MODULE_STACK = "nn_module_stack"

# By which lines of code a node was made, as a text. (torch 2.11+)
STACK_TRACE = "stack_trace"

# What AOTAutograd writes at a graph's results, and at inputs: of what they are. (torch 2.11+)
DESC = "desc"

# What a custom function keeps without save_for_backward; its place is behind all else that is saved. (torch 2.11+)
NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"

# Which outputs users see, noted before our passes make none of some; Inductor of torch 2.11 stumbles over these.
# (torch 2.11+)
USER_VISIBLE_OUTPUTS = "user_visible_output_idxs"

# The same for what callers of an op did, in graphs behind Dynamo. (torch 2.11+)
SOURCE_FN_STACK = "source_fn_stack"

# Both of these, of the forward, in nodes of a backward. (torch 2.11+)
FWD_NN_MODULE_STACK, FWD_SOURCE_FN_STACK = "fwd_nn_module_stack", "fwd_source_fn_stack"

# What calls in Dynamo's graphs are named that change how those between them run: autocast, vmap. (torch 2.11+)
ENTER_CALLS, EXIT_CALLS = {"_enter_autocast", "_vmap_increment_nesting"}, {"_exit_autocast", "_vmap_decrement_nesting"}
# The same for gradients, which one call turns on and off. (torch 2.11+)
SET_GRAD_ENABLED = "_set_grad_enabled"

# Calls there that do nothing to anything in the graph, wherever they stand. (torch 2.11+)
NO_OP_CALLS = {"lazy_load_decompositions", "_log_api_usage_once"}
# Calls there that return nothing and change no setting. (torch 2.11+)
STATELESS_CALLS = {*NO_OP_CALLS, "setitem", "_assert", "_assert_async"}
