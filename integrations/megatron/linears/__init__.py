"""Overlapped forms of Megatron-Core's parallel linears, and of TransformerEngine's as Megatron wraps them."""
