"""Memory that other GPUs of the host can read and write. Apart, since few need it and importing it takes time."""

import torch.distributed._symmetric_memory

# empty(), rendezvous() and get_backend(); the module has no public name. (torch 2.11+)
symmetric_memory = torch.distributed._symmetric_memory
