"""Ports for programs that serve a store themselves."""

import random
import socket

# Below what systems give to outgoing connections, which other tests open by the hundred: a port of theirs may be taken
# between the look and the use.
OWN = range(20000, 30000)


def free_port() -> int:
    """A port that nobody holds now and that only a caller of this function may pick."""
    while True:
        port = random.SystemRandom().choice(OWN)  # tests seed the shared one
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
