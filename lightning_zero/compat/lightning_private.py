"""Lightning's private names. Importing this imports Lightning."""

import warnings

from lightning.fabric.strategies import strategy
from lightning.fabric.strategies.launchers import subprocess_script as fabric_script
from lightning.fabric.utilities import device_dtype_mixin, distributed, init, optimizer
from lightning.pytorch.plugins.io import wrapper
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.connectors import checkpoint_connector

# Lightning 2.6 calls a deprecated function of torch 2.13 for each dataloader, on every rank.
warnings.filterwarnings(
    "ignore",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    FutureWarning,
    r"lightning\.pytorch\.utilities\._pytree",
)

# Base class of modules that store their dtype, which we set when shards are converted. (lightning 2.6+)
DeviceDtypeModule = device_dtype_mixin._DeviceDtypeModuleMixin

# Joins the default process group of the cluster's environment, and leaves it at exit. (lightning 2.6+)
init_process_group = distributed._init_dist_connection

# Reduces a logged value across ranks, as in other strategies. (lightning 2.6+)
reduce_value = distributed._sync_ddp_if_available

# Moves an optimizer's state to a device: load_state_dict() of torch leaves some on the CPU. (lightning 2.6+)
optimizer_to_device = optimizer._optimizer_to_device

# Moves the state of several optimizers. (lightning 2.6+)
optimizers_to_device = optimizer._optimizers_to_device

# Starts a process for each device. (lightning 2.6+)
SubprocessScriptLauncher = subprocess_script._SubprocessScriptLauncher

# Starts a process for each device of Fabric. (lightning 2.6+)
FabricScriptLauncher = fabric_script._SubprocessScriptLauncher

# Limits the threads of each process that computes on the CPU. (lightning 2.6+)
bound_threads = distributed._set_num_threads_if_needed

# Base class of Fabric's no_backward_sync(); Fabric warns if a strategy has none. (lightning 2.6+)
BackwardSyncControl = strategy._BackwardSyncControl

# Skips functions of torch.nn.init, for init_module(empty_init=True). (lightning 2.6+)
EmptyInit = init._EmptyInit

# Replaces modules and optimizers by their state dicts before Fabric saves. (lightning 2.6+)
convert_state = strategy.Strategy._convert_stateful_objects_in_state

# Base class of a CheckpointIO around another one, by default ours, such as AsyncCheckpointIO. (lightning 2.6+)
WrappingCheckpointIO = wrapper._WrappingCheckpointIO

# Resolves ckpt_path="last", "best" or None to a checkpoint. (lightning 2.6+)
CheckpointConnector = checkpoint_connector._CheckpointConnector

ATTRIBUTES = {
    # The connector of a Trainer. (lightning 2.6+)
    "lightning.pytorch.Trainer._checkpoint_connector",
    # Its method, wrapped to record if the user named a file. (lightning 2.6+)
    "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector._parse_ckpt_path",
    # Reads the file for load_from_checkpoint(), wrapped to read folders. (lightning 2.6+)
    "lightning.pytorch.core.saving.pl_load",
    # The checkpoint that a Trainer is loading. (lightning 2.6+)
    "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector._loaded_checkpoint",
    # The CheckpointIO of a strategy, by default ours. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._checkpoint_io",
    # The CheckpointIO of Fabric's strategy. (lightning 2.6+)
    "lightning.fabric.strategies.ParallelStrategy._checkpoint_io",
    # Overridden: creates the launcher of processes. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._configure_launcher",
    # The launcher. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._launcher",
    # Starts the other processes of a host; called by our launcher. (lightning 2.6+)
    "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher._call_children_scripts",
    # Starts the other processes of a host for Fabric. (lightning 2.6+)
    "lightning.fabric.strategies.launchers.subprocess_script._SubprocessScriptLauncher._call_children_scripts",
    # Called by Fabric before processes start, if a strategy has it. (lightning 2.6+)
    "lightning.fabric.strategies.DDPStrategy._set_world_ranks",
    # Implements no_backward_sync() of Fabric. (lightning 2.6+)
    "lightning.fabric.strategies.ParallelStrategy._backward_sync_control",
    # The precision of Fabric's strategy, replaced by ours. (lightning 2.6+)
    "lightning.fabric.strategies.ParallelStrategy._precision",
    # Synchronizes batch normalization (sync_batchnorm=True), before modules are sharded. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._layer_sync",
    # Overridden: assigned before connect() could unwrap modules that the user compiled. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._lightning_module",
    # Overridden: the plugin in Lightning's property, replaced by ours. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._precision_plugin",
    # Cleared in a copy of a strategy. (lightning 2.6+)
    "lightning.pytorch.strategies.ParallelStrategy._optimizers",
    # Set if the user compiled the LightningModule. (lightning 2.6+)
    "lightning.pytorch.LightningModule._compiler_ctx",
    # The Trainer of a LightningModule: a plan sets one that logs nothing. (lightning 2.6+)
    "lightning.pytorch.LightningModule._trainer",
    # The device that a LightningModule stores; its shards move separately. (lightning 2.6+)
    "lightning.pytorch.LightningModule._device",
    # The dtype that a LightningModule stores. (lightning 2.6+)
    "lightning.pytorch.LightningModule._dtype",
    # Overridden: we clip gradients, unless a user's hook does. (lightning 2.6+)
    "lightning.pytorch.plugins.precision.Precision._clip_gradients",
    # Overridden: runs right before an optimizer's step. (lightning 2.6+)
    "lightning.pytorch.plugins.precision.Precision._wrap_closure",
    # Overridden: calls the hook on_before_optimizer_step. (lightning 2.6+)
    "lightning.pytorch.plugins.precision.Precision._after_closure",
    # The averaged module, which also has shards. (lightning 2.6+)
    "lightning.pytorch.callbacks.WeightAveraging._average_model",
    # The device that the user chose for the average. (lightning 2.6+)
    "lightning.pytorch.callbacks.WeightAveraging._device",
    # Writes to shards undetected, so we are notified before. (lightning 2.6+)
    "lightning.pytorch.callbacks.WeightAveraging._swap_models",
    # Writes to parameters undetected. (lightning 2.6+)
    "lightning.pytorch.callbacks.WeightAveraging._copy_average_to_current",
    # Broadcasts a stop on the device before each batch; replaced by a broadcast on the CPU. (lightning 2.6+)
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor",
    # Handles signals for the Trainer. (lightning 2.6+)
    "lightning.pytorch.Trainer._signal_connector",
    # Its handler, which broadcasts at any point of the program; replaced by one that does not. (lightning 2.6+)
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._sigterm_notifier_fn",
    # Saves on SLURM's requeue signal; called between batches instead. (lightning 2.6+)
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._slurm_sigusr_handler_fn",
}
