"""Faults of `fused` across nodes: whose block comes next in the kernel, what waits for its tiles, what it leaves to others."""

from __future__ import annotations

from tests.mutations.mutation import In

SCHEDULE = "tests/protocol/test_schedule.py::test_kernels_take_tiles_in_the_schedules_order"
STREAMED = "tests/protocol/test_interleaving_nodes.py"
PASSES = f"{STREAMED}::test_operators_pass"
BY_PROCESSES = "tests/protocol/test_nodes.py::test_every_shape_by_a_kernel"
ORDER = In("kernels/order.py", (SCHEDULE,))
STREAMS = In("overlap_train/operators/fused_node_streams.py", (PASSES,))
EARLY = In("overlap_train/operators/fused_node_streams.py", (f"{STREAMED}::test_a_kernel_runs_beside_its_exchanges",))
AGAIN = In(
    "overlap_train/operators/fused_node_streams.py",
    ("tests/protocol/test_interleaving_node_exchanges.py::test_a_kernel_runs_beside_what_is_sent_again",),
)
ENGINE = In("overlap_train/protocol/node_streams.py", (PASSES,))
PROCESSES = In("overlap_train/operators/fused_node_processes.py", (BY_PROCESSES,))
PROCESS_ENGINE = In("overlap_train/protocol/node_engine.py", (BY_PROCESSES,))
SLOT = In("overlap_train/protocol/node_slot.py", (PASSES,))
PLAN = In("overlap_train/planning/engine_plan.py", ("tests/unit/test_plan.py",))
TRAITS = In("overlap_train/methods.py", ("tests/unit/test_topology.py",))
LEFT = "tests/protocol/test_interleaving_leaving.py"
LEAVING = In("overlap_train/operators/fused_node_streams.py", (LEFT,))
ARRIVALS = In("kernels/arrivals.py", (LEFT,))
KERNEL_ARGS = In("overlap_train/operators/kernel_args.py", (LEFT,))
KEYS = In("overlap_train/operators/persistent.py", ("tests/unit/test_operands.py",))
WAITS = In("overlap_train/protocol/waits.py", ("tests/unit/test_launch_limits.py",))
RANK = In("overlap_train/tools/plan/simulation/simulated_rank.py", ("tests/unit/test_plan_nodes.py",))
MODEL = "tests/unit/test_hopper_rows.py"
TILES = In("kernels/tiles.py", (MODEL,))
IN_HOPPER = In("kernels/hopper_all_gather_gemm.py", (MODEL,))
RING = In("kernels/hopper_tiles.py", (MODEL,))
WAIT = In("kernels/signal.py", ("tests/unit/test_specialisation.py",))
AUTO = In("overlap_train/planning/untuned_nodes.py", ("tests/unit/test_exchange_plan.py",))
MAY = In("overlap_train/planning/choice.py", AUTO.tests)
GRID = In("overlap_train/operators/kernel_args.py", ("tests/unit/test_launch_limits.py",))
HOPPER = In("overlap_train/operators/hopper.py", ("tests/unit/test_hopper_rows.py",))

