"""Faults of groups that span nodes: which ranks form one, what goes over the network, who passes it on."""

from __future__ import annotations

from tests.mutations.mutation import In

NODES = "tests/protocol/test_nodes.py"
SHAPES = f"{NODES}::test_every_shape"
RANKS, LEGS, ORDER = (
    In(f"overlap_train/planning/schedule/{file}.py", ("tests/protocol/test_node_schedule.py",))
    for file in ("topology", "legs", "order")
)
TOPOLOGY = In("overlap_train/symmetric/topology.py", ("tests/unit/test_topology.py",))
REACH = In("overlap_train/symmetric/reach.py", ("tests/unit/test_topology.py",))
FABRIC = In("overlap_train/gpu/fabric.py", ("tests/unit/test_fabric.py",))
WIRE = In("overlap_train/symmetric/wire.py", ("tests/unit/test_wire.py",))
NETWORK = In("overlap_train/symmetric/gloo.py", (SHAPES,))
SLOT = In("overlap_train/protocol/node_slot.py", (SHAPES,))
WORKSPACE = In("overlap_train/protocol/node_workspace.py", (SHAPES,))
PROCESSES = In("overlap_train/operators/node_processes.py", (SHAPES,))
CONNECTS = In("overlap_train/operators/settled.py", ("tests/unit/test_plan_book.py", "tests/unit/test_trial_plans.py"))
SETTLED = In("overlap_train/runtime/domain.py", ("tests/unit/test_wire.py",))
STREAMED = "tests/protocol/test_interleaving_nodes.py"
PASSES = f"{STREAMED}::test_operators_pass"
EXCHANGED = "tests/protocol/test_interleaving_node_exchanges.py"
STREAMS = In("overlap_train/protocol/node_streams.py", (PASSES,))
NETWORKS = In("overlap_train/protocol/node_networks.py", (PASSES,))
PUT = "tests/protocol/test_interleaving_node_puts.py"
PUTS = In("overlap_train/symmetric/puts.py", ("tests/unit/test_puts.py",))
PUT_ENGINE = In("overlap_train/protocol/node_networks.py", (f"{PUT}::test_operators_pass",))
ACROSS = In("overlap_train/runtime/across_nodes.py", (SHAPES,))
STREAM_ENGINES = In("overlap_train/operators/node_streams.py", (PASSES,))
ORDER_OF_TURNS = f"{STREAMED}::test_exchanges_are_enqueued_between_products"
BESIDE_WGRAD = f"{STREAMED}::test_a_weight_gradient_stands_between_exchanges_of_dx"
SHALLOW = f"{EXCHANGED}::test_shallow_blocks_are_multiplied_together"
EXCHANGES = In("overlap_train/operators/node_exchanges.py", (PASSES,))
BY_ROWS = In(
    "overlap_train/operators/node_exchanges.py", (f"{EXCHANGED}::test_chunks_of_two_ranks_are_multiplied_side_by_side",)
)
CROSSINGS = In("overlap_train/operators/crossings.py", (PASSES,))
TURNS = In("overlap_train/planning/schedule/turns.py", ("tests/unit/test_turns.py",))
TAKEN = In("overlap_train/planning/schedule/order.py", ("tests/unit/test_turns.py",))
QUEUES = "tests/unit/test_plan_queue.py"
IN_FLIGHT = In("overlap_train/planning/schedule/in_flight.py", ("tests/unit/test_in_flight.py",))
GUARD, GRAPH = (
    In(f"overlap_train/runtime/{file}.py", ("tests/unit/test_graph_guard.py",)) for file in ("domain", "graph")
)
STREAMED_SLOT = In("overlap_train/protocol/node_slot.py", (PASSES,))
NCCL = In("overlap_train/symmetric/nccl.py", ("tests/unit/test_nccl_transport.py",))
SPARED = tuple(
    f"tests/protocol/test_interleaving_spared_sms.py::test_{what}"
    for what in ("products_leave_the_network_its_sms", "weight_gradients_spare_sms_only_while_something_crosses")
)
BESIDE, COLUMN, ULYSSES, STREAM_PRODUCTS, EXCHANGE_PRODUCTS = (
    In(f"overlap_train/{file}.py", SPARED)
    for file in (
        "operators/start", "operators/column_row", "ulysses/exchange", "operators/node_streams", "operators/node_exchanges"
    )
)  # fmt: skip
LARGE, LARGE_LAUNCHES, LARGE_ROUTES = (
    In(f"overlap_train/{file}.py", ("tests/protocol/test_large_groups.py",))
    for file in ("operators/node_streams", "gpu/launch", "protocol/slot")
)
SUM = In("kernels/add_blocks.py", ("tests/protocol/test_add_blocks.py",))
SAYS = In("overlap_train/symmetric/agreement.py", ("tests/unit/test_wire.py",))
GLOO = In("overlap_train/symmetric/gloo.py", ("tests/unit/test_gloo_transport.py",))
SUMS = In("overlap_train/symmetric/node_sums.py", ("tests/unit/test_node_sums.py",))
BUDGET = In("overlap_train/planning/sm_budget.py", ("tests/unit/test_sm_budget.py",))
SUM_PROBE = In("overlap_train/symmetric/node_sums.py", ("tests/protocol/test_add_blocks.py",))
ENGINES_MADE = In("overlap_train/runtime/across_nodes.py", ("tests/unit/test_across_nodes.py",))
SUM_SMS = In("overlap_train/operators/node_streams.py", (f"{STREAMED}::test_a_sum_holds_as_many_sms_as_its_plan_says",))
BLAS = In("overlap_train/gpu/blas.py", ("tests/unit/test_blas.py",))
CHUNKS = In("overlap_train/planning/engine_plan.py", ("tests/unit/test_plan.py",))
SMS_OF = In("overlap_train/planning/plan.py", ("tests/unit/test_plan.py",))
TOGETHER = In("overlap_train/planning/tiling.py", ("tests/unit/test_exchange_plan.py",))
EXCHANGE_CHUNKS = In("overlap_train/planning/engine_plan.py", ("tests/unit/test_exchange_plan.py",))
BARRIERS = In("overlap_train/planning/choice.py", ("tests/unit/test_plan.py",))
AUTO = In("overlap_train/planning/untuned_nodes.py", ("tests/unit/test_exchange_plan.py",))
PRETENDED = In(
    "overlap_train/tools/measure/pretended.py",
    ("tests/unit/test_bench_command.py::test_ranks_of_one_machine_are_told_apart",),
)
REFUSALS = In("overlap_train/planning/refusals.py", ("tests/unit/test_topology.py",))

