"""Faults of the benchmark of several nodes: what it measures, what it compares with, and what its rows say."""

from __future__ import annotations

from tests.mutations.mutation import In

UNIT = "tests/unit/test_bench_hierarchical.py"
COMMAND = "tests/unit/test_bench_command.py"
TIMELINES = "tests/unit/test_bench_timeline.py"
TWO_STEPS = f"{COMMAND}::test_nccl_in_two_steps_is_a_baseline_where_nodes_have_several_ranks"
ROWS = f"{COMMAND}::test_operators_across_nodes_run_on_two_processes"
INSIDE = f"{COMMAND}::test_a_method_that_stays_inside_a_node_is_refused_before_anything_is_measured"
METHODS = In("overlap_train/tools/measure/methods.py", (INSIDE,))
SIZES = In("overlap_train/tools/bench/hierarchical.py", (UNIT,))
DOMAINS = In("overlap_train/tools/bench/node_domains.py", (UNIT,))
BASELINES = In("overlap_train/tools/bench/node_baselines.py", (TWO_STEPS,))
EXCHANGES = In("overlap_train/tools/bench/exchange_baselines.py", (ROWS,))
OPERATORS = In("overlap_train/tools/bench/operators.py", (ROWS,))
OUTPUT = In("overlap_train/tools/bench/output.py", (UNIT,))
PLOTS = In("overlap_train/tools/bench/plots.py", (UNIT,))
KINDS = In("overlap_train/tools/bench/kinds.py", (ROWS,))
TIMELINE = In(
    "overlap_train/tools/bench/timeline.py", (f"{TIMELINES}::test_the_recorded_linears_run_on_nodes_of_several_ranks",)
)
RECORD = In("overlap_train/tools/bench/command.py", (COMMAND,))

FAULTS = [
    SIZES("an exchange sends less than a gather", "(world // self.node_ranks if op in EXCHANGES else 1)", "1"),
    SIZES("exchanges are as long as a gather takes", "found |= dict.fromkeys(ops,", "found |= dict.fromkeys((*OPS, *EXCHANGES),"),
    SIZES("products ignore their ratio", "round(ratio * steps)", "round(steps)"),
    SIZES("an exchange keeps the wrong side of the weight", 'if op in ("ag_gemm", A2A_GEMM) else', 'if op == "ag_gemm" else'),
    BASELINES("blocks go to the twin's rank of that number", "of_nodes.transpose(0, 1).contiguous().flatten(0, 1)",
              "of_nodes.contiguous().flatten(0, 1)"),
    BASELINES("blocks lie in the order in which they came", "topology.nodes)).transpose(0, 1).flatten(0, 2)",
              "topology.nodes)).flatten(0, 2)"),
    BASELINES("exchanges have no baseline by nodes", "    ranks = groups.topology.world\n", "    return {}\n    ranks = 1\n"),
    EXCHANGES("columns for a rank go by rows", "y.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()", "y"),
    DOMAINS("what the probe has found is measured twice", "for sms in network_sms if sms != found", "for sms in network_sms"),
    DOMAINS("all domains have what the probe finds", "config, network_sms=sms))", "config, network_sms=0))"),
    DOMAINS("domains share a group", "replace(session.world, group=dist.new_group())", "session.world"),
    DOMAINS("NCCL alone is measured with each number", 'choice.method != "collective"', "True"),
    DOMAINS("rows have the probe's number only", '"network_sms": sms_of(domain)', '"network_sms": sms_of(self.own)'),
    DOMAINS("the probe's number is that of the row", '"probe_sms": sms_of(self.own)', '"probe_sms": sms_of(domain)'),
    OPERATORS("rows have the times of the own domain", "timings | {mine.method: timings[name]}", "timings",
              f"{UNIT}::test_a_row_has_the_time_of_its_own_domain"),
    OPERATORS("numbers of SMs are not used", "for case in cases], network_sms)", "for case in cases], ())"),
    OUTPUT("numbers of SMs are not told apart", "if is_as_found(row) else", "if True else"),
    PLOTS("pictures mix numbers of SMs", '.get("rows", ()) if is_as_found(row)]', '.get("rows", ())]'),
    KINDS("operators that were left out run", "hierarchical.Shapes(self.ops,", "hierarchical.Shapes((*OPS, *EXCHANGES),",
          f"{COMMAND}::test_some_operators_and_lengths_can_be_chosen"),
    KINDS("--network is not used", "replace(settings.config, network=self.network)", "settings.config",
          f"{COMMAND}::test_some_operators_and_lengths_can_be_chosen"),
    KINDS("methods that stay inside a node fail case by case",
          "        refuse_methods_of_one_node(self.methods, nodes_of(session))\n", "", INSIDE),
    KINDS("kernels fail on the CPU case by case", "        refuse_kernels_on_cpus(self.methods, device)\n", "",
          f"{COMMAND}::test_kernels_are_refused_on_the_cpu"),
    METHODS("methods are refused inside a node, too", "for method in asked if nodes > 1 and", "for method in asked if"),
    METHODS("auto is no method that can be asked for", "return method in TRAITS and TRAITS[method].kernels",
            "return method not in TRAITS or TRAITS[method].kernels", f"{COMMAND}::test_kernels_are_refused_on_the_cpu"),
    TIMELINE("a timeline has one rank a node", "OverlapConfig(method=method, node_ranks=node_ranks)",
             "OverlapConfig(method=method, node_ranks=1)"),
    TIMELINE("a timeline counts ranks as nodes", "here.size // node_ranks}", "here.size}"),
    RECORD("NCCL takes each rank for a host", "        pretend_nodes(node_ranks)", "        pretend_nodes(1)"),
    RECORD("ranks of nodes are ignored where there are none", "    elif told.node_ranks:", "    elif False:"),
]  # fmt: skip
