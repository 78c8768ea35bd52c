"""Memory of the host for what a device has no room for, and the way between the two."""
