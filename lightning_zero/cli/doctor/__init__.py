"""``doctor``: what this machine has, what a training will do with it, and whether a tiny one comes out right."""
