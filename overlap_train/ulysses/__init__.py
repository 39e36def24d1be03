"""Ulysses sequence parallelism: linears whose outputs, or inputs, are exchanged between sequence shards and head shards."""
