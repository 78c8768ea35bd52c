"""Private keys with which torchao describes tensors in the metadata of safetensors files."""

# The tensor's class, its parts, and what they hold besides, also within a part. (torchao 0.18)
TENSOR_TYPE = "_type"
TENSOR_PARTS = "_tensor_data_names"
TENSOR_DATA = "_data"
