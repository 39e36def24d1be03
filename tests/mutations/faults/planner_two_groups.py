"""Faults of the planner under TP x Ulysses: two groups in one program, the runtime's order in a simulation, choices, tables."""

from __future__ import annotations

from tests.mutations.mutation import In

BOTH, COMMAND, INPUTS = (f"tests/unit/test_plan_{name}.py" for name in ("two_groups", "command", "inputs"))
PLANS = "overlap_train/tools/plan"
SAYS = (
    f"{COMMAND}::test_tp_and_ulysses_together_say_what_hides_which_and_which_spans_pay",
    f"{COMMAND}::test_short_sequences_and_nodes_hide_no_all_to_all",
)
REPLAY = In(f"{PLANS}/replay.py", (BOTH,))
PARTS = In(f"{PLANS}/noted_parts.py", (BOTH,))
GROUPS = In(f"{PLANS}/two_groups.py", (BOTH,))
PREDICTION = In(f"{PLANS}/prediction.py", (BOTH,))
STRATEGY = In(f"{PLANS}/inputs.py", (BOTH,))
FITS = In(f"{PLANS}/fits.py", (INPUTS,))
TABLES = In(f"{PLANS}/tables.py", SAYS)
SPANS = In(f"{PLANS}/command.py", SAYS)
SIMULATE = In("overlap_train/tools/plan/simulation/simulate.py", (BOTH,))
BACKWARD = In("overlap_train/tools/plan/simulation/backward.py", (BOTH,))
WORK = In("overlap_train/tools/plan/simulation/work.py", (BOTH,))
TILES = In("overlap_train/tools/plan/simulation/persistent_tiles.py", (BOTH,))
# What the runtime does, the plan does.
AHEAD = In("overlap_train/ulysses/ahead.py", (BOTH,))
TURNS = In("overlap_train/ulysses/rows_backward.py", (BOTH,))