FAULTS = [
    ORDER("a rank of another node comes next", "% (WORLD // LOCAL) * LOCAL +", "% (WORLD // LOCAL) * LOCAL + 1 +"),
    ORDER("far shards are multiplied one after the other",
          "nodes == 0, within // CHUNKS, within % LOCAL", "nodes >= 0, within // CHUNKS, 0"),
    ORDER("far chunks are multiplied as near ones",
          "nodes == 0, within % CHUNKS, within // LOCAL", "nodes >= 0, within % CHUNKS, 0"),
    ORDER("shards arrive from following nodes", "rank_at(rank, WORLD // LOCAL - nodes, LOCAL - places, WORLD, LOCAL), chunk",
          "rank_at(rank, nodes, LOCAL - places, WORLD, LOCAL), chunk"),
    ORDER("of a far node the twin's block is multiplied first", "step % LOCAL + (step >= LOCAL)", "step % LOCAL"),
    ORDER("the own node is multiplied first for others", "rank_at(rank, step // LOCAL + 1,", "rank_at(rank, step // LOCAL,"),
    ORDER("a node's twin is multiplied first", "step % LOCAL + 1, WORLD", "step % LOCAL, WORLD"),
    EARLY("exchanges are enqueued before the kernel of a gather",
          "        super()._multiply(replace(operands, leaves=True))\n",
          "        self._crossings.finish()\n        super()._multiply(replace(operands, leaves=True))\n"),
    EARLY("exchanges are enqueued before the kernel of an all-to-all",
          "        for chunk in range(chunks):\n", "        self._crossings.finish()\n        for chunk in range(chunks):\n"),
    LEAVING("a gather's first kernel waits for the network", "super()._multiply(replace(operands, leaves=True))",
            "super()._multiply(operands)"),
    LEAVING("later kernels wait for the network", "    return replace(operands, leaves=True)\n", "    return operands\n"),
    LEAVING("a gather's last launch leaves, too", "operands if crossing is crossings[-1] else _counted(self, operands)",
            "_counted(self, operands)"),
    LEAVING("the last launch of A2A + GEMM leaves, too", "operands if chunk == chunks - 1 else _counted(self, operands)",
            "_counted(self, operands)"),
    LEAVING("nobody counts what has come",
            '    call.launches.run(("count", kind), (), partial(_count_launch, domain, call, kind))\n', ""),
    LEAVING("gathers are counted as all-to-alls", "EXCHANGE=kind == A2A_GEMM", "EXCHANGE=True"),
    LEAVING("a gather's launch does not wait for its chunk",
            "            self._call.wait_chunk(node[0], crossing.received.chunk, len(node))\n", ""),
    KERNEL_ARGS("no kernel is told to leave", "leaves=int(operands.leaves)", "leaves=0"),
    KEYS("a launch that leaves is taken for the last one", "operands.sends, operands.leaves)", "operands.sends)"),
    ARRIVALS("a chunk that is not here counts", "        units += here.to(tl.int32)\n", "        units += 1\n"),
    ARRIVALS("blocks of one rank are enough", "LOCAL + blocks % FAR", "LOCAL", MODEL),
    ARRIVALS("the first chunk of a rank is enough", "source, blocks // FAR, expected", "source, 0, expected", MODEL),
    ARRIVALS("what was counted is not taken", "tl.maximum(tl.load(here_ptr).to(tl.int32), OWN)", "OWN"),
    ARRIVALS("all-to-alls count chunks again", "blocks = chunks * FAR", "blocks = chunks", MODEL,
             survives="they find what they have found before, in more time"),
    ARRIVALS("a tile is claimed twice", "looking = (seen != index) & (seen < bound)", "looking = seen >= bound"),
    IN_HOPPER("a kernel of a gather that leaves claims a tile more", "turn, counter_ptr, bound, index, LOCAL < WORLD",
              "turn, counter_ptr, bound, index"),
    RING("a tile is passed over", "claim_below(counter_ptr, before + 1, bound", "claim_below(counter_ptr, before + 2, bound"),
    TILES("a strip of a chunk that is not here is taken", "units * strips // 2 * tiles_n", "(units * strips + 1) // 2 * tiles_n"),
    TILES("halves of tiles that are here are left", "tl.where(tiles <= halved, tiles, 2 * tiles - halved)", "tiles"),
    WAIT("a wait is compiled for each alignment of its row", 'do_not_specialize_on_alignment=["row_ptr"]', "version=None"),
    WAIT("a wait is compiled for rows of one element", ', "first_chunk", "limit", "row_size"]', ', "first_chunk", "limit"]'),
    STREAMS("a sum of the node does not wait for its own tiles",
            "        self._engine.wait_for_tiles(self._call.stored_tiles(twin, chunk), self._tiles)\n", ""),
    STREAMS("a sum waits for the first chunk's tiles", "stored_tiles(twin, chunk)", "stored_tiles(twin, 0)"),
    STREAMS("columns leave before their tiles", "return part, partial(", "return part, None and partial("),
    STREAMS("what a kernel of GEMM + RS writes leaves before its counters are reset",
            "        engine.send_after_this()\n        own =", "        own ="),
    STREAMS("what a kernel of GEMM + A2A writes leaves before its counters are reset",
            "        engine.send_after_this()  # as in FusedNodeStreamScatter\n", ""),
    AGAIN("what is gathered again is enqueued before the kernel of GEMM + RS", "        own = self._partials[",
          "        self._crossings._begin()\n        own = self._partials["),
    AGAIN("what is exchanged again is enqueued before the kernel of GEMM + A2A",
          "        self._tiles = _launch(self, engine, self._op",
          "        self._crossings._begin()\n        self._tiles = _launch(self, engine, self._op"),
    STREAMS("partial sums of a node are not sent",
            "engine.push_counted(self._partials, call.routes(legs.inside, self._tiles))", "pass"),
    ENGINE("a sum waits for one tile too few", "counter.data_ptr(), tiles, AT_LEAST", "counter.data_ptr(), tiles - 1, AT_LEAST"),
    PROCESS_ENGINE("processes send before the tiles are stored",
                   "lambda: send() if poll(lambda: counter.item() >= tiles, self._timeout_s) else None", "send"),
    PROCESSES("a process sends the first rank's columns to all", "staging[leg.block], leg", "staging[0], leg"),
    SLOT("partial sums leave for a neighbour before their tiles",
         "(self.stored_tiles(leg.block, leg.chunk), tiles) if leg.after_tiles else None", "None"),
    SLOT("counters of two blocks are one", "word = block * MAX_CHUNKS + chunk", "word = chunk"),
    WAITS("counters of the last ranks are not reset", "max(1024, 1 << (counters - 1).bit_length())", "1024"),
    RANK("tiles that no launch takes are forgotten", "if left := sum(map(len, self._tiles.values())):", "if left := 0:"),
    RANK("a launch that leaves takes what has not come", "        if not kernel.leaves:\n            return left\n",
         "        if True:\n            return left\n"),
    STREAMS("exchanges of a kernel are not enqueued ahead",
          "            self._crossings.go_ahead(chunks + turn, chunks * topology.nodes)\n", "",
          "tests/protocol/test_interleaving_nodes.py::test_exchanges_are_enqueued_between_products"),
    PLAN("one rank's chunk has to fill a GPU",
         'at_once = local if method == "fused" and', 'at_once = 1 if method == "fused" and'),
    PLAN("chunks of a kernel that goes on fill a GPU",
         'method == "fused" and pass_.kind not in INBOUND and local == 1', "False"),
    PLAN("a kernel that waits leaves no SM to what it waits for",
         'int(nodes > 1 and device.type == "cuda" and TRAITS[method].multiplies)', "0"),
    PLAN("sums that a kernel would add are those of nodes",
         "self.variant.split_reduction or self.nodes > 1", "self.variant.split_reduction"),
    PLAN("the network brings an all-to-all as the library wants it",
         "crossings=_crossings(kind, topology, chunks, tiled)", "crossings=_crossings(kind, topology, chunks)"),
    AUTO("the library multiplies all across nodes", "if not at_once and on_hopper(pass_, device):", "if False:"),
    AUTO("a kernel multiplies all across nodes", "if not at_once and on_hopper", "if on_hopper"),
    AUTO("the library multiplies a gather rank by rank",
         "(pass_.kind == GATHER and nodes == pass_.world)", "pass_.kind == GATHER"),
    AUTO("a kernel multiplies a gather of one rank a node", " or (pass_.kind == GATHER and nodes == pass_.world)", ""),
    AUTO("a kernel is chosen across nodes that does not serve", "if not at_once and on_hopper(pass_, device):",
         "if not at_once:"),
    MAY("methods that store at peers are chosen across nodes", "nodes == 1 or TRAITS[method].crosses", "True"),
    TRAITS("kernels that send cross nodes", '"direct": Traits(kernels=True, multiplies=True)',
           '"direct": Traits(kernels=True, multiplies=True, crosses=True)'),
    GRID("a kernel takes the SMs that it is to leave", "multiprocessors(device) - spared_sms", "multiprocessors(device)"),
    HOPPER("a gather's kernel takes all SMs",
           "if sends else halves, domain.device, plan.spared_sms)", "if sends else halves, domain.device, 0)"),
    HOPPER("a scatter's kernel takes all SMs",
           "* domain.world_size, domain.device, plan.spared_sms)", "* domain.world_size, domain.device, 0)"),
]  # fmt: skip
