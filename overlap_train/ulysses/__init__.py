"""Ulysses sequence parallelism: linears whose outputs, or inputs, are exchanged between sequence shards and head shards.

linears.py            public functions and autograd functions
layout.py             who has which rows and heads; padding of shards
parts.py              parts of a long sequence, and how the step of one begins before another is read
exchange.py           the calls as planned, their passes, part by part, and rows in the caller's tensors (over TP: two_groups.py)
attention_layout.py   from what an exchange brings to q, k and v, and back
"""
