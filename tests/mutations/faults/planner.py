"""Faults of the planner's simulator, and of what it says about groups that span nodes."""

from __future__ import annotations

from tests.mutations.mutation import In

NODES, ONE_NODE, COMMAND = (f"tests/unit/test_plan_{name}.py" for name in ("nodes", "simulation", "command"))
ACROSS = In("overlap_train/tools/plan/simulation/across_nodes.py", (NODES,))
BACKWARD = In("overlap_train/tools/plan/simulation/backward.py", (NODES,))
LIMITED = In(
    "overlap_train/tools/plan/tables.py",
    ("tests/unit/test_plan_inputs.py::test_it_says_where_communication_has_fewer_sms_than_the_nic_needs",),
)
COST = In("overlap_train/planning/cost.py", (NODES,))
PROGRAMS = In("overlap_train/tools/plan/simulation/programs.py", (NODES,))
LIBRARY = In("overlap_train/tools/plan/simulation/by_library.py", (NODES,))
SENDING = In("overlap_train/tools/plan/simulation/sending.py", (NODES,))
SIMULATE = In("overlap_train/tools/plan/simulation/simulate.py", (NODES,))
WORK = In("overlap_train/tools/plan/simulation/work.py", (NODES,))
RANK = In("overlap_train/tools/plan/simulation/simulated_rank.py", (ONE_NODE,))
TILES = In("overlap_train/tools/plan/simulation/persistent_tiles.py", (ONE_NODE,))
NODE_TILES = In(TILES.file, (NODES,))
WAVES = In("overlap_train/planning/tiling.py", ("tests/unit/test_hopper_rows.py",))  # as the kernel has them
ACROSS_SPANS = f"{COMMAND}::test_across_nodes_it_says_what_is_not_estimated_and_which_span_pays"
SPAN_TILES = f"{COMMAND}::test_too_many_tiles_are_not_simulated_one_by_one_in_a_plan_across_nodes"
FITS = In("overlap_train/tools/plan/fits.py", ("tests/unit/test_plan_inputs.py",))
COMMANDS = In("overlap_train/tools/plan/command.py", (ACROSS_SPANS,))
PREDICTION = In(
    "overlap_train/tools/plan/prediction.py", (f"{COMMAND}::test_as_many_ranks_cost_more_across_nodes_than_inside_one",)
)
HOSTS = In(
    PROGRAMS.file,
    ("tests/unit/test_plan_check.py::test_exchanges_between_nodes_keep_the_host_as_long_as_was_measured",),
)
NODE_RECORDS = In(
    "overlap_train/tools/plan/check.py",
    (
        "tests/unit/test_plan_check.py::test_two_nodes_of_two_gpus_are_predicted",
        "tests/unit/test_plan_check.py::test_nodes_whose_network_no_row_tells_are_refused",
    ),
)
PICTURE = In(
    "overlap_train/tools/plan/picture.py", ("tests/unit/test_plan_check.py::test_the_picture_cuts_nothing_off",)
)

MACHINES = "tests/unit/test_plan_check.py"
RECORDED = In("overlap_train/tools/plan/records.py", (f"{MACHINES}::test_a_record_names_its_machine",))
FOLDERS = In(
    "overlap_train/tools/plan/command.py", (f"{MACHINES}::test_the_command_plans_each_record_for_its_own_machine",)
)

