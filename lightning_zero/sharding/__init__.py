"""Shard parameters, allocate their memory, and gather them when modules read them."""
