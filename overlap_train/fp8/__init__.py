"""Linears in fp8: operands with one byte an element, and one scale for each (quantize.py); the passes of linears (linear.py)."""
