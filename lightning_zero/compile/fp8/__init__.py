"""fp8 products: replace products of weights with activations in a traced graph by scaled fp8 ones."""

from lightning_zero.compile.fp8.conversion import check_fp8_device, convert_products

__all__ = ["check_fp8_device", "convert_products"]
