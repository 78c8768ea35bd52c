"""Built-in decoders by name: width, layers, heads and hidden width of each."""

SIZES = {  # width, layers, heads, hidden
    "tiny": (128, 4, 4, 352),
    "350m": (1024, 24, 16, 2816),
    "700m": (2048, 11, 16, 5632),  # on two ranks, shards as large as those of "1b" on four
    "1b": (2048, 24, 16, 5632),
    "7b": (4096, 32, 32, 11008),
}