FAULTS = [
    RECORDED("a part of a word names a machine", "if name in words", 'if name in " ".join(words)'),
    RECORDED("capitals name no machine", '"")).lower())', '"")))'),
    FOLDERS("all records are of the machine that was fitted", "machine_of(one, SYSTEMS) or DEFAULT", "DEFAULT"),
    FOLDERS("a record's machine counts more than the flag", "read_system(asked.system or machine", "read_system(machine"),
    PICTURE("plan: rows that are far off are cut from the picture", "min(1 - 2 * WORST, min(ratios) - 0.05)", "0.8"),
    PICTURE("plan: long rows are cut from the picture", "max(ms) * math.sqrt(2)", "15"),
    HOSTS("plan: exchanges keep no host", "system.host_exchange_us * exchanges + ", ""),
    HOSTS("plan: what stays in a node keeps the host as an exchange", "sum(send.leg.link == NETWORK for", "sum(True for"),
    NODE_RECORDS("plan: a record's network is as fast as its slowest row", "return max(map(_gbs", "return min(map(_gbs"),
    NODE_RECORDS("plan: rings of several ranks tell what a NIC does",
                 'if pass_of(row).kind in EXCHANGES or nodes_of(row) == row["world"]', "if True"),
    ACROSS(
        "plan: a sum is sent before it is added",
        "return summed(work, leg.block, leg.chunk)",
        "return multiplied(work, leg.block)",
    ),
    ACROSS(
        "plan: a node is summed before its partials are there",
        "for rank in ranks if rank != block))",
        "for rank in ranks if rank < 0))",
    ),
    ACROSS("plan: a node is summed before the own product", "(made(work, block, chunk), *(arrived", "(*(), *(arrived"),
    ACROSS(
        "plan: a block is passed on before it has arrived",
        "if leg.carries == ARRIVED else None",
        "if leg.carries == NODE_SUM else None",
    ),
    ACROSS("plan: the network waits in the copy engine's queue", "return TO_NETWORK", "return COPIES"),
    ACROSS("plan: what is passed on waits in it", "return PASSED_ON if", "return COPIES if"),
    ACROSS("plan: a sum reads one partial less", "(local + 1) * work.shard_bytes", "local * work.shard_bytes"),
    ACROSS("plan: sums have all SMs", "work.shard_bytes, work.plan.reduce_sms)", "work.shard_bytes)"),
    ACROSS("plan: a node of one rank adds", "if local > 1 else 0.0", "if True else 0.0"),
    COST("plan: sums need not write", "return (local + 1) * wire_gbs", "return local * wire_gbs"),
    COST("plan: sums have one SM too few", "math.ceil(node_sum_gbs", "math.floor(node_sum_gbs"),
    COST("plan: sums take as many SMs as there are", "min(sums, budget.for_sums(network))", "sums"),
    COST("plan: NCCL has as many SMs as its NIC could use", "min(network, budget.for_network)", "network"),
    LIMITED("plan: it reckons with fewer SMs than the NIC needs, and says nothing", "*_clamped(system, strategy, sms),", ""),
    LIMITED("plan: a NIC that has its SMs is said to have too few", 'if sms["network_sms"] >= network and (', "if False and ("),
    LIMITED("plan: Ulysses has too few SMs for sums that it does not make", "or strategy.tp == 1)", "or False)"),
    COST("plan: few SMs read faster than the memory", "min(system.memory_gbs, sms", "max(0.0, sms"),
    WORK("plan: a kernel has the SMs that it leaves", "return self.system.sms - self.plan.spared_sms", "return self.system.sms"),
    ACROSS("plan: what a kernel multiplies is never there", "stored(work.call, block, chunk) if in_tiles else", ""),
    NODE_TILES("plan: own tiles add what nodes have to sum first",
               "not work.plan.reduces_later", "not work.plan.variant.split_reduction"),
    WORK("plan: products have the SMs of sums, too", "spared = self.plan.spared_sms", "spared = self.plan.send_sms"),
    ACROSS("plan: sums of chunks take as long as of blocks", "_node_sum_us(work) / work.plan.chunks", "_node_sum_us(work)"),
    ACROSS("plan: all chunks go to one rank before another gets any", "key=lambda leg: leg.chunk", "key=lambda leg: leg.target"),
    ACROSS(
        "plan: far blocks are multiplied rank by rank",
        "for chunk in range(work.plan.chunks):\n"
        "            yield tuple((source, chunk) for source in sources[first : first + local])",
        "for source in sources[first : first + local]:\n"
        "            yield tuple((source, chunk) for chunk in range(work.plan.chunks))",
    ),
    PROGRAMS("plan: blocks of an all-to-all are multiplied as those of a gather", " if gathers else received", ""),
    LIBRARY("plan: a sum in fp32 is the result as it is", "(FP32 + BF16) * work.m_shard", "0 * work.m_shard"),
    LIBRARY("plan: the first product reads a sum, too", "parts, own in blocks)", "parts, False)"),
    LIBRARY("plan: blocks come to lie side by side by themselves", "        if len(blocks) > 1:\n", "        if False:\n"),
    WORK("plan: sums in fp32 cost nothing", "more * rows * self.pass_.n", "0"),
    WORK("plan: sums in fp32 are not read", "2 * FP32 - BF16", "FP32 - BF16"),
    ACROSS("plan: what lands waits in the copy engine's queue", "leg.carries in (ARRIVED, LANDED)", "leg.carries == ARRIVED"),
    ACROSS("plan: what lands is passed on before it is there",
           "        return landed(work.call, leg.target, leg.block, leg.chunk)\n", "        return None\n"),
    ACROSS("plan: pushes come in the order of legs", "if work.plan.kind in INBOUND or TRAITS", "if True or TRAITS"),
    SENDING("plan: a chunk that crosses leaves after the first",
             "leg.chunk if work.topology.nodes > 1 or leg.after_tiles else 0)", "0)"),
    SIMULATE("plan: what is for another rank arrives at once",
             "taker = group.topology.receiver(leg.target) if leg.link == NETWORK else", "taker ="),
    COST("plan: products have NCCL's SMs, too", "sms = system.sms - spared_sms", "sms = system.sms"),
    BACKWARD("plan: a weight gradient has NCCL's SMs, too",
             "partial(wgrad_us, work, work.plan.spared_sms)", "partial(wgrad_us, work, 0)"),
    COST("plan: NCCL is as fast as its fastest link", "(min(gbs) * 1e3)", "(max(gbs) * 1e3)"),
    COST("plan: NCCL leaves a node by one NIC", "gbs.append(local * system.nic_gbs)", "gbs.append(system.nic_gbs)"),
    COST("plan: NCCL's ring crosses NVLink where there is none", "[] if local == 1 else", "[] if local == 0 else"),
    COST("plan: hops over the network take no time", "(nodes - 1) * system.nic_us", "0 * system.nic_us"),
    COST("plan: all of an all-to-all crosses the network", "(local - 1, world - local)", "(local - 1, world - 1)"),
    LIBRARY(
        "plan: near blocks are multiplied before all has arrived",
        "arrived(work.call, source, c) for c in range(chunks))",
        "arrived(work.call, source, c) for c in (0,))",
    ),
    SENDING("plan: the network is as fast as NVLink", "(system.nic_gbs, system", "(system.copy_gbs, system"),
    PROGRAMS(
        "plan: the last sum reads every rank's partial",
        "(work.topology.local + work.topology.nodes)",
        "(work.world + 1)",
    ),
    SIMULATE("plan: senders of a rank do not share its link", "in flow.ends)) * 1e3", "in flow.ends[1:])) * 1e3"),
    SIMULATE(
        "plan: a block arrives under its sender's number",
        "if self.stands_for_all else leg.fills",
        "if self.stands_for_all else leg.source",
    ),
    SIMULATE("plan: a mirrored block is of another place", "(place + beside - to_place)", "(place + to_place - beside)"),
    SIMULATE("plan: a mirrored block is of another node", "(node + there - to_node)", "(node + to_node - there)"),
    RANK("plan: a copy's signal is there before it", "partial(self._signal, lane, index, start)", "partial(int)"),
    RANK("plan: what has happened is looked at again", "action, index + 1)", "action, 0)"),
    COMMANDS("plan: every tile is simulated, however many", "count_tiles(span, model) > MOST_TILES", "False", SPAN_TILES),
    COMMANDS("plan: tiles are left out in one node, too", "strategy.nodes > 1 == span.nodes", "span.nodes == 1", SPAN_TILES),
    COMMANDS("plan: Python collects more seldom from then on", "        gc.set_threshold(first, *others)\n", "        pass\n",
             f"{COMMAND}::test_python_collects_as_before_afterwards"),
    FITS("plan: it offers numbers of ranks that do not fit", "    except ValueError:\n        return False\n",
         "    except ValueError:\n        return True\n"),
    FITS("plan: it offers nodes that a group cannot fill", "if ranks % count == 0)", "if True)"),
    FITS("plan: a group that would fit in one node is not told", "if nodes > 1 and ranks <= gpus:", "if False:"),
    FITS("plan: heads that cannot be divided are not told", "if query % ranks or", "if False and"),
    COMMANDS("plan: nodes are not filled", "named.nodes * system.gpus_per_node", "named.nodes"),
    COMMANDS("plan: spans across nodes are left out", "across = [*doubled, strategy.nodes] if", "across = [] if"),
    PREDICTION("plan: a group that spans nodes is planned in one", "else strategy.tp_nodes", "else 1"),
    WAVES("plan: it cuts tiles with a peer's strip", "2 * rest <= sms and rest <= may_cut", "2 * rest <= sms"),
    TILES("plan: it cuts no scatter", "may_cut = tile.pairs(work.m_shard // chunks, work.block_columns, chunks)",
          "may_cut = 0"),
    TILES("plan: it cuts a scatter's last wave whoever's rows are in it",
          "may_cut = tile.pairs(work.m_shard // chunks, work.block_columns, chunks)", "may_cut = 10**9"),
    TILES("plan: it cuts tiles of the plain kernels", "may_cut if work.plan.kernels == HOPPER else 0", "may_cut"),
    WAVES("plan: it counts half tiles as whole ones", "full + (0.5 if", "full + (1.0 if"),
]  # fmt: skip