FAULTS = [
    SIMULATE("grid: a block goes to a rank of the other", "source if self.stands_for_all else group.ranks[taker]",
             "source if self.stands_for_all else taker"),
    SIMULATE("grid: a copy uses the link of a rank of the other", "else ranks[send.leg.target]", "else send.leg.target"),
    REPLAY("grid: exchanges wait in the copies' queue", "replace(send, lane=EXCHANGES) for send", "send for send"),
    REPLAY("grid: calls share their signals", "        self._calls += 1\n", ""),
    PARTS("grid: an operator takes no slot", "            self._domain.workspace.use.take()\n", "            pass\n"),
    REPLAY("grid: nobody waits for a slot", "[wait(self._work, self._work.arrivals(0))]", "[]"),
    REPLAY("grid: what has come is not waited for", "[own_block(self._work), wait(self._work, self._work.all_arrivals())]",
           "[own_block(self._work)]"),
    REPLAY("grid: a barrier takes no time", "([barrier(self._recording.system)], [])", "([], [])"),
    REPLAY("grid: an operator begins without a barrier",
           "self.domain.workspace.begin(self.tag, self.slots, self.barrier_first)",
           "self.domain.workspace.begin(self.tag, self.slots, False)"),
    REPLAY("grid: views are copied", "return 0 if is_view else result.nbytes", "return result.nbytes"),
    REPLAY("grid: memory is copied", 'or "empty" in name', "or False"),
    REPLAY("grid: all rows are written for some", "return int(args[2].nbytes)", "return int(args[0].nbytes)"),
    REPLAY("grid: a kernel reads nothing", "sum_us)(self.system, 2 * nbytes)", "sum_us)(self.system, nbytes)"),
    REPLAY("grid: torch moves rows as fast as kernels of ours", "if name in ONE_BY_ONE", "if False"),
    PARTS("grid: x of a weight gradient lies in one piece", "x_blocks=blocks", "x_blocks=1"),
    PARTS("grid: the weight gradient comes before x", "            blocks = len(x())\n", "            blocks = 2\n"),
    PARTS("grid: q, k and v pack themselves", '        self._move("pack", part, packed)\n', ""),
    PARTS("grid: q, k and v unpack themselves", 'self._move("unpack", part, received)', "pass"),
    BACKWARD("grid: the weight gradient of blocks is one product", "pass_.n // blocks, pass_.rows", "pass_.n, pass_.rows"),
    WORK("grid: each part of a product has all power", "self.world * chunks * self.parts", "self.world * chunks"),
    BACKWARD("grid: each part of a weight gradient has all power", "blocks * work.parts, spared", "blocks, spared"),
    TILES("grid: each part of a kernel has all power", "* pass_.k * work.parts) / work.parts", "* pass_.k)"),
    GROUPS("grid: k and v are sent once", "heads.of_rank(s.cp).features * s.cp if", "heads.features if"),
    GROUPS("grid: x is not sent again", "carries = 1 if self.is_qkv else 2", "carries = 1"),
    GROUPS("grid: parts across nodes", "if self.strategy.cp_nodes == 1 else whole_shard", "if True else whole_shard"),
    GROUPS("grid: short sequences in parts", "len(self.parts) == 1 or method", "method"),
    GROUPS("grid: without overlap in parts", "len(self.parts) == 1 or method == COLLECTIVE", "len(self.parts) == 1"),
    GROUPS("grid: the exchange comes first", "self.is_qkv != is_backward else", "not self.is_qkv else"),
    GROUPS("grid: an own block leaves", "(s.cp - 1) / s.cp * self._exchanged_bytes", "self._exchanged_bytes"),
    GROUPS("grid: all tokens are exchanged", "self.strategy.rows // self.strategy.cp *", "self.strategy.rows *"),
    GROUPS("grid: an exchange stays in its node", "nbytes, s.cp, s.cp_nodes)", "nbytes, s.cp)"),
    GROUPS("grid: a collective needs no copies", "yield from (copy for _ in range(before))", "yield from ()"),
    GROUPS("grid: ranks are numbered the other way", "range(t, tp * cp, tp)", "range(t, tp * cp, cp)"),
    PREDICTION("grid: linears see all tokens", "forward_pass(linear, strategy.rows // strategy.cp, strategy.tp)",
               "forward_pass(linear, strategy.rows, strategy.tp)"),
    PREDICTION("grid: NCCL need not exchange", "nccl_us=over_tp.nccl_us + both.exchange_us", "nccl_us=over_tp.nccl_us"),
    STRATEGY("grid: TP spans all nodes", "max(1, self.tp // self.local)", "self.nodes"),
    STRATEGY("grid: Ulysses spans all nodes", "self.nodes if self.tp_nodes == 1 else self.cp", "self.nodes"),
    STRATEGY("grid: products spare SMs for an exchange of NCCL's",
             "self.tp_nodes if self.tp > 1 else self.cp_nodes", "self.nodes"),
    FITS("grid: tensor-parallel groups lie across nodes",
         "if strategy.local % strategy.tp and strategy.tp % strategy.local:", "if False:"),
    FITS("grid: KV heads are gathered unseen", "    if kv % tp:\n", "    if False:\n"),
    FITS("grid: heads are cut", "    if error is not None:\n        raise ValueError(error)\n", ""),
    FITS("grid: positions are cut", '    check_divisible("seq", strategy.seq, strategy.ranks)\n', ""),
    FITS("grid: what fits is told of one of them", "other = strategy.tp if strategy.is_grid else 1", "other = 1"),
    SPANS("grid: spans of one", "    if strategy.is_grid:\n        return [", "    if False:\n        return ["),
    SPANS("grid: spans of few tp", "for tp in (*SPANS, strategy.tp) if", "for tp in (strategy.tp,) if"),
    TABLES("grid: spans are named by ranks", 'axes = ("tp", "cp") if strategy.is_grid else', "axes ="),
    TABLES("grid: nobody says what is hidden", "if hidden else []", "if False else []"),
    TABLES("grid: kernels in a node are not estimated", "if strategy.overlap_nodes > 1:", "if strategy.nodes > 1:"),
    TABLES("grid: sums of nodes that Ulysses spans",
           "communication_sms(system, strategy.overlap_local)", "communication_sms(system, 1)"),
    AHEAD("grid: the plan sends ahead itself", "return self.plan.sends_ahead and reader.plan.sends_ahead", "return False"),
    TURNS("grid: the plan sends x beside dx itself", "in (self._made, again) if blocks", "in (self._made,) if blocks"),
]  # fmt: skip
