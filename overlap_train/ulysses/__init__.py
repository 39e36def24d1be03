"""Ulysses sequence parallelism: linears whose outputs, or inputs, are exchanged between sequence shards and head shards.

The same operator has a public name, and a name inside this package (Linear in exchange.py). A2A: all-to-all.

    public               inside      forward                                      input gradient (dgrad)
    linear_all_to_all    to_heads    GEMM + A2A   y = all_to_all(x @ w.T)         A2A + GEMM   dx = all_to_all(dy) @ w
    all_to_all_linear    to_rows     A2A + GEMM   y = all_to_all(x) @ w.T         GEMM + A2A   dx = all_to_all(dy @ w)

The projections of an attention (attention.py) are made of them: qkv_all_to_all of the first, attention_output_linear of the
second. A call goes through these files, from the caller to the operators in ops/:

                                        weights are whole             TP divides them (TP x Ulysses)
    public and autograd functions       linears.py, attention.py      attention.py
      who has which rows; padding       shards.py, layout.py          the same, with tp_group
    the call as planned, in parts       calls.py, parts.py            two_groups.py
    passes, part by part                exchange.py                   two_groups.py, rows.py
      rows in the caller's tensors      rows.py, attention_layout.py  the same
"""
