"""Ports for programs that serve a store themselves."""

import random
import socket

# Below the ports of outgoing connections, which other tests open by the hundred: one of theirs may be taken
# between the look and the use.
OWN = range(20000, 30000)


def free_port() -> int:
    """Return a free port that only callers of this function may pick."""
    while True:
        port = random.SystemRandom().choice(OWN)  # tests seed the shared one
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
