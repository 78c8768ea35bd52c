"""What hardware is taken to reach where nobody has measured it, and several floors have to say so."""

from __future__ import annotations

__all__ = ["HOST_BYTES_PER_S"]

# Bytes per second each way between pinned memory of a host and a device, while both directions copy: one H200 on PCIe 5
# with 16 lanes reached 50.3 to 50.5 GB/s.
HOST_BYTES_PER_S = 50e9
