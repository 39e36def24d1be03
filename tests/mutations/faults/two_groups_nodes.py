"""Of TP x Ulysses where Ulysses' groups span nodes of GPUs."""

from ..mutation import In

PASSES = "tests/protocol/test_interleaving_tp_ulysses.py::test_ulysses_across_nodes"
SHARDED = "tests/unit/test_two_group_calls.py"
BACKWARD = f"{PASSES}[heads_backward-4-1-False-False]"
PRODUCTS = In("overlap_train/ulysses/two_groups.py", (f"{PASSES}[to_heads-4-1-False-False]",))
PLANS = In("overlap_train/ulysses/two_group_calls.py", (SHARDED,))
PLANNED = In("overlap_train/operators/planned.py", (SHARDED,))
ENGINE = In("overlap_train/planning/engine_plan.py", ("tests/unit/test_exchange_plan.py", SHARDED))
EXCHANGE = In("overlap_train/planning/plan.py", ("tests/unit/test_exchange_plan.py", SHARDED))
NODES = In(
    "overlap_train/ulysses/groups.py",
    (
        "tests/protocol/test_tp_ulysses.py::test_groups_that_both_span_nodes_go_before_one_that_spans_more",
        "tests/protocol/test_tp_ulysses.py::test_all_ranks_know_of_one_whose_groups_both_span_nodes",
    ),
)
REFUSALS = In("overlap_train/planning/refusals.py", ("tests/unit/test_topology.py",))
KERNELS = In("overlap_train/operators/persistent.py", ("tests/unit/test_operands.py",))
FEW = In(
    "overlap_train/operators/low_latency.py",
    ("tests/protocol/test_launch_keys.py::test_few_rows_leave_the_sms_of_an_exchange_beside_them",),
)
BESIDE = In("overlap_train/operators/start.py", (BACKWARD,))

FAULTS = [
    PRODUCTS("two groups: products count on the SMs of an exchange", "self.exchange.domain, self.exchange.plan.fprop)",
             "self.exchange.domain, None)"),
    PLANS("two groups: kernels take the SMs of an exchange", ".beside(exchanges.plan.fprop.spared_sms)", ".beside(0)"),
    PLANS("two groups: both may span nodes", "        if apart is not None:\n", "        if False:\n"),
    PLANNED("two groups: kernels of dx take the SMs of an exchange", '"dgrad", "dgrad_alone"', '"dgrad_alone"'),
    PLANNED("two groups: kernels of dx alone take the SMs of an exchange", '"dgrad_alone", "wgrad")', '"wgrad")',
            "tests/unit/test_frozen_weight.py"),
    PLANNED("two groups: what sends x again takes the SMs of an exchange", '"dgrad_alone", "wgrad")', '"dgrad_alone")'),
    FEW("two groups: few rows are gathered on all SMs", "own, gathered, unit, spared_sms)\n", "own, gathered, unit, 0)\n"),
    FEW("two groups: few rows are scattered on all SMs", "partials, y, unit, spared_sms)\n", "partials, y, unit, 0)\n"),
    FEW("two groups: a gather of few rows is launched for all SMs", '("low latency gather", unit, spared_sms)',
        '("low latency gather", unit)'),
    FEW("two groups: a scatter of few rows is launched for all SMs", '("low latency scatter", unit, spared_sms)',
        '("low latency scatter", unit)'),
    ENGINE("two groups: SMs of another group do not count", "self.wait_sms + self.other_sms", "self.wait_sms"),
    EXCHANGE("two groups: no SM is left to waits", "\"cuda\" and engine.slots > 0)", "\"cuda\" and False)"),
    EXCHANGE("two groups: auto overlaps what was not measured", "topology.nodes > 1 and config.method == \"auto\"", "False"),
    EXCHANGE("two groups: exchanges across nodes come in chunks", "_WHOLE if topology.nodes > 1 else PLAIN", "PLAIN"),
    PLANS("two groups: exchanges of CPU processes are refused", "x.device, name) if x.is_cuda else (1, 1)", "x.device, name)"),
    PLANS("two groups: nobody asks for the peers' nodes", "nodes_of_groups(groups, config, x.device, name) if", "(1, 1) if"),
    REFUSALS("two groups: one of them across nodes is refused", "if min(nodes) == 1 or", "if max(nodes) == 1 or"),
    REFUSALS("two groups: auto is refused", '("auto", "collective")', '("collective",)'),
    REFUSALS("two groups: a product by collectives is refused", ' or product.config.method == "collective"', ""),
    NODES("two groups: each rank goes by its own nodes", "        found = _worst(told)\n", ""),
    NODES("two groups: only the Ulysses group hears of it", "    for domain in domains:", "    for domain in domains[:1]:"),
    NODES("two groups: only the TP group hears of it", "    for domain in domains:", "    for domain in domains[1:]:"),
    NODES("two groups: one of more nodes goes before two", "(min(nodes), max(nodes), nodes)", "(max(nodes), min(nodes), nodes)"),
    NODES("two groups: which of two ranks is worse depends on their order", "(min(nodes), max(nodes), nodes)",
          "(min(nodes), max(nodes))"),
    NODES("two groups: unusable nodes are taken for one", "if domain.nodes.problem is None else", "if True else"),
    NODES("two groups: ranks agree at each call", "if groups.tensor not in ulysses.nodes_with:", "if True:"),
    KERNELS("two groups: a kernel that gathers is launched for all SMs", "how, plan.spared_sms, b_kn.shape", "how, b_kn.shape"),
    KERNELS("two groups: a kernel that scatters is launched for all SMs", "how, plan.spared_sms, layout", "how, layout"),
    In("overlap_train/operators/start.py", (SHARDED,))(
        "two groups: collectives across nodes ask for an engine", "not started.slots or ", ""),
    BESIDE("two groups: a product inside a node asks for an engine between nodes", "started.nodes == 1 or ", ""),
]  # fmt: skip
