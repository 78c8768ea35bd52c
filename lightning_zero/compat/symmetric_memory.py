"""Memory that other GPUs of the host can read and write. Apart, since few need it and importing it takes time."""

from lightning_zero.compat.lookup import private

# empty(), rendezvous() and get_backend(); the module has no public name. (torch 2.11+)
symmetric_memory = private("torch.distributed._symmetric_memory")
