"""``checkpoint``: looks into checkpoints, compares them with their checksums, and makes other files of them."""
