"""Weights alone, as Hugging Face's files hold them: into shards, and out of them."""
