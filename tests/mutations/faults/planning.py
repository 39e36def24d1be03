"""Faults of what the first call with some shapes decides: checks, schedules, plans, the choice of a method."""

from __future__ import annotations

from tests.mutations.mutation import In

UNIT, PROTOCOL = "tests/unit", "tests/protocol"
PLANS = (f"{UNIT}/test_plan.py",)
ORDER = In("overlap_train/planning/schedule/order.py", (f"{PROTOCOL}/test_schedule.py",))
TURNS = In("overlap_train/planning/schedule/turns.py", (f"{UNIT}/test_turns.py",))
LEGS = In("overlap_train/planning/schedule/legs.py", (f"{PROTOCOL}/test_schedule.py",))
PLAN = In("overlap_train/planning/engine_plan.py", PLANS)
WHOLE_PLAN = In("overlap_train/planning/plan.py", PLANS)
REFUSALS = In("overlap_train/planning/refusals.py", PLANS)
SPEC = In("overlap_train/planning/spec.py", PLANS)
ARGUMENTS = In("overlap_train/planning/arguments.py", PLANS)
CACHE = In("overlap_train/planning/cache.py", PLANS)
TILING = In("overlap_train/planning/tiling.py", PLANS)
CHOICE = In("overlap_train/planning/choice.py", (f"{UNIT}/test_choice.py",))
MODEL = In("overlap_train/planning/untuned.py", CHOICE.tests)
VARIANT = In("overlap_train/planning/untuned_variant.py", CHOICE.tests)
SPARE = In("overlap_train/planning/waves.py", PLANS)
WAVES = In("overlap_train/planning/waves.py", (f"{UNIT}/test_choice.py",))
RECORDS = In("overlap_train/planning/untuned.py", (f"{UNIT}/test_choice_records.py",))
PASSES = In("overlap_train/planning/passes.py", (f"{UNIT}/test_choice.py",))
TABLE = In("overlap_train/planning/table.py", (f"{UNIT}/test_tuning_table.py",))

