"""Faults of groups that span nodes: which ranks form one, what goes over the network, who passes it on."""

from __future__ import annotations

from tests.mutations.mutation import In

NODES = "tests/protocol/test_nodes.py"
SHAPES = f"{NODES}::test_every_shape"
SCHEDULE = In("overlap_train/planning/schedule.py", ("tests/protocol/test_node_schedule.py",))
TOPOLOGY = In("overlap_train/symmetric/topology.py", ("tests/unit/test_topology.py",))
NETWORK = In("overlap_train/symmetric/inter_node.py", (SHAPES,))
SLOT = In("overlap_train/protocol/node_slot.py", (SHAPES,))
WORKSPACE = In("overlap_train/protocol/node_workspace.py", (SHAPES,))
GATHER = In("overlap_train/operators/all_gather_gemm.py", (SHAPES,))
SCATTER = In("overlap_train/operators/gemm_reduce_scatter.py", (SHAPES,))
PLAN = In("overlap_train/planning/plan.py", ("tests/unit/test_topology.py",))

FAULTS = [
    SCHEDULE(
        "a far rank's blocks have the far rank as their writer",
        "return block if block == self.twin(block // self.local) else",
        "return block if block // self.local != self.node else",
    ),
    SCHEDULE("sums cross before their blocks are computed", "in product(targets(topology)", "in product(targets(topology)[::-1]"),
    TOPOLOGY("any file of another process is opened", 'if not os.readlink(path).startswith(f"/memfd:{_NAME}"):', "if False:"),
    TOPOLOGY("nodes of unequal size are accepted", "len({len(ranks) for ranks in nodes}) > 1", "False"),
    TOPOLOGY("ranks may be numbered across nodes", "!= tuple(range(ranks[0], ranks[0] + len(ranks)))", "!= ranks"),
    TOPOLOGY("a rank that is not reached back is in the node", "if rank not in ranks or other is not None:", "if False:"),
    TOPOLOGY("every rank prints the nodes", "if rank == 0 and topology.nodes > 1:", "if topology.nodes > 1:"),
    TOPOLOGY("node_ranks may differ", "if len(set(told)) > 1:", "if False:"),
    PLAN("kernels are taken across nodes", 'if engine.nodes > 1 and engine.method != "chunked":', "if False:"),
    PLAN("nodes that cannot share memory are taken", "if topology_problem is not None:", "if False:"),
    NETWORK("data goes to the start of the heap", "self._memory[data : data + nbytes]", "self._memory[:nbytes]"),
    NETWORK("a signal carries another word", "place.signal, word], dtype", "place.signal, word + 1], dtype"),
    SLOT("places do not count the block", "block * nbytes + chunk", "0 * nbytes + chunk"),
    SLOT("a piece inside the node fills another block", "[leg.fills].chunk(self.chunks)", "[self.rank].chunk(self.chunks)"),
    SLOT("a signal of another block is sent", "self.slot.words[leg.target][leg.fills,", "self.slot.words[leg.target][self.rank,"),
    WORKSPACE(
        "twins do not meet", "                self.wait(call, topology.twin(node), 1)\n", "                pass\n",
        f"{NODES}::test_nobody_leaves_a_barrier_before_all_have_come",
    ),
    GATHER("a block is passed on before it is there", "        self._call.wait(block)\n        for route", "        for route"),
    SCATTER("the own node's partials are added twice", "if block != twin:", "if True:"),
    SCATTER("sums of other nodes are left out", "                total += self._call.blocks[topology.twin(node)]\n", ""),
]  # fmt: skip