FAULTS = [
    RANKS(
        "a far rank's blocks have the far rank as their writer",
        "return block if block == self.twin(block // self.local) else",
        "return block if block // self.local != self.node else",
    ),
    LEGS("sums cross before their blocks are computed", "in product(targets(topology)", "in product(targets(topology)[::-1]"),
    REACH("any file of another process is opened", 'if not os.readlink(path).startswith(f"/memfd:{_NAME}"):', "if False:"),
    REACH("GPUs of all hosts are one node", "if told.boot == self.told.boot:", "if True:"),
    REACH("no fabric is tried", "return told.fabric is not None and", "return False and"),
    TOPOLOGY("what was tried is kept", "        sample.close()\n", "        pass\n"),
    FABRIC("memory has no fabric handle", "_Properties(_PINNED, _FABRIC,", "_Properties(_PINNED, 1,"),
    FABRIC("what was taken in is kept", "        self._library.cuMemRelease(memory)\n        return", "        return"),
    FABRIC("a handle that is of no use is in reach", "ctypes.byref(theirs), _FABRIC):", "ctypes.byref(theirs), _FABRIC) < 0:"),
    WIRE("SMs that carry nothing more are taken", "if more_gbs < WORTH * gbs:", "if more_gbs < gbs:"),
    WIRE("ranks take different numbers of SMs", "return min(agreement.exchange(gbs, _MEASURE))",
         "return agreement.exchange(gbs, _MEASURE)[0]"),
    WIRE("connections stay where others are taken", "        best.close(orderly=True)\n", ""),
    WIRE("an exchange that failed is a measurement", "        failures.check()\n", ""),
    WIRE("the time to connect counts", "    seconds(exchange, device)  # NCCL", "    # NCCL"),
    WIRE("a setting is measured, too", "return (most,) if budget.network_sms else (*", "return (*"),
    WIRE("more SMs are tried than NCCL may have", "for count in COUNTS if count < most), most)", "for count in COUNTS), 16)"),
    WIRE("nobody says that NCCL may have no more", "network.sms == budget.for_network and not", "False and not"),
    WIRE("a setting is said to be a limit",
         "network.sms == budget.for_network and not budget.network_sms", "network.sms == budget.for_network"),
    WIRE("networks stay open where one fails", "    opened.callback(network.close, orderly=False)\n", ""),
    WIRE("the network that is taken is closed", "        opened.pop_all()\n", ""),
    ENGINES_MADE("nodes stay connected where the engine cannot be made",
                 "            opened.callback(nccl.close, orderly=False)\n", ""),
    ENGINES_MADE("nodes are disconnected where the engine is made", "            opened.pop_all()\n", ""),
    In("overlap_train/protocol/node_engine.py", ("tests/unit/test_node_engine.py",))(
        "a send that has failed is raised once", "            self._fault.keep(error)\n", "            raise\n",
    ),
    In("overlap_train/protocol/node_engine.py", ("tests/unit/test_node_engine.py",))(
        "what is under way is waited for after a failure", "            if not self._fault.failed:", "            if True:",
    ),
    GLOO("twins meet where they could not be connected before", "agreement.name_of(f\"network/", "str(f\"network/"),
    GLOO("a second attempt has the name of the first", "        agreement.barrier(CONNECT)  #", "        #"),
    GLOO("a group that not all have connected stays", "            self._group = None  #", "            #"),
    TOPOLOGY("nodes of unequal size are accepted", "len({len(ranks) for ranks in nodes}) > 1", "False"),
    TOPOLOGY("ranks may be numbered across nodes", "!= tuple(range(ranks[0], ranks[0] + len(ranks)))", "!= ranks"),
    TOPOLOGY("a rank that is not reached back is in the node", "if rank not in ranks or other is not None:", "if False:"),
    TOPOLOGY("GPUs that do not map each other are told to share a namespace", "{_REMEDIES[device_type]}", "{_REMEDIES['cpu']}"),
    TOPOLOGY("CPU processes are told of the fabric", "_REMEDIES[device_type]", "_REMEDIES['cuda']"),
    TOPOLOGY("ranks of GPUs are told what helps processes", "else reached, device.type", 'else reached, "cpu"'),
    TOPOLOGY("a group of one node is printed", "    if topology.nodes > 1:\n", "    if True:\n"),
    TOPOLOGY("settings of nodes may differ", "if len(set(values)) > 1:", "if False:"),
    REFUSALS("any kernel is taken across nodes", "if engine.nodes > 1 and not TRAITS[engine.method].crosses:", "if False:"),
    AUTO("auto sends short blocks across nodes of GPUs one by one", "    if block < LEAST_BLOCK:", "    if block < 0:"),
    AUTO("auto takes collective for short blocks between nodes of CPU processes",
         'if device.type != "cuda":\n        return "chunked", "CPU',
         'if False:\n        return "chunked", "CPU'),
    REFUSALS("nodes that cannot share memory are taken", "if topology_problem is not None:", "if False:"),
    NETWORK("data goes to the start of the heap", "heap[data : data + nbytes]", "heap[:nbytes]"),
    NETWORK("who takes a block from the network keeps it", "heap = self._heaps[rank]",
            "heap = self._heaps[self._topology.rank]"),
    ACROSS("blocks for the ranks beside this one have no place", "for rank in node})", "for rank in [self.rank]})"),
    SETTLED("plans do not know what NCCL takes", "network_sms=engine.network.sms", "network_sms=0"),
    SETTLED("plans do not know what sums take", "reduce_sms=engine.reduce_sms", "reduce_sms=0"),
    In("overlap_train/runtime/prepare.py", ("tests/protocol/test_growing_nodes.py",))(
        "what an operator that raised has sent comes into larger memory",
        '        barrier(domain, Tag("overlap_train/grow", "barrier"))\n', "        pass\n",
    ),
    SETTLED("a group of one node connects", "self.topology.nodes == 1 or (self.is_capturing()", "(self.is_capturing()"),
    CONNECTS("who asks for NCCL alone connects", "if not any(engine.nodes > 1 and engine.slots for",
             "if not any(engine.nodes > 1 for"),
    CONNECTS("plans keep what was not measured", "    config = domain.settled(config)\n", ""),
    SETTLED("nodes are connected while a graph is captured", " or (self.is_capturing() and not self.is_connected):", ":"),
    SLOT("every block is for who takes it from the network", "Place(receiver, target,", "Place(receiver, receiver,"),
    RANKS("a rank is connected with all others", "return self.twin(target // self.local)", "return target"),
    ORDER("far blocks are expected in the order of a gather", "first = int(kind in EXCHANGES)", "first = 0"),
    PROCESSES("every far rank gets the first rank's columns", "engine.send(self._call, staging[leg.block], leg)",
        "engine.send(self._call, staging[0], leg)"),
    PROCESSES("columns of the own node stay here", "        super()._send(staging, legs.inside)\n", "        pass\n"),
    PROCESSES("every far rank gets the first rank's rows", "engine.send(self._call, self._sent[leg.block], leg)",
         "engine.send(self._call, self._sent[0], leg)"),
    PROCESSES("rows of the own node stay here", "        super()._send(legs.inside)\n", "        pass\n"),
    NETWORK("a signal carries another word", "place.signal, word], dtype", "place.signal, word + 1], dtype"),
    SLOT(
        "what is passed on tells of the own call", "if leg.carries == ARRIVED else", "if False else",
        f"{STREAMED}::test_what_is_passed_on_names_the_call_that_it_is_of",
    ),
    NETWORKS("words of what crosses lie in another place",
            "Piece(into, call.crossed(received))", "Piece(into, call.crossed(crossing.sent))"),
    STREAMED_SLOT("what lands is taken from where its chunk would be in a slot", "Route(0, chunk, signal, self.crossed(leg)",
                  "Route(leg.chunk * chunk.numel(), chunk, signal, self.crossed(leg)"),
    STREAMED_SLOT(
        "what lands tells of the call of who passes it on", "signal, self.crossed(leg), None)", "signal, self.slot.epoch, None)",
        f"{EXCHANGED}::test_what_lands_names_the_call_that_it_is_of",
    ),
    GUARD("a graph is captured across nodes",
          "        if self.topology.nodes > 1:\n            raise", "        if False:\n            raise"),
    GUARD("collectives are not captured across nodes",
          "if not slots or not self.is_capturing():", "if not self.is_capturing():"),
    GRAPH("a graph across nodes begins with a barrier", " and domain.topology.nodes == 1", ""),
    GRAPH("a graph of collectives holds memory", "domain.is_capturing() and uses_slots", "domain.is_capturing()"),
    NETWORKS("what came is told before it is here", "            exchange.arrive()\n", ""),
    NETWORKS(
        "a place is used again before what landed there is passed on",
        "            self._order(self._arriving.cuda_stream, self._sending.cuda_stream)\n", "",
        f"{STREAMED}::test_operators_pass",
    ),
    NETWORKS(
        "memory of what landed is not held", "            self._held.append(landing)\n", "",
        f"{EXCHANGED}::test_memory_of_what_landed_is_held_until_it_is_passed_on",
    ),
    STREAMS(
        "the next part begins before one is enqueued", "        self.finish_started()\n        for mark", "        for mark",
        f"{EXCHANGED}::test_parts_of_a_long_sequence_pass",
    ),
    STREAMS(
        "a part's end waits for nothing that crosses",
        "                self._driver.check(self._driver.wait_event(current, mark, 0))\n", "                pass\n",
        f"{EXCHANGED}::test_a_part_ends_when_it_has_crossed_though_nobody_reads_it",
    ),
    CROSSINGS("all that lands is in one place",
              "chunk.new_empty(places, *chunk.shape))", "chunk.new_empty(places, *chunk.shape)[:1])"),
    EXCHANGES("every chunk of rows that leave is the first",
              "block].chunk(self._call.chunks)[crossing.sent.chunk]", "block].chunk(self._call.chunks)[0]"),
    EXCHANGES("sums of all chunks are in the first", "            add_product_in_fp32(rows, _joined",
              "            add_product_in_fp32(total.chunk(call.chunks)[0], _joined"),
    EXCHANGES("far blocks are multiplied as those of the own node",
              "if done < topology.local:", "if True:"),
    EXCHANGES("blocks are multiplied by the rows of b of the first",
              "self._call, _joined([self._b_blocks[block] for", "self._call, _joined([self._b_blocks[blocks[0]] for", SHALLOW),
    EXCHANGES("too few exchanges are enqueued for blocks that are multiplied together",
              "topology.local + len(blocks) - 1) * call.chunks", "topology.local) * call.chunks", SHALLOW),
    BY_ROWS("every chunk is multiplied as the first",
            "peer: call.blocks[peer][rows]", "peer: call.blocks[peer][: rows.stop - rows.start]"),
    BY_ROWS("the own chunk is the first",
            "{own: self._sent[own][rows]", "{own: self._sent[own][: rows.stop - rows.start]"),
    BY_ROWS("blocks lie in the order in which they come", "[blocks[0], blocks[1]]", "[blocks[own], blocks[peer]]"),
    BY_ROWS("a chunk is multiplied before it has come",
            "rows = call.wait_chunks(peer, chunks)", "rows = call.chunk_rows(chunks[0], len(chunks))"),
    BY_ROWS("one chunk of two is waited for",
            "rows = call.wait_chunks(peer, chunks)",
            "rows = call.wait_chunks(peer, chunks[:1]) and call.chunk_rows(chunks[0], len(chunks))"),
    BY_ROWS("the peer's terms replace the own ones", "                add_product_in_fp32(sums[chunks], blocks",
            "                sums[chunks].zero_()\n                add_product_in_fp32(sums[chunks], blocks"),
    BY_ROWS("the peer's terms are multiplied by the own rows of b", "self._b_blocks[peer])", "self._b_blocks[own])"),
    BY_ROWS("own terms are those of the first chunk",
            "self._call.chunk_rows(chunks[0], len(chunks))", "self._call.chunk_rows(0, len(chunks))"),
    BY_ROWS("a chunk is waited for that nobody lets arrive", "            self._crossings.bring(chunks[-1] + 1)\n", ""),
    EXCHANGES("the third exchange stands behind the first sum",
              "        self._crossings.go_ahead(sum(map(len, sums)) + 1, 2 * call.chunks)\n", "",
              f"{STREAMED}::test_exchanges_are_enqueued_between_products_of_rows"),
    EXCHANGES("columns of the own node stay with who multiplies them",
              "            self._domain.engine.push(self._staging, [self._call.routes(inside)[place]])\n", "            pass\n"),
    CROSSINGS(
        "what is sent again crosses after the products of dx",
        "                engine.go_ahead(done, topology.world * plan.chunks)\n", "",
        f"{EXCHANGED}::test_what_is_sent_again_crosses_before_dx", f"{STREAMED}::test_what_is_gathered_again_crosses_before_dx",
    ),
    CROSSINGS("what is sent again crosses after dx", "            self._follows = self._engine.finish_started()\n", "",
              BESIDE_WGRAD),
    CROSSINGS("exchanges of dx stand between its products, behind what is sent again",
              "0 if self._engine.has_started else ", "", BESIDE_WGRAD),
    CROSSINGS("all exchanges of dx stand between its products", "        if not self._plan.beside_wgrad:\n            return",
              "        if True:\n            return", BESIDE_WGRAD),
    CROSSINGS("what is left leaves before its products", "            engine.send_after_this()\n        for crossing",
              "            pass\n        for crossing", f"{STREAMED}::test_a_backward_that_gathers_and_scatters_passes"),
    CROSSINGS("exchanges that nobody waits for are not enqueued", "            self._engine.at_end(self)\n", "",
              f"{STREAMED}::test_what_nobody_waits_for_is_passed_on_before_the_operator_ends"),
    TURNS("a weight gradient waits for all of dx", "(exchanges + 1) // 2", "exchanges", BESIDE_WGRAD),
    TURNS("a weight gradient waits for half of dx behind x", "min(exchanges, 1) if follows else ", "", BESIDE_WGRAD),
    TURNS("some products are not listed", "    yield from ((FAR, units) for units in leaves[gone:])\n", ""),
    SMS_OF("dx without a weight gradient holds exchanges back", "        dgrad = replace(dgrad, beside_wgrad=",
           "        dgrad = dgrad_alone = replace(dgrad, beside_wgrad=", BESIDE_WGRAD),
    In("overlap_train/operators/column_row.py", (BESIDE_WGRAD,))(
        "dx of a frozen column linear holds exchanges back", "plan.dgrad_alone if dw is None else plan.dgrad", "plan.dgrad",
    ),
    In("overlap_train/ulysses/exchange.py", (BESIDE_WGRAD,))(
        "dx of a frozen output projection holds exchanges back", "part.backward_alone if kept is None else part.backward",
        "part.backward",
    ),
    CHUNKS("every operator holds exchanges back", "beside_wgrad: bool = False", "beside_wgrad: bool = True", BESIDE_WGRAD),
    CROSSINGS("exchanges are not enqueued ahead",
              "        self._take(self._flight.go_ahead(done, parts), self._sent)\n", "        pass\n", ORDER_OF_TURNS),
    In("overlap_train/operators/crossings.py", ("tests/unit/test_result_crossings.py",))(
        "after an error exchanges start that were never sent", "self._flight.started + len(self._later)", "self._flight.count"
    ),
    IN_FLIGHT("three exchanges are under way", "_MOST = 2", "_MOST = 3"),
    IN_FLIGHT("exchanges of a scatter arrive while it runs", "exchanges if kind == SCATTER else _MOST", "_MOST", QUEUES),
    IN_FLIGHT("more exchanges start than may be under way", "if self.started - self._arrived == self._most:", "if False:"),
    IN_FLIGHT("no exchange is enqueued before one is waited for", "self.start_until(count + 1)", "self.start_until(count)"),
    IN_FLIGHT("what is waited for is not let arrive", "        yield from self._arrive_until(count)\n", ""),
    IN_FLIGHT("the last exchanges never arrive", "        yield from self._arrive_until(self.count)\n", ""),
    IN_FLIGHT("a chunk of one rank is brought for that of all", "self.count // chunks * (chunk + 1)", "chunk + 1"),
    PROCESSES("exchanges are enqueued as if the own node's products were not", "self._go_ahead(call.chunks + turn",
              "self._go_ahead(turn", f"{STREAMED}::test_exchanges_of_three_nodes_are_enqueued_ahead_of_a_gathers_products"),
    TAKEN("of three nodes half of a block is waited for", "if topology.nodes != 2:", "if False:"),
    TAKEN("a gather ends with two chunks at once", "while left > 1:", "while left > 2:"),
    TAKEN("all chunks but the first are multiplied one by one", "*range(2, chunks, 2), chunks", "*range(2, chunks), chunks"),
    PROCESSES("products of several chunks begin before the last is let arrive", "self._bring(turn + chunks[-1] + 1)",
              "self._bring(turn + chunks[0] + 1)", f"{STREAMED}::test_products_of_several_chunks_pass_in_one_hardware_queue"),
    EXCHANGES("all-to-alls are not enqueued ahead", "go_ahead(done * call.chunks + chunk * len(blocks),", "go_ahead(0,",
              ORDER_OF_TURNS),
    CROSSINGS("a block leaves before its product", "                engine.send_after(marks.popleft())\n",
              "                marks.popleft()\n"),
    EXCHANGES(
        "blocks are passed on after the wait for all", "        self._crossings.finish()\n        return super().received()",
        "        return super().received()",
        f"{EXCHANGED}::test_blocks_that_are_passed_on_after_the_wait_for_all_stop_one_hardware_queue",
    ),
    STREAMS(
        "twins are not told of a barrier",
        "            self.arrive(call, replace(turn, passed_on=Legs(())), exchange)\n", "            pass\n",
        f"{STREAMED}::test_a_backward_that_gathers_and_scatters_passes",
    ),
    STREAM_ENGINES("every chunk of a shard is the first", "self._own.chunk(self._call.chunks)[crossing.sent.chunk]",
                   "self._own.chunk(self._call.chunks)[0]"),
    STREAM_ENGINES("sums are those of the first chunk", "received = self._call.blocks[:, self._call.chunk_rows(chunk)]",
                   "received = self._call.blocks[:, self._call.chunk_rows(0)]"),
    STREAM_ENGINES("the own node's partials are left out", "call.blocks, beside + twins, y)", "call.blocks, twins, y)"),
    LARGE("sums take memory for all ranks", "new_empty(far, *self._partials", "new_empty(8 * far, *self._partials"),
    LARGE("sums for all nodes lie in one place", "(leg.block // topology.local - topology.node) % topology.nodes - 1", "0"),
    LARGE_LAUNCHES("a large group packs its launches in every call",
                   "_FOR_ALL, _FOR_A_CHUNK = 256, 4", "_FOR_ALL, _FOR_A_CHUNK = 256, 0"),
    LARGE_ROUTES("a large group works its routes out in every call", "_PLANS_OF_A_CALL = 8", "_PLANS_OF_A_CALL = 0"),
    PROCESSES("chunks of the second far node are those of the first",
              "first = node * topology.local - 1", "first = near", PASSES),
    PUTS("a signal goes to the twin", "self._set, place.rank, stream)", "self._set, place.receiver, stream)"),
    PUTS("words are signed to NVSHMEM", "word % _WORD", "word"),
    PUTS("nothing is staged", "        self._driver.check(self._driver.copy(staged, source.data_ptr(), nbytes, stream))\n", ""),
    PUTS("a barrier puts data", "        if not nbytes:\n", "        if False:\n"),
    PUTS("what does not fit is put", "        assert nbytes <= self._room and source.is_contiguous()\n", ""),
    PUT_ENGINE("what comes is looked for by the epoch before",
               "        self._driver.check(self._driver.wait_event(self._arriving.cuda_stream, mark, 0))\n", ""),
    PUT_ENGINE("the signal of a put is the one before", "call.place(crossing.sent), call.word,",
               "call.place(crossing.sent), call.word - (1 << 32),"),
    SLOT("the host does not count", "self.slot.word = next_word(self.slot.word, self.tag)", "pass"),
    NCCL("a receive is posted outside its group", "        group._start_coalescing()\n", ""),
    NCCL("NCCL may take all SMs", "        options.config.max_ctas = self.sms\n", ""),
    NCCL("NCCL's kernels need SMs that lie together", "        options.config.cga_cluster_size = 1\n", ""),
    NCCL("communicators of several twins meet in one place", "{topology.rank % topology.local}", "0"),
    NCCL("a communicator meets where one has failed", "agreement.name_of(f\"network/", "str(f\"network/"),
    NCCL("twins that not all have connected stay", "            self.close(orderly=False)\n            raise\n",
         "            raise\n"),
    NCCL("torch's watchdog ends the process first", "2 * self._timeout_s + _QUEUED_S", "2 * self._timeout_s"),
    NCCL("who is late is said to be the rank that a block is for",
         "topology.receiver(crossing.sent.target)", "crossing.sent.target"),
    NCCL("nobody looks how old an exchange is",
         "if self._under_way and self._under_way[0].is_late(self._timeout_s):", "if False:"),
    NCCL("work that stands before an exchange counts as its time", "if self._began is None and self._may_start():",
         "if self._began is None:"),
    NCCL("an exchange counts its time from when the one before it began",
         "if self._under_way and self._under_way[0].is_late(self._timeout_s):",
         "if any([one.is_late(self._timeout_s) for one in self._under_way]):"),
    NCCL("an exchange of a GPU that has failed has no limit",
         "the time-out holds all the same\n            return True", "the time-out holds all the same\n            return False"),
    NCCL("exchanges that ended are late", "while self._under_way and self._under_way[0].done:", "while False:"),
    NCCL("who watches exchanges ends the capture of a graph", "        leave_captures_alone()\n", ""),
    NCCL("a failed wait leaves NCCL running", "            if self._failures.failed:\n", "            if False:\n"),
    NCCL("a word crosses alone", "((sent.data, received.data), (sent.word, received.word))", "((sent.word, received.word),)"),
    NCCL("a transport ends twice", "        if self._ended.is_set():\n            return\n", ""),
    SUM("sums between nodes are a number after a failed wait",
        "tl.load(abort_ptr, volatile=True) != 0", "tl.load(abort_ptr, volatile=True) < 0"),
    SUM("sums between nodes take blocks in the slot's order", "tl.load(order_ptr + place)", "place"),
    SUM("a program adds one tile", "tl.cdiv(size, BLOCK), tl.num_programs(0))", "tl.cdiv(size, BLOCK), 999)"),
    SUM("programs leave tiles out", "range(tl.program_id(0), tl", "range(2 * tl.program_id(0), tl"),
    SUM("sums are rounded block by block",
        "total += tl.load(part_ptr + offsets, mask=mask, other=0.0).to(tl.float32)",
        "total = (total + tl.load(part_ptr + offsets, mask=mask, other=0.0)).to(y_ptr.dtype.element_ty).to(tl.float32)"),
    SUMS("ranks take different numbers of SMs for sums", "min(agreement.exchange(probe.gbs(count), _MEASURE))",
         "agreement.exchange(probe.gbs(count), _MEASURE)[0]"),
    SUMS("a sum need not keep up", "while gbs < needed and sms < most:", "while False:"),
    SUMS("sums take more SMs than communication may have", "sms = min(most, max", "sms = min(999, max"),
    SUMS("sums take SMs that they do not need", "math.ceil(sms * needed / gbs)))", "math.ceil(2 * sms * needed / gbs)))"),
    SUMS("nobody says that sums may have no more", ", the most that they may have", ""),
    ENGINES_MADE("sums take what NCCL has", "self._budget.for_sums(network)", "self._budget.for_sums(0)"),
    ENGINES_MADE("sums take what NCCL may leave at least",
                 "self._settled(gbs, nccl.sms)", "self._settled(gbs, self._budget.for_network)"),
    SAYS("every rank says what was found", "    if rank == 0:\n", "    if True:\n"),
    SUMS("nodes of one rank measure sums", "if sms or topology.local == 1:", "if sms:"),
    SUMS("the setting of sums is measured, too", "if sms or topology.local == 1:", "if topology.local == 1:"),
    SUMS("a program may take more than one SM", "return min(sms or tiles, tiles), block", "return tiles, block"),
    SUMS("there are programs that have nothing to add", "return min(sms or tiles, tiles), block", "return sms or tiles, block"),
    SUMS("many blocks are added 64 KiB at a time", "if sms and count <= MOST_OF_64_KIB else", "if sms else"),
    SUM_PROBE("the first burst of sums counts, in which they are compiled",
              "        seconds(burst, self._device)  # it", "        # it"),
    SUM_PROBE("what a sum writes is not counted", "(local + 1) * self._own.nbytes", "local * self._own.nbytes"),
    SUM_PROBE("the probe adds fewer blocks", "COUNT=len(received)", "COUNT=1"),
    ENGINES_MADE("sums keep up with the slowest network", "self._settled(gbs, nccl.sms)", "self._settled(1.0, nccl.sms)"),
    ENGINES_MADE("nobody says what communication holds",
                 "        say_on_rank_0(self.agreement.rank, in_words(", "        str(in_words("),
    BUDGET("communication holds more SMs", "MOST_SMS = 16", "MOST_SMS = 17"),
    BUDGET("waits do not count", "MOST_SMS - WAIT_SMS - network)", "MOST_SMS - network)"),
    BUDGET("NCCL leaves nothing to sums", "if self.local > 1 and not self.reduce_sms:", "if False:"),
    BUDGET("NCCL leaves SMs to sums that nobody makes", "(self.reduce_sms if self.local > 1 else 0)", "self.reduce_sms"),
    BUDGET("what sums are given is not taken from NCCL", "(self.reduce_sms if self.local > 1 else 0)", "0"),
    BUDGET("NCCL gets a CTA without a partner", "left - left % 2", "left"),
    BUDGET("a setting of sums is cut", "return self.reduce_sms or max(", "return max("),
    BUDGET("a setting of NCCL is cut", "        if self.network_sms:\n", "        if False:\n"),
    SUM_SMS("a sum takes all SMs", "others, total, self._plan.reduce_sms)", "others, total)"),
    SUM_SMS("a scatter's products leave no SM to sums", "engine.products(plan.spared_sms)", "engine.products(plan.send_sms)"),
    SUM("sums between nodes begin at another block's chunk", "* pitch", "* size"),
    BLAS("products go on sparing SMs", "self._count_on(handle, before.value)", "pass"),
    BLAS("products count on all SMs after the bracket", "self._count_on(handle, before.value)", "self._count_on(handle, 0)"),
    BLAS("products take the SMs of a bracket around theirs", "min(before.value or self._count, self._count - sms)",
         "self._count - sms"),
    BLAS("no target is taken for no SM", "before.value or self._count", "before.value"),
    BLAS("nobody asks cuBLAS what it was told", "self._check(self._get(handle, ctypes.byref(before)), ", "self._check(0, "),
    BLAS("products spare all other SMs", "self._count - sms", "sms"),
    BESIDE("weight gradients beside the network spare none",
           "return domain.engine.products(started.spared_sms)", "return _NONE_SPARED"),
    COLUMN("a column linear's weight gradient spares nothing while dx crosses",
           "None if scatter is None else plan.dgrad", "None"),
    COLUMN("a weight gradient without dx spares SMs", "None if scatter is None else plan.dgrad", "plan.dgrad"),
    ULYSSES("a weight gradient spares nothing for the part that is sent ahead",
            "None if part is self.parts[-1] else part.exchange.plan.dgrad", "None"),
    ULYSSES("the last part's weight gradient spares SMs",
            "None if part is self.parts[-1] else part.exchange.plan.dgrad", "part.exchange.plan.dgrad"),
    ULYSSES("a weight gradient of parts to rows spares nothing while dx leaves",
            "None if dx is None else part.exchange.plan.dgrad", "None"),
    ULYSSES("a weight gradient of parts without dx spares SMs",
            "None if dx is None else part.exchange.plan.dgrad", "part.exchange.plan.dgrad"),
    STREAM_PRODUCTS("products of a gather beside the network spare none",
                    "self._engine.products(self._plan.send_sms)", "self._engine.products(0)"),
    STREAM_PRODUCTS("products of a scatter beside the network spare none",
                    "with engine.products(plan.spared_sms)", "with engine.products(0)"),
    EXCHANGE_PRODUCTS("products of GEMM + A2A beside the network spare none",
                      "with engine.products(self._plan.spared_sms)", "with engine.products(0)"),
    EXCHANGE_PRODUCTS("products of A2A + GEMM beside the network spare none",
                      "self._engine.products(self._plan.send_sms)", "self._engine.products(0)"),
    EXCHANGE_CHUNKS("CPU processes multiply blocks together",
                    'topology.nodes == 1 or device.type != "cuda":', "topology.nodes == 1:"),
    TOGETHER("blocks are multiplied together whose sum takes less", "_DEEP = 1024", "_DEEP = 512"),
    EXCHANGE_CHUNKS("long first chunks are multiplied by rows", " and chunks == CHUNK_COUNTS[-1]\n", "\n"),
    EXCHANGE_CHUNKS("CPU processes multiply by rows",
                    'two_nodes_of_one and device.type == "cuda" and chunks', "two_nodes_of_one and chunks"),
    EXCHANGE_CHUNKS("many nodes multiply by rows", "topology.nodes == topology.world == 2", "topology.nodes == topology.world"),
    EXCHANGE_CHUNKS("ranks of one node multiply by rows", "topology.nodes == topology.world == 2", "topology.world == 2"),
    EXCHANGE_CHUNKS("a kernel's plan is by rows", 'choice.method == "chunked" and _by_rows', "_by_rows"),
    EXCHANGE_CHUNKS("chunks of GEMM + A2A are counted by all columns",
                    "pass_.n // (pass_.world if pass_.kind == GEMM_A2A else 1)", "pass_.n"),
    SMS_OF("products spare what NCCL has by default",
           "NodeNetwork(config.network_sms, config.reduce_sms,", "NodeNetwork(4, config.reduce_sms,"),
    SMS_OF("as many SMs add as by default",
           "NodeNetwork(config.network_sms, config.reduce_sms,", "NodeNetwork(config.network_sms, 4,"),
    CHUNKS("every pass spares SMs for sums", "adds = kind == SCATTER and topology.nodes > 1", "adds = topology.nodes > 1"),
    CHUNKS("a rank alone spares SMs for sums", "topology.nodes > 1 and topology.local > 1", "topology.nodes > 1"),
    CHUNKS("a product leaves no SM to sums", "return self.send_sms + self.reduce_sms", "return self.send_sms"),
    CHUNKS("blocks cross the network whole", "if nodes > 1 and on_gpu and TRAITS[choice.method].pushes:", "if False:"),
    CHUNKS("NCCL gets no SMs",
           'return network if nodes > 1 and device.type == "cuda" and method', "return 0 if method"),
    CHUNKS("products of collective spare SMs that nothing of ours takes",
           'nodes > 1 and device.type == "cuda" and method != "collective" else', 'nodes > 1 and device.type == "cuda" else'),
    CHUNKS("products of collective spare SMs for sums that it does not make",
           'if adds and device.type == "cuda" and method != "collective" else', 'if adds and device.type == "cuda" else'),
    In(BESIDE.file, (f"{SPARED[0].partition('::')[0]}::test_they_spare_the_sms_of_sums_too",))(
        "with NVSHMEM weight gradients spare nothing for sums", "not started.spared_sms:", "not started.send_sms:"
    ),
    BARRIERS("a barrier crosses the network first", "if nodes > 1:  # on CPUs, too", "if nodes > 9:  # on CPUs, too"),
    PRETENDED("ranks of real nodes are told apart", "    if count > node_ranks:", "    if True:"),
    PRETENDED("all ranks are one host", "{here // node_ranks}", "{0 * here // node_ranks}"),
    SLOT("places do not count the block", "block * nbytes + chunk", "0 * nbytes + chunk"),
    SLOT("a piece inside the node fills another block", "[leg.fills].chunk(self.chunks)", "[self.rank].chunk(self.chunks)"),
    SLOT("a signal of another block is sent", "self.slot.words[leg.target][leg.fills,", "self.slot.words[leg.target][self.rank,"),
    WORKSPACE(
        "twins do not meet", "                self.wait(call, topology.twin(node), 1)\n", "                pass\n",
        f"{NODES}::test_nobody_leaves_a_barrier_before_all_have_come",
    ),
    PROCESSES("a block is passed on before it is there",
           "        self._call.wait_chunk(crossing.received.fills, crossing.received.chunk)\n", ""),
    PROCESSES("the own node's partials are added twice", "if block != twin:", "if True:"),
    PROCESSES("sums of other nodes are left out", "                    total += call.chunk_of(topology.twin(node), chunk)\n", ""),
]  # fmt: skip
