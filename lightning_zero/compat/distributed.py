"""Process groups."""

from torch.distributed import distributed_c10d

# The store that init_process_group() made, over which ranks can say something to each other. (torch 2.11+)
default_store = distributed_c10d._get_default_store
