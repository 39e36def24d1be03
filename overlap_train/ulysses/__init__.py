"""Ulysses sequence parallelism: linears whose outputs, or inputs, are exchanged between sequence shards and head shards.

The same operator has a public name, and a name inside this package (Linear in exchange.py). A2A: all-to-all.

    public               inside      forward                                      input gradient (dgrad)
    linear_all_to_all    to_heads    GEMM + A2A   y = all_to_all(x @ w.T)         A2A + GEMM   dx = all_to_all(dy) @ w
    all_to_all_linear    to_rows     A2A + GEMM   y = all_to_all(x) @ w.T         GEMM + A2A   dx = all_to_all(dy @ w)

Their engines are GEMM_A2A (operators/gemm_all_to_all.py) and A2A_GEMM (operators/all_to_all_gemm.py). The projections of an
attention (attention.py) are made of them: qkv_all_to_all of the first, attention_output_linear of the second.

A call goes through these files, from the caller to the engines; backward begins at the autograd function:

                                          weights are whole                  TP divides them (TP x Ulysses)
    public functions                      linears.py, attention.py           attention.py
      wrong arguments, on every rank      arguments.py                       arguments.py, groups.py
      who has which rows; padding         shards.py                          shards.py, with tp_group
    the call as planned, in parts         calls.py                           two_group_calls.py (parts.py cuts both)
    autograd functions                    linears.py, qkv.py                 linears.py, qkv.py
    passes, part by part                  exchange.py (in trials turns.py)   two_groups.py, rows_backward.py
      rows in the caller's tensors        rows.py                            rows.py
      KV heads that several ranks need    copies.py                          copies.py
      order in which parts begin          ahead.py                           ahead.py
    engines                               operators/start.py                 operators/start.py, column_row.py
"""
