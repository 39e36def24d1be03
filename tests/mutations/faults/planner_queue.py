"""Faults of the planner with one hardware queue: turns, orders, arrivals, and who comes first to the SMs."""

from __future__ import annotations

from tests.mutations.mutation import In

QUEUES, INPUTS, COMMAND = (f"tests/unit/test_plan_{name}.py" for name in ("queue", "inputs", "command"))
SIMULATION = "overlap_train/tools/plan/simulation"
QUEUE = In(f"{SIMULATION}/hardware_queue.py", (QUEUES,))
ENQUEUED = In(f"{SIMULATION}/enqueued.py", (QUEUES,))
RANK = In(f"{SIMULATION}/simulated_rank.py", (QUEUES,))
SIMULATE = In(f"{SIMULATION}/simulate.py", (QUEUES,))
LIBRARY = In(f"{SIMULATION}/by_library.py", (QUEUES,))
PROGRAMS = In(f"{SIMULATION}/programs.py", (QUEUES,))
BACKWARD = In(f"{SIMULATION}/backward.py", (QUEUES,))
COST = In("overlap_train/planning/cost.py", (QUEUES,))
MACHINES = In("overlap_train/planning/machines.py", (QUEUES,))
DOCTOR = In("overlap_train/tools/doctor/system.py", (INPUTS,))
SAID = In("overlap_train/tools/plan/tables.py", (f"{COMMAND}::test_across_nodes_it_says_how_many_queues_there_are",))

FAULTS = [
    QUEUE("queue: whoever is ready starts", "self._ready[what.place] = action", "action()"),
    QUEUE("queue: what is apart has a turn", "        if what.place is None:\n", "        if False:\n"),
    QUEUE("queue: products find their SMs whoever comes first", "return kernel.late_us if", "return 0.0 if"),
    QUEUE("queue: products are late beside every exchange", "self._are_pairs_broken = not self._running and (",
          "self._are_pairs_broken = True or ("),
    QUEUE("queue: an exchange comes first that waits by an event", "send.place is not None or not self._next", "True"),
    QUEUE("queue: a product that is enqueued later comes first", "(send.place is not None or not self._next)", "not self._next"),
    QUEUE("queue: products are late for ever", "            self._are_pairs_broken = False\n", "            pass\n"),
    RANK("queue: kernels do not wait for their turn", "partial(self._queue.start, kernel, run)", "run"),
    RANK("queue: waits do not wait for their turn", "self._queue.start(kernel, lambda: self._when(kernel.needs,",
         "(lambda kernel, run: run())(kernel, lambda: self._when(kernel.needs,"),
    RANK("queue: exchanges do not wait for their turn", "partial(self._queue.start, send, begin)", "begin"),
    RANK("queue: arrivals do not wait for their turn", "partial(self._queue.start, arrival, partial(self.reach, arrival.token))",
         "lambda one=arrival: (self.reach(one.token), self._queue.start(one, int))"),
    RANK("queue: what has crossed has arrived", "_crossed(token) if token in self._let_arrive else token", "token"),
    SIMULATE("queue: what lands is there before it is let in", "rank.take(landed(", "rank.reach(landed("),
    ENQUEUED("queue: every stream has its own", "system.connections == 1 and any", "False and any"),
    ENQUEUED("queue: streams always share one", "system.connections == 1 and any", "any"),
    ENQUEUED("queue: collectives stand in it, too", "and any(isinstance(item, Send) for item in items)", "and items"),
    ENQUEUED("queue: what arrives is never let", "                yield self._arrivals[number]\n", "                pass\n"),
    ENQUEUED("queue: a sum is behind its exchange",
             "                yield from before\n                yield self._sends[number]\n",
             "                yield self._sends[number]\n                yield from before\n"),
    ENQUEUED("queue: what lands arrives", "if crossing.lands:", "if False:"),
    ENQUEUED("queue: dx crosses before the weight gradient", "cut = next(own, len(items))", "cut = len(items)"),
    ENQUEUED("queue: a weight gradient stands behind the first exchange of x",
             "isinstance(item, Send) and item.call == work.call", "isinstance(item, Send)"),
    ENQUEUED("queue: x is let arrive behind the weight gradient", "    yield from earlier.finish() if earlier else ()\n", ""),
    ENQUEUED("queue: x crosses behind the products of dx",
             "            yield from earlier.go_ahead(done, len(products)) if earlier else ()\n", ""),
    BACKWARD("queue: dx stands between its products, behind x", "follows=work.topology.nodes > 1", "follows=False"),
    LIBRARY("queue: a gather's exchanges take turns with products", "yield from ahead.go_ahead(chunks + turn + taken[0],",
            "yield from ahead.go_ahead(0,"),
    LIBRARY("queue: the third exchange of products by rows stands behind the first sum",
            "    yield from ahead.go_ahead(sum(map(len, in_parts)) + 1, 2 * chunks)\n", ""),
    LIBRARY("queue: a gather's products take one chunk each", "partial(work.chunk_us, parts)",
            "partial(work.chunk_us, work.plan.chunks)"),
    LIBRARY("queue: an all-to-all's exchanges take turns with products",
            "yield from ahead.go_ahead(done * chunks + chunk * len(blocks), work.world * chunks)", "pass"),
    LIBRARY("queue: products before Hopper are in clusters", "int(work.system.capability >= CLUSTERS)", "1"),
    PROGRAMS("queue: the kernel's exchanges take turns with its launches",
             "yield from ahead.go_ahead(chunks + turn, chunks * work.topology.nodes)", "pass"),
    PROGRAMS("queue: exchanges arrive whatever the queue does", "        arrivals=arrivals,\n", ""),
    COST("queue: late clusters take no wave", "us + late_waves * wave_us", "us"),
    MACHINES("queue: Blackwell trains with one", "_ASKED_FOR if sheet.capability < _BLACKWELL else _OF_CUDA", "_ASKED_FOR"),
    DOCTOR("queue: the doctor does not look how many there are", "int(word) if word.isdecimal() and int(word) else", ""),
    DOCTOR("queue: the doctor takes what is no number", "word.isdecimal() and int(word)", "word"),
    SAID("queue: nobody is told", "ONE_QUEUE if system.connections == 1 else MANY_QUEUES", "MANY_QUEUES"),
]  # fmt: skip
