"""Built-in decoders by name: the arguments of ``Decoder`` in ``cli/models.py``."""

SIZES: dict[str, tuple[int, ...]] = {  # width, layers, heads, hidden, heads of keys and values, vocabulary
    "tiny": (128, 4, 4, 352),
    "350m": (1024, 24, 16, 2816),
    "700m": (2048, 11, 16, 5632),  # on two ranks, shards as large as those of "1b" on four
    "1b": (2048, 24, 16, 5632),
    "7b": (4096, 32, 32, 11008),
    "8b": (4096, 32, 32, 14336, 8),  # Llama-8B's widths
    "llama8b": (4096, 32, 32, 14336, 8, 128256),  # Llama-3-8B
}
