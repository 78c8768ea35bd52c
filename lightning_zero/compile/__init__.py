"""What the compiler is told about shards, and the passes that rewrite its graphs."""