FAULTS = [
    In("overlap_train/planning/plan.py", (f"{UNIT}/test_frozen_weight.py",))(
        "a reduction is split to let a weight gradient run first that nobody wants",
        "alone(backward, second, device)",
        "backward",
    ),
    TURNS("exchanges are enqueued in turns with products", "1 + exchanges * done // parts", "1"),
    TURNS("exchanges are rounded up", "1 + exchanges * done // parts", "1 - (-exchanges * done // parts)"),
    TURNS(
        "too many exchanges are enqueued ahead", "1 + exchanges * done // parts", "2 + 2 * exchanges * done // parts"
    ),
    TURNS("an exchange follows its product at once", "_PRODUCTS_AHEAD = 2", "_PRODUCTS_AHEAD = 0"),
    TURNS("the own node's products come last", "turn * len(stays) // between", "0"),
    TURNS("what the node's other ranks add is multiplied alone", "topology.local if kind == SCATTER else 1", "1"),
    TURNS(
        "own rows come first",
        "(*others[len(others) - own_node :], topology.rank)",
        "(topology.rank, *others[len(others) - own_node :])",
    ),
    ORDER("blocks arrive in the order in which they are sent", "-node, -place)", "node, place)"),
    ORDER(
        "a rank sends to itself",
        "for node in nodes for place in locals_)[:-1]",
        "for node in nodes for place in locals_)",
    ),
    LEGS("a scatter sends its first block to all", "0 if kind == GATHER else target", "0"),
    LEGS("a gather sends other blocks than its shard", "0 if kind == GATHER else target", "target"),
    ORDER(
        "own rows come first in a scatter",
        "product((*targets(topology), rank), numbers)",
        "product((rank, *targets(topology)), numbers)",
    ),
    LEGS(
        "legs are equal where their pieces are",
        "@dataclass(frozen=True, eq=False)",
        "@dataclass(frozen=True)",
        survives="equal legs have equal routes; comparing them only costs time",
    ),
    PLAN("the copy engine is used without slots", 'return 0 if self.method == "collective" else 1', "return 1"),
    WHOLE_PLAN(
        "memory is allocated for collectives", 'if methods - {"collective", LOW_LATENCY} else 0', "if True else 0"
    ),
    WHOLE_PLAN(
        "x is gathered again although it is kept",
        'spec.sends_input and config.gathered_input == "regather"',
        "spec.sends_input",
    ),
    PLAN(
        "x is gathered again by a fused kernel's method",
        'fprop.method if fprop.method in ("collective", LOW_LATENCY) else "chunked"',
        "fprop.method",
    ),
    PLAN("x is gathered again in chunks", "route = legs(fprop.kind, topology, chunks=1)", "route = fprop.legs"),
    LEGS(
        "pushes of a gather wait for tiles",
        "after_tiles = tiled and kind not in INBOUND",
        "after_tiles = tiled",
        f"{UNIT}/test_plan.py",
    ),
    PLAN(
        "pushes of a scatter do not wait for tiles",
        "route = legs(kind, topology, chunks, tiled)",
        "route = legs(kind, topology, chunks)",
    ),
    PLAN("blocks that are to be sent whole are cut", " or choice.variant.whole:", ":"),
    PLAN(
        "a scatter is cut by the rows of its input",
        "pass_.row_features * pass_.dtype",
        "pass_.k * pass_.dtype",
    ),
    PLAN(
        "a rank too many for the tensor descriptors",
        "pass_.world - 1 > MOST_DIRECT_PEERS",
        "pass_.world - 1 > MOST_DIRECT_PEERS + 1",
    ),
    PLAN("a gather is refused for too many ranks", "too_many = kind not in INBOUND and choice", "too_many = choice"),
    PLAN("TMA reads a weight that it cannot", " or not tma_reads_weight(w):", ":"),
    REFUSALS(
        "only the forward pass is looked at", "for engine in (plan.fprop, plan.dgrad):", "for engine in (plan.fprop,):"
    ),
    WHOLE_PLAN(
        "a backward that gathers nothing starts with a barrier",
        "barrier_first and (gathers or not plan.spec.sends_input)",
        "barrier_first",
    ),
    WHOLE_PLAN(
        "a backward by NCCL starts with a barrier",
        'pushes_again = sends_again and forward.method != "collective"',
        "pushes_again = sends_again",
    ),
    WHOLE_PLAN(
        "a backward that has kept x starts with a barrier",
        'pushes_again = sends_again and forward.method != "collective"',
        'pushes_again = forward.method != "collective"',
    ),
    PLAN(
        "a reason names more chunks than there are",
        "choice = in_variant(choice, replace(choice.variant, chunks=chunks))",
        "pass",
        f"{UNIT}/test_tuning_nodes.py",
    ),
    SPEC("a gather has the rows of one rank", "(world_size if self.fprop in (GATHER, GEMM_A2A) else 1)", "1"),
    SPEC(
        "a scatter has the rows of all ranks twice",
        "(world_size if self.fprop in (GATHER, GEMM_A2A) else 1)",
        "world_size",
    ),
    SPEC(
        "slots are as wide as the input", "(x.shape[-1:] if self.sends_input else w.shape[:1]).numel()", "x.shape[-1]"
    ),
    ARGUMENTS("an input of one dimension is accepted", "if x.dim() < 2 or w.dim() != 2:", "if w.dim() != 2:"),
    ARGUMENTS("rows that ranks cannot share are accepted", "if x.shape[0] % world_size == 0:", "if True:"),
    ARGUMENTS(
        "a bias of another dtype is accepted",
        '{w_name: w} if bias is None else {w_name: w, "bias": bias}',
        "{w_name: w}",
    ),
    ARGUMENTS("a bias of another length is accepted", "bias.shape != w.shape[:1]", "bias.dim() != 1"),
    ARGUMENTS("an empty weight is accepted", "if x.numel() == 0 or w.numel() == 0:", "if x.numel() == 0:"),
    ARGUMENTS("operands on two devices are accepted", "if other.device != x.device:", "if False:"),
    CACHE("what was used last is forgotten first", "self._old, self._recent = self._recent, {}", "self._recent = {}"),
    CACHE(
        "a value that was used does not count as used", "return self.put(key, self._old[key])", "return self._old[key]"
    ),
    CACHE("one more is kept", "len(self._recent) >= self._least", "len(self._recent) > self._least"),
    CACHE("what is put again is there twice", "        self._old.pop(key, None)\n", ""),
    TILING(
        "chunks cost tiles",
        "_is_cheap(m_shard, c, may_cost) and m_shard * row_bytes",
        "m_shard % c == 0 and m_shard * row_bytes",
    ),
    TILING("chunks are not equal", "    if m_shard % chunks:\n        return False\n", ""),
    SPARE("a gather's chunks cost strips", "int(pass_.kind != GATHER and on_hopper", "int(on_hopper"),
    SPARE(
        "a scatter's chunks cost nothing",
        "int(pass_.kind != GATHER and on_hopper",
        "int(pass_.kind == GATHER and on_hopper",
    ),
    TILING(
        "kernels' chunks cost strips",
        "_is_cheap(m_shard, c, may_cost) and m_shard >=",
        "_is_cheap(m_shard, c, 1) and m_shard >=",
    ),
    PLAN("a scatter's chunks cost no strip", "on_gpu, most, may_cost=spare)", "on_gpu, most)"),
    PLAN("a scatter's chunks that kernels store cost no strip", "on_gpu, spare)", "on_gpu)"),
    SPARE("a strip costs the wave that a split reduction saves", " and not keeps_a_wave)", ")"),
    SPARE("portable kernels' chunks cost tiles", " and on_hopper(pass_, device) and not keeps", " and not keeps"),
    TILING(
        "chunks are too short for the copy engine",
        "m_shard * row_bytes >= c * shortest",
        "m_shard * row_bytes >= shortest",
    ),
    TILING("nodes of several GPUs exchange short chunks", "return local == 1 and 0 < gbs", "return 0 < gbs"),
    TILING("chunks are short for a fast network", "0 < gbs < _SLOW_GBS", "0 < gbs"),
    TILING("chunks are short for a network that nobody has measured", "0 < gbs < _SLOW_GBS", "gbs < _SLOW_GBS"),
    PLAN("chunks know nothing of the network", "device, topology.nodes, network.gbs)", "device, topology.nodes)"),
    TILING("tiles are rounded down", "-(-rows * self.parts // self.block_m)", "(rows * self.parts // self.block_m)"),
    TILING("the layout of a weight is not looked at", "return one_step and pitch > 0 and", "return pitch > 0 and"),
    TILING("an expanded weight is read by TMA", "one_step and pitch > 0 and pitch", "one_step and pitch"),
    TILING("a weight between two words is read by TMA", " and weight.data_ptr() % 16 == 0", ""),
    CHOICE(
        "a named method is overruled by the table",
        'if requested != "auto":',
        'if requested != "auto" and not table.winners:',
    ),
    CHOICE(
        "a measurement counts for other kernels",
        "    fits = winner is not None and on_hopper",
        "    fits = winner is not None or on_hopper",
    ),
    WAVES(
        "a scatter that leaves SMs idle counts as one full wave", "return 1 - MOST_IDLE <= tiles", "return 0 <= tiles"
    ),
    WAVES("a scatter of more than one wave counts as one", "tiles / FILLS_A_GPU <= 1", "tiles / FILLS_A_GPU"),
    WAVES("tiles that are half empty fill the GPU", "if not fills_tiles(pass_) or not scatters", "if not scatters"),
    WAVES(
        "a gather is a scatter to the choice",
        "return pass_.kind in (SCATTER, SCATTER_AND_WGRAD) and on_hopper",
        "return on_hopper",
    ),
    WAVES("blocks that are cut wait as a whole", "if not is_whole or not peers", "if not peers"),
    WAVES("peers' tiles that fill their waves have own ones beside them", " if last else 0", ""),
    WAVES("all own tiles wait", "min(FILLS_A_GPU - last, HOPPER_TILE.count(rows, pass_.n))", "FILLS_A_GPU"),
    WAVES(
        "own tiles wait for the copies of all blocks",
        "return pass_.copy_us / peers * beside",
        "return pass_.copy_us * beside",
    ),
    WAVES("however short own tiles wait, direct runs", "> MOST_WAITING * pass_.gemm_us", "> 0"),
    WAVES("own tiles wait although the reduction is split", " or saves_a_wave(pass_, device):", ":"),
    MODEL("own tiles wait beside those of peers", "if waits_in_a_wave(pass_, device):", "if False:"),
    MODEL("however long a gather's shard is, direct stores it", " and pass_.copy_us < FUSED_HOST_US", ""),
    MODEL("however long a gather is, direct runs it", "pass_.gemm_us < SHORT_GATHER_US and ", ""),
    MODEL("a backward hides its launches under short copies", "pass_.copy_us > FUSED_BACKWARD_HOST_US", "True"),
    VARIANT(
        "a gather's whole blocks do not collide",
        "return outweighs(pass_, method)\n    return pass_.kind",
        "return False\n    return pass_.kind",
    ),
    RECORDS("A2A + GEMM is left to fused", "SHORT_RECEIVE_US = 700.0", "SHORT_RECEIVE_US = 300.0"),
    RECORDS("A2A + GEMM that fused hides is left to direct", "SHORT_RECEIVE_US = 700.0", "SHORT_RECEIVE_US = 900.0"),
    RECORDS("parts of a long sequence are left to direct", "MOST_RECEIVED = 80 << 20", "MOST_RECEIVED = 160 << 20"),
    RECORDS("GEMM + A2A is left to fused", "SHORT_SEND_US = 160.0", "SHORT_SEND_US = 100.0"),
    RECORDS("GEMM + A2A that fused hides is left to direct", "SHORT_SEND_US = 160.0", "SHORT_SEND_US = 320.0"),
    RECORDS("a short gather is left to fused", "SHORT_GATHER_US = 300.0", "SHORT_GATHER_US = 160.0"),
    RECORDS(
        "launches of a backward count as one",
        "FUSED_BACKWARD_HOST_US = 70.0, 127.0",
        "FUSED_BACKWARD_HOST_US = 70.0, 70.0",
    ),
    MODEL("output layers are left to fused", "    if _is_narrow(pass_):\n", "    if False:\n"),
    MODEL("short output layers are not", "((6000.0, 4), (3000.0, 6))", "((6000.0, 4), (1500.0, 6))"),
    MODEL("output layers of four ranks are left to fused", "((6000.0, 4), (3000.0, 6))", "((6000.0, 4),)"),
    MODEL("the longest layers are not left to fused", "((6000.0, 4), (3000.0, 6))", "((6000.0, 1), (3000.0, 6))"),
    MODEL(
        "layers that are not so narrow are not left to fused",
        "((6000.0, 4), (3000.0, 6))",
        "((6000.0, 4), (3000.0, 4))",
    ),
    MODEL(
        "an output layer has more columns than rows",
        "short, long = sorted((pass_.n, pass_.k))",
        "short, long = pass_.k, pass_.n",
    ),
    MODEL("a weight is read again for each rank's few rows", "    if _reads_again(pass_):\n", "    if False:\n"),
    MODEL(
        "a scatter reads its weight again", "pass_.kind == GATHER and pass_.m <= ROWS_A_READ", "pass_.m <= ROWS_A_READ"
    ),
    MODEL("a weight that L2 holds is read again", " and weight > L2_BYTES", ""),
    MODEL("few rows of all ranks read a weight again", "ROWS_A_READ * pass_.world", "ROWS_A_READ * 4"),
    MODEL("few rows are left to fused", "if pass_.m <= FEW_ROWS:", "if pass_.m < FEW_ROWS:"),
    VARIANT("two ranks collide", "if pass_.world <= 2 or not TRAITS", "if not TRAITS"),
    VARIANT("short copies collide", "max(LONG_COPY_US, pass_.gemm_us)", "pass_.gemm_us"),
    CHOICE(
        "the tuner decides on a column's barrier",
        "if by_rule else measured",
        "if False else measured",
    ),
    VARIANT(
        "a plain scatter's reduction is split",
        "pass_.kind == SCATTER_AND_WGRAD and TRAITS[method].splits",
        "TRAITS[method].splits",
    ),
    WAVES("whatever saves no wave is split", "    if before <= after:\n", "    if False:\n"),
    WAVES(
        "a wave of tiles is worth any time",
        "/ before * pass_.gemm_us > SUM_LAUNCH_US + nbytes / (SUM_GBS * 1e3)",
        "/ before * pass_.gemm_us > 0",
    ),
    WAVES(
        "tiles of all ranks are counted apart",
        "apart = HOPPER_TILE.count(rows, pass_.n, peers) + HOPPER_TILE",
        "apart = peers * HOPPER_TILE.count(rows, pass_.n) + HOPPER_TILE",
    ),
    CHOICE("a measured loser is taken", "winner.measured != pass_ and splits", "splits"),
    CHOICE(
        "a trial's winner runs otherwise than it was timed",
        "return untuned_variant(pass_, method, device)",
        "return untuned_variant(pass_, method, device) if winner is None else PLAIN",
    ),
    CHOICE(
        "tuned passes keep the wave",
        "split_reduction=saves or measured.split_reduction)",
        "split_reduction=measured.split_reduction)",
    ),
    CHOICE(
        "alone, nothing is split",
        "    splits = choice.variant.split_reduction and saves_a_wave(pass_, device)\n",
        "    splits = False\n",
    ),
    PASSES(
        "a dgrad multiplies the same shape", "self.m, self.k, self.n, self.dtype", "self.m, self.n, self.k, self.dtype"
    ),
    PASSES(
        "passes of two dtypes share a measurement", "return self.kind, dtype_name(self.dtype)", 'return self.kind, ""'
    ),
    PASSES(
        "a size on an edge is in the bucket above",
        "(size - 1).bit_length()",
        "size.bit_length()",
        f"{UNIT}/test_tuning_table.py",
    ),
    TABLE(
        "an older winner overrules a newer one",
        "{**there, **{winner.measured.bucket: winner for winner in winners}}",
        "{**{winner.measured.bucket: winner for winner in winners}, **there}",
    ),
    TABLE("a file of another version is used", "if found != asdict(key):", "if False:"),
    TABLE(
        "a reader sees half a file", "        os.replace(scratch, path)", "        path.write_text(scratch.read_text())"
    ),
    WAVES(
        "a scatter's last wave is always whole to the choice",
        "count_waves(tiles, FILLS_A_GPU, own)",
        "count_waves(tiles, FILLS_A_GPU, 0)",
    ),
    WAVES(
        "a scatter's last wave is cut to the choice whoever's rows are in it",
        "count_waves(tiles, FILLS_A_GPU, own)",
        "count_waves(tiles, FILLS_A_GPU, 10**9)",
    ),
]
