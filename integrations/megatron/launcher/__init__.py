"""Runs a user's Megatron-LM script, unmodified, with overlapped linears: `python -m overlap_train.integrations.megatron`."""
