"""Memory that other GPUs of the host can read and write. Separate, because importing it takes time."""

from lightning_zero.compat.lookup import private

# Has empty(), rendezvous() and get_backend(), and no public name. (torch 2.11+)
symmetric_memory = private("torch.distributed._symmetric_memory")
