"""Shards: how a parameter is cut, where the pieces lie, and how a module reads them."""
