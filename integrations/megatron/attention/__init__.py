"""Megatron-Core's self-attention under context parallelism of Ulysses' kind (cp_comm_type "a2a"), around our exchanges."""
