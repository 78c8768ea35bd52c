"""Lightning's private names. Importing this imports Lightning."""

import warnings

from lightning.fabric.strategies import strategy
from lightning.fabric.strategies.launchers import subprocess_script as fabric_script
from lightning.fabric.utilities import device_dtype_mixin, distributed, init, optimizer
from lightning.pytorch.plugins.io import wrapper
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.connectors import checkpoint_connector

# Lightning 2.6 asks torch 2.13 for something in a deprecated way at each dataloader, and every rank says so: neither
# users nor we can do anything about it. Importing the strategies imports this.
warnings.filterwarnings(
    "ignore",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    FutureWarning,
    r"lightning\.pytorch\.utilities\._pytree",
)

# Modules that know their dtype (the LightningModule), which must be told when shards are converted. (lightning 2.6+)
DeviceDtypeModule = device_dtype_mixin._DeviceDtypeModuleMixin

# Joins the default process group as the cluster's environment says, and leaves it at exit. (lightning 2.6+)
init_process_group = distributed._init_dist_connection

# Reduces a logged value as the other strategies do. (lightning 2.6+)
reduce_value = distributed._sync_ddp_if_available

# Moves one optimizer's state, of which torch's load_state_dict() leaves some where the file had it. (lightning 2.6+)
optimizer_to_device = optimizer._optimizer_to_device

# The same for several. (lightning 2.6+)
optimizers_to_device = optimizer._optimizers_to_device

# Starts one process for each device. (lightning 2.6+)
SubprocessScriptLauncher = subprocess_script._SubprocessScriptLauncher

# The same for Fabric. (lightning 2.6+)
FabricScriptLauncher = fabric_script._SubprocessScriptLauncher

# Bounds the threads of each process that computes on the CPU. (lightning 2.6+)
bound_threads = distributed._set_num_threads_if_needed

# Of what class the object is that Fabric asks what no_backward_sync() does; without one it warns. (lightning 2.6+)
BackwardSyncControl = strategy._BackwardSyncControl

# Leaves out what torch.nn.init does, for init_module(empty_init=True). (lightning 2.6+)
EmptyInit = init._EmptyInit

# Replaces modules and optimizers in what Fabric saves by their states. (lightning 2.6+)
convert_state = strategy.Strategy._convert_stateful_objects_in_state

# A CheckpointIO around another one, AsyncCheckpointIO is such: whoever has none inside gets ours. (lightning 2.6+)
WrappingCheckpointIO = wrapper._WrappingCheckpointIO

# Finds the checkpoint of a run that ckpt_path="last" or "best" means, or an empty ckpt_path. (lightning 2.6+)
CheckpointConnector = checkpoint_connector._CheckpointConnector

ATTRIBUTES = {
    # Where a Trainer keeps that. (lightning 2.6+)
    "lightning.pytorch.Trainer._checkpoint_connector",
    # Its method, surrounded to remember whether the user named a file: a word may mean another one. (lightning 2.6+)
    "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector._parse_ckpt_path",
    # What a Trainer has read of a checkpoint, until all of it is in place. (lightning 2.6+)
    "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector._loaded_checkpoint",
    # Where a strategy keeps its CheckpointIO: by default ours. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._checkpoint_io",
    # The same of Fabric's. (lightning 2.6+)
    "lightning.fabric.strategies.ParallelStrategy._checkpoint_io",
    # Overridden: which launcher starts processes. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._configure_launcher",
    # Where that launcher is kept. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._launcher",
    # Starts the other processes of a node; called by a launcher of ours. (lightning 2.6+)
    "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher._call_children_scripts",
    # The same of Fabric's. (lightning 2.6+)
    "lightning.fabric.strategies.launchers.subprocess_script._SubprocessScriptLauncher._call_children_scripts",
    # Called by Fabric before processes are started, where a strategy has it. (lightning 2.6+)
    "lightning.fabric.strategies.DDPStrategy._set_world_ranks",
    # Where Fabric finds what no_backward_sync() does. (lightning 2.6+)
    "lightning.fabric.strategies.ParallelStrategy._backward_sync_control",
    # Where Fabric looks whether a strategy was given a precision, which is kept in our form. (lightning 2.6+)
    "lightning.fabric.strategies.ParallelStrategy._precision",
    # How batch normalisation is synchronised (sync_batchnorm=True): before modules are cut. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._layer_sync",
    # Overridden: assigned before connect() could take apart what the user compiled. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._lightning_module",
    # Overridden: the plugin that Lightning's property stores and gives, in our form. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._precision_plugin",
    # A copy of a strategy has none. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._optimizers",
    # Whether a LightningModule was compiled by hand. (lightning 2.6+)
    "lightning.pytorch.LightningModule._compiler_ctx",
    # The Trainer that a LightningModule believes to have: a plan gives it one that logs nothing. (lightning 2.6+)
    "lightning.pytorch.LightningModule._trainer",
    # The device that a LightningModule believes to be on; its shards move without it. (lightning 2.6+)
    "lightning.pytorch.LightningModule._device",
    # The dtype likewise. (lightning 2.6+)
    "lightning.pytorch.LightningModule._dtype",
    # Overridden: whether gradients are clipped by us, or by a hook of the user's that may look at them.
    # (lightning 2.6+)
    "lightning.pytorch.plugins.precision.Precision._clip_gradients",
    # Overridden: what comes right before an optimizer's step. (lightning 2.6+)
    "lightning.pytorch.plugins.precision.Precision._wrap_closure",
    # Overridden: surrounds the hook on_before_optimizer_step. (lightning 2.6+)
    "lightning.pytorch.plugins.precision.Precision._after_closure",
    # The averaged module, which holds shards, too. (lightning 2.6+)
    "lightning.pytorch.callbacks.WeightAveraging._average_model",
    # Where the user wants the average to be. (lightning 2.6+)
    "lightning.pytorch.callbacks.WeightAveraging._device",
    # Writes to shards past everything that watches them, so it is announced. (lightning 2.6+)
    "lightning.pytorch.callbacks.WeightAveraging._swap_models",
    # Writes to parameters in the same way. (lightning 2.6+)
    "lightning.pytorch.callbacks.WeightAveraging._copy_average_to_current",
    # Asks ranks on the device, before each batch, whether to stop; replaced by a question on the CPU. (lightning 2.6+)
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor",
    # Where the Trainer handles signals. (lightning 2.6+)
    "lightning.pytorch.Trainer._signal_connector",
    # Its handler, which broadcasts from wherever the process is, and is replaced by one that does not. (lightning 2.6+)
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._sigterm_notifier_fn",
    # Saves at SLURM's signal to requeue, likewise; called between batches instead. (lightning 2.6+)
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._slurm_sigusr_handler_fn",
}
