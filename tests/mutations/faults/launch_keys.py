"""Faults of what a call remembers its launches by: pointers on 16 bytes are told from others, linears of one shape are not."""

from __future__ import annotations

from tests.mutations.mutation import In

KEYS = ("tests/protocol/test_launch_keys.py",)
PERSISTENT, SCATTER, NODES, LOW_LATENCY = (
    In(f"overlap_train/operators/{file}.py", KEYS)
    for file in ("persistent", "gemm_reduce_scatter", "node_streams", "low_latency")
)
WAITS = In("overlap_train/protocol/waits.py", KEYS)
LAYERS = ("tests/protocol/test_launch_keys.py::test_80_layers_of_one_shape_share_a_launch",)
CALLS = In(
    "overlap_train/protocol/workspace.py",
    ("tests/protocol/test_first_calls.py::test_80_layers_of_one_shape_agree_once",),
)

FAULTS = [
    PERSISTENT(
        "what arrives is multiplied by a launch for aligned operands",
        "b_kn.stride(), _compiled_for(plan, addresses))",
        "b_kn.stride())",
    ),
    PERSISTENT(
        "what leaves is multiplied by a launch for aligned operands",
        "layout, _compiled_for(plan, addresses))",
        "layout)",
    ),
    PERSISTENT("one aligned operand speaks for all", "aligned(*addresses)\n", "aligned(*addresses[:1])\n"),
    SCATTER("partials are added by a launch for aligned ones", '("reduce", aligned(*values))', '("reduce",)'),
    NODES(
        "a node's partials are added by a launch for aligned ones",
        "received.data_ptr(), aligned(*values), sms)",
        "received.data_ptr())",
    ),
    WAITS("the own block is kept by a launch for aligned ones", '("receive", at % 16 == 0)', '("receive",)'),
    LOW_LATENCY(
        "half words are gathered by a launch for words", '("low latency gather", unit', '("low latency gather"'
    ),
    LOW_LATENCY(
        "half words are scattered by a launch for words", '("low latency scatter", unit', '("low latency scatter"'
    ),
    CALLS(
        "each linear of a shape has calls of its own",
        "key = (block_shape, dtype, chunks)",
        "key = (block_shape, dtype, chunks, tag)",
    ),
    PERSISTENT(
        "each linear of a shape has its own launch of what arrives",
        "key = (plan.kind, how, plan.spared_sms, b_kn.shape,",
        "key = (call.tag, plan.kind, how, plan.spared_sms, b_kn.shape,",
        *LAYERS,
    ),
    PERSISTENT(
        "each linear of a shape has its own launch of what leaves",
        "key = (plan.kind, how, plan.spared_sms, layout,",
        "key = (call.tag, plan.kind, how, plan.spared_sms, layout,",
        *LAYERS,
    ),
    SCATTER(
        "each linear of a shape has its own launch of the reduction",
        '("reduce", aligned(*values))',
        '("reduce", call.tag, aligned(*values))',
        *LAYERS,
    ),
]
