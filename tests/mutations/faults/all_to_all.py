"""Faults of Ulysses' operators: engines, kernels, heads, sequence layouts, and what lies between an all-to-all and attention."""

from __future__ import annotations

from tests.mutations.mutation import In

UNIT, PROTOCOL = "tests/unit", "tests/protocol"
PROCESSES, OWN = f"{PROTOCOL}/test_processes.py", f"{PROTOCOL}/test_exchange_processes.py"
EVERY_SHAPE, BY_KERNELS = (
    f"{PROCESSES}::test_every_shape[chunked-2]",
    f"{PROCESSES}::test_every_shape_by_kernels[direct]",
)
ASIDE = f"{PROCESSES}::test_collectives_beside_the_callers_work"
SEEDED = f"{PROTOCOL}/test_interleaving_all_to_all.py"
CHUNKED = tuple(f"{SEEDED}::test_chunked_passes[{problem}-2-False]" for problem in ("to_heads", "to_rows"))
WITHOUT_PRODUCT = f"{SEEDED}::test_what_is_received_without_a_product_is_complete[False]"
FOOTPRINT = f"{PROTOCOL}/test_footprint.py::test_what_is_kept_for_backward_how_peers_find_memory_and_when_it_is_freed"
GIVEN_UP = f"{PROTOCOL}/test_interleaving_failures.py::test_a_product_of_blocks_that_were_given_up_is_nan"
MODES, MAIN_GRAD = f"{PROTOCOL}/test_modes.py::test_modes", f"{OWN}::test_main_grad_accumulation[regather]"
STRANGE = f"{OWN}::test_layouts_freezing_microbatches_and_recomputation[collective]"
ATTENTION = f"{PROTOCOL}/test_ulysses_attention.py"
BETWEEN_RANKS, REFUSED = (
    f"{ATTENTION}::test_an_attention_between_ranks_is_that_of_one_process[2-kv_heads1]",
    f"{ATTENTION}::test_calls_that_do_not_fit_say_why",
)
SCHEDULE, PLAN, PTX = f"{PROTOCOL}/test_schedule.py", f"{UNIT}/test_exchange_plan.py", f"{UNIT}/test_hopper_kernels.py"
GPU_EXACT = "tests/gpu/test_operators.py::test_every_shape_is_exact"

OUT = In("overlap_train/operators/gemm_all_to_all.py", (EVERY_SHAPE,))
IN = In("overlap_train/operators/all_to_all_gemm.py", (EVERY_SHAPE,))
PULLS = f"{PROTOCOL}/test_interleaving_pulls.py"
PULLED_MISMATCH = f"{PROTOCOL}/test_mismatched_calls.py::test_a_call_that_is_pulled_is_told_from_others"
THREAD = In("overlap_train/protocol/copy_thread.py", (PULLS,))
PULLED = In("overlap_train/operators/pulled_all_to_all.py", (f"{PULLS}::test_parts_pass",))
ENGINE_PLAN = In("overlap_train/planning/engine_plan.py", (PULLS,))
PARTS = In("overlap_train/ulysses/parts.py", (f"{UNIT}/test_parts.py",))
LINEARS = In("overlap_train/ulysses/linears.py", (EVERY_SHAPE,))
CALLS = In("overlap_train/ulysses/calls.py", (EVERY_SHAPE,))
EXCHANGE = In("overlap_train/ulysses/exchange.py", (EVERY_SHAPE,))
COPIES = In("overlap_train/ulysses/copies.py", (f"{UNIT}/test_attention_heads.py",))
STEPS = In("overlap_train/ulysses/ahead.py", (EVERY_SHAPE,))
PROJECTIONS = In("overlap_train/ulysses/attention.py", (BETWEEN_RANKS,))
ARGUMENTS = In("overlap_train/ulysses/arguments.py", (REFUSED,))
LAYOUT = In("overlap_train/operators/attention_layout.py", (f"{UNIT}/test_attention_layout.py",))
HEADS = In("overlap_train/planning/heads.py", (f"{UNIT}/test_attention_heads.py",))
INDICES = In("overlap_train/planning/indices.py", (f"{UNIT}/test_sequence_layout.py",))
SEQUENCE = In("overlap_train/planning/sequence.py", (f"{UNIT}/test_sequence_layout.py",))
LEGS = In("overlap_train/planning/schedule/legs.py", (SCHEDULE,))
SPEC, PASSES = In("overlap_train/planning/spec.py", (PLAN,)), In("overlap_train/planning/passes.py", (PLAN,))
WEIGHT_GRADIENT = In("overlap_train/operators/weight_gradient.py", (MAIN_GRAD,))
KERNEL = In("kernels/all_to_all_gemm.py", (BY_KERNELS,))
SCATTER = In("kernels/gemm_reduce_scatter.py", (BY_KERNELS,))
STORES, TILES = In("kernels/p2p_store.py", (BY_KERNELS,)), In("kernels/order.py", (SCHEDULE,))
HOPPER = In(
    "kernels/hopper_all_to_all_gemm.py",
    (f"{PTX}::test_the_kernel_after_an_all_to_all_waits_and_fences_at_each_blocks_edge",),
)
HOPPER_SCATTER = In(
    "kernels/hopper_gemm_reduce_scatter.py",
    (f"{PTX}::test_the_kernel_before_an_all_to_all_polls_nothing_and_loads_a_and_b_only",),
)
GPU_IN = In(HOPPER.file, (f"{GPU_EXACT}[fused-to_rows-torch.bfloat16]",), gpu=True)
GPU_DIRECT_IN = In(HOPPER.file, (f"{GPU_EXACT}[direct-to_rows-torch.bfloat16]",), gpu=True)
GPU_OUT = In(HOPPER_SCATTER.file, (f"{GPU_EXACT}[fused-to_heads-torch.bfloat16]",), gpu=True)

LENGTHS = f"{PROTOCOL}/test_ulysses_lengths.py"
REFUSED_LENGTHS = f"{LENGTHS}::test_lengths_that_do_not_fit_are_refused_by_name"
BESIDE_TENSOR = f"{LENGTHS}::test_beside_tensor_parallelism[regather-False]"
IN_PADDED_PARTS = "test_in_parts_of_which_some_are_padding[chunked]"
OF_ONE_PROCESS = f"{LENGTHS}::test_values_and_gradients_are_those_of_one_process[2 ranks-regather]"
SHARDS, ROWS = (In(f"overlap_train/ulysses/{file}.py", (OF_ONE_PROCESS,)) for file in ("shards", "rows"))
HEAD_ROWS = In("kernels/attention_layout.py", (f"{PROTOCOL}/test_attention_layout_kernel.py",))

SHARDED = f"{PROTOCOL}/test_tp_ulysses.py"
EXACT = f"{SHARDED}::test_values_and_gradients_are_those_of_one_process"
FLIGHT = f"{PROTOCOL}/test_tp_ulysses_order.py::test_a_product_and_the_exchange_of_another_part_are_under_way_together"
SHARE = (f"{PROTOCOL}/test_ulysses_attention.py::test_ranks_that_share_the_sequence_otherwise_are_named",)
SHARE_NORM = In("overlap_train/operators/qk_norm.py", SHARE)
SHARE_ANGLES = In("overlap_train/operators/attention_layout.py", SHARE)
NAMED = f"{PROTOCOL}/test_tp_ulysses_order.py::test_ranks_that_share_the_sequence_otherwise_are_named"
TWO_GROUPS = In("overlap_train/ulysses/two_groups.py", (f"{EXACT}[regather-2-True]",))
TURNS = In("overlap_train/ulysses/rows_backward.py", (f"{EXACT}[regather-4-True]",))
BOTH = In("overlap_train/ulysses/two_group_calls.py", (f"{EXACT}[regather-4-True]",))
TOLD_OF_ONE = f"{PROTOCOL}/test_tp_ulysses_refusals.py"
HEARD = f"{TOLD_OF_ONE}::test_what_does_not_fit_on_one_rank_is_an_error_on_all"
TOLD = In("overlap_train/ulysses/groups.py", (HEARD,))
IN_PARTS = f"{PROTOCOL}/test_interleaving_parts.py"
AHEAD_ONLY = f"{UNIT}/test_copy_engine.py::test_a_join_does_not_wait_for_what_was_sent_ahead"
PLAN = In("overlap_train/planning/engine_plan.py", (IN_PARTS,))
BESIDE_PRODUCT = In("overlap_train/planning/plan.py", (IN_PARTS,))
AHEAD = In("overlap_train/protocol/slot_use.py", (f"{UNIT}/test_slot_use.py", IN_PARTS))
ROOM = In("overlap_train/protocol/workspace.py", (IN_PARTS,))
STARTS = In("overlap_train/protocol/slot.py", (IN_PARTS,))
STREAM = In("overlap_train/protocol/copy_stream.py", (IN_PARTS,))
BRACKET = In("overlap_train/runtime/bracket.py", (IN_PARTS,))

FAULTS = [
    OUT("A2A: columns are read before they have come", "        self._call.wait_for_all()\n", "", *CHUNKED),
    OUT("A2A: the own columns are stored as rank 0's", "self._into)[self._domain.rank]", "self._into)[0]"),
    OUT("A2A: the own columns stay in their slot", "(self._call.blocks if self._into is None else self._into)[",
        "self._call.blocks["),
    OUT("A2A: the peers' columns stay in their slot", "            self._into[source].copy_(self._call.blocks[source])\n",
        "            pass\n"),
    OUT("A2A: NCCL's blocks have every W-th column", "unflatten(1, (ranks, -1)).movedim(1, 0)",
        "unflatten(1, (-1, ranks)).movedim(2, 0)", f"{PROCESSES}::test_every_shape[collective-2]"),
    OUT("A2A: NCCL's columns stay where they came", "return self._into.copy_(self._blocks)", "return self._into",
        f"{OWN}::test_long_sequences_pass_through_in_parts"),
    OUT("A2A: NCCL's columns are read before they have come", "            self._work.wait()\n", "            pass\n", ASIDE),
    IN("A2A: a kernel sends from blocks that lie apart", "sent.contiguous() if reads_all else sent", "sent",
       f"{OWN}::test_long_sequences_pass_through_kernels_in_parts"),
    IN("A2A: blocks are sent as if one followed the other", ", pitch=self._sent.stride(0))", ")",
       f"{OWN}::test_long_sequences_pass_through_in_parts"),
    IN("A2A: blocks are added in the order of ranks", "in self._plan.sources:", "in sorted(self._plan.sources):",
       f"{OWN}::test_blocks_are_added_in_the_order_in_which_they_arrive"),
    IN("A2A: each block's sum is rounded", "total.addmm_(a.float(), b.float())",
       "total.copy_((total + a.float() @ b.float()).to(a.dtype))", f"{OWN}::test_a_sum_over_blocks_is_rounded_once"),
    IN("A2A: autocast rounds the sum", "torch.mm(a.float(), b.float(), out=total)", "a.float() @ b.float()",
       f"{MODES}[autocast]"),
    IN("A2A: a block is multiplied before it has come", "self._call.wait(source)", "pass", *CHUNKED),
    IN("A2A: the own block is missing for the weight gradient", "self._call.keep(own)", "pass"),
    IN("A2A: the own block is missing without a product", "self._call.receive(own)", "self._call.wait_for_all()"),
    IN("A2A: blocks are read before all have come", "self._call.receive(own)", "self._call.keep(own)", WITHOUT_PRODUCT),
    IN("A2A: direct sends nothing without a product", "if not self._is_over:", "if False:", WITHOUT_PRODUCT),
    IN("A2A: NCCL's blocks are read before they have come", "            self._work.wait()\n", "            pass\n", ASIDE),
    IN("A2A: kept x stays in its slot", "self.received_view().flatten(0, 1).clone()", "self.received_view().flatten(0, 1)",
       FOOTPRINT),
    COPIES("A2A: gradients of copies are added in 16 bits", "n, dtype=torch.float32)", "n)"),
    COPIES("A2A: a copy's gradient replaces the others", "total[:, columns] += block", "total[:, columns] = block"),
    CALLS("A2A: every rank adds the first columns' bias", ".chunk(domain.world_size)[domain.rank]",
            ".chunk(domain.world_size)[0]"),
    ARGUMENTS("A2A: heads are not checked", "not_heads(heads, name) or heads.error(world_size, name)", "not_heads(heads, name)"),
    ARGUMENTS("A2A: anything may be heads", "not_heads(heads, name) or heads.error(", "heads.error("),
    ARGUMENTS("A2A: no feature at all may be rotated", "not 0 < rotated <= heads.dim", "rotated > heads.dim"),
    LINEARS("A2A: the input of a frozen weight is kept", "x_shard_m if ctx.needs_input_grad[1] else None, linear.w)",
            "x_shard_m, linear.w)", f"{MODES}[frozen_weights]"),
    LINEARS("A2A: x is kept although nothing is trained", "linear.keeps and trains and", "linear.keeps and",
            f"{MODES}[nothing_is_kept_without_gradients]"),
    EXCHANGE("A2A: the slot of x that is sent again is not counted", "wants_dw=True", "wants_dw=False",
             f"{OWN}::test_backward_passes_after_each_other"),
    EXCHANGE("A2A: the gradient by what was kept is forgotten", "            meanwhile()\n", "            pass\n",
             f"{OWN}::test_long_sequences_pass_through_in_parts"),
    EXCHANGE("A2A: the last part is pulled", "place is not None and part is not self.parts[-1] and", "place is not None and",
             f"{PULLS}::test_which_parts_are_pulled"),
    EXCHANGE("A2A: parts are pulled that become something else", "place is not None and part is not", "part is not",
             f"{PULLS}::test_which_parts_are_pulled"),
    PULLED("A2A: the peers do not hear that blocks can be pulled", "        self._call.barrier()\n", ""),
    PULLED("A2A: the epoch of a pulled call grows twice", "        self._call.barrier()\n",
           "        self._call.next_epoch()\n        self._call.barrier()\n", f"{PULLED_MISMATCH}[chunked-is in another layer]"),
    PULLED("A2A: tiles of the call before are taken for claimed", "        self._call.reset_counters()\n", ""),
    THREAD("A2A: what is pulled into an inference tensor raises", "@torch.inference_mode()  # of this thread",
           "@torch.no_grad()  # of this thread", f"{MODES}[inference_in_parts]"),
    PULLED("A2A: blocks are left for other ranks", "self._multiply(self._call.blocks,",
           "self._multiply(self._call.blocks.flip(0),"),
    PULLED("A2A: what is pulled goes to another rank's place", "[self._into[peer] for", "[self._into[peer - 1] for"),
    ENGINE_PLAN("A2A: `direct` pulls, too", "self.kind == GEMM_A2A and TRAITS[self.method].pushes and",
                "self.kind == GEMM_A2A and",
                f"{PULLS}::test_which_parts_are_pulled"),
    ENGINE_PLAN("A2A: parts are pulled across nodes", " and TRAITS[self.method].pushes and self.nodes == 1",
                " and TRAITS[self.method].pushes",
                f"{PULLS}::test_which_parts_are_pulled"),
    STEPS("A2A: the next product waits until all is pulled", "isinstance(reader, ProductStep) and reader.is_pulled", "False",
          f"{PULLS}::test_the_next_product_begins_before_one_is_pulled"),
    STEPS("A2A: a product begins before blocks are taken out of the slot", "isinstance(reader, ProductStep) and reader.is_pulled",
          "True", f"{PULLS}::test_which_parts_are_pulled"),
    PROJECTIONS("A2A: heads are split as if one rank had all", "heads.of_rank(shards.ranks), s", "heads, s"),
    ARGUMENTS("A2A: rotation is not checked", "rotary is not None and (rotary.cos.shape !=",
              "False and (rotary.cos.shape !="),
    ARGUMENTS("A2A: angles may lie elsewhere", "rotary is not None and (rotary.cos.device !=",
              "False and (rotary.cos.device !="),
    LAYOUT("A2A: cos and sin are rounded", "[rows].float().view(", "[rows].to(x.dtype).float().view("),
    LAYOUT("A2A: rows are turned by the angles of the first ones", "t.view(-1, r)[rows].float()",
           "t.view(-1, r)[: len(x)].float()"),
    LAYOUT("A2A: gradients are sent in the order of the sequence", "dq, dk, dv = (grad[rows] for",
           "dq, dk, dv = (grad[: len(rows)] for"),
    LAYOUT("A2A: gradients are turned forward", "turned * cos - _half", "turned * cos + _half"),
    LAYOUT("A2A: interleaved pairs are mirrored", "(-x[..., 1::2], x[..., ::2])", "(x[..., 1::2], -x[..., ::2])"),
    HEADS("A2A: copies of KV heads go to ranks in turn", ".repeat_interleave(ranks_of_group, dim=0)",
          ".repeat(ranks_of_group, 1)"),
    HEADS("A2A: a rank may have no KV head", "max(1, self.kv // world_size)", "self.kv // world_size"),
    HEADS("A2A: any numbers of KV heads and ranks go together", "if self.kv % world_size and world_size % self.kv:", "if False:"),
    HEADS("A2A: the rows of copies are made in every call", "@kept\n", ""),
    INDICES("A2A: indices of inference are kept for training", "torch.inference_mode(False)(make)", "make"),
    INDICES("A2A: a graph reads indices that may be forgotten", "torch.cuda.is_current_stream_capturing()", "False"),
    SEQUENCE("A2A: late chunks lie as early ones", "chunks[world_size:].flip(0)", "chunks[world_size:]"),
    SEQUENCE("A2A: the late chunk of a document is that of the next rank", "(2 * world_size - 1 - ranks) * length",
             "(2 * world_size - ranks - (ranks > 0)) * length"),
    SEQUENCE("A2A: chunks of all documents begin as the first one's do", "lengths.cumsum(0) - lengths", "lengths.cumsum(0) * 0"),
    SEQUENCE("A2A: half as many chunks fit", "length % (2 * world_size)", "length % world_size"),
    LEGS("A2A: all chunks of a peer are sent before the next one's", "== NVLINK, piece[1]))", "== NVLINK, 0))"),
    LEGS("A2A: every peer gets the first block", "0 if kind == GATHER else target, chunk",
         "0 if kind in INBOUND else target, chunk"),
    SPEC("A2A: slots are as large as y of all ranks", "whole // world_size if self.fprop == GEMM_A2A else whole", "whole"),
    SPEC("A2A: a rank's rows are taken for all", "self.fprop in (GATHER, GEMM_A2A)", "self.fprop == GATHER"),
    PASSES("A2A: a pass multiplies the rows of all ranks", "self.m // self.world if self.kind in EXCHANGES else self.m",
           "self.m"),
    PASSES("A2A: a block has the features of all ranks", "features // self.world if self.kind in EXCHANGES else features",
           "features"),
    WEIGHT_GRADIENT("A2A: blocks of x are added to rows of main_grad", "target.chunk(len(x), 1), x",
                    "target.chunk(len(x), 0), x"),
    WEIGHT_GRADIENT("A2A: main_grad gets the last block only", "    for part, dy_part, x_part in _parts(target, dy, x):\n",
                    "    for part, dy_part, x_part in list(_parts(target, dy, x))[-1:]:\n"),
    KERNEL("A2A: a block that was given up is multiplied", "acc = tl.where(arrived, acc, float(\"nan\"))", "pass", GIVEN_UP),
    KERNEL("A2A: an earlier wait that gave up is forgotten", "tl.load(abort_ptr, volatile=True) == 0", "True", GIVEN_UP),
    KERNEL("A2A: every block is multiplied by the first rows", "b_ptr + source.to(tl.int64) * k * stride_bk", "b_ptr"),
    KERNEL("A2A: every chunk multiplies the first rows", "m_shard + first_row) * k", "m_shard) * k"),
    KERNEL("A2A: every chunk is stored over the first", "(first_row + rows) * n", "rows * n"),
    KERNEL("A2A: tiles are numbered on over chunks", "tile_in_block(index % per_chunk", "tile_in_block(index"),
    SCATTER("A2A: every rank gets the first columns", "b_col = target.to(tl.int64) * n if EXCHANGE else 0", "b_col = 0"),
    STORES("A2A: the own rows go to everybody", "first += tl.cast(target, tl.int64)", "first += tl.cast(rank, tl.int64)"),
    TILES("A2A: pieces go to the farthest rank first", "(rank + 1 + unit % PEERS)", "(rank + WORLD - 1 - unit % PEERS)"),
    TILES("A2A: all pieces of a peer before the next one's", "unit % PEERS) % WORLD, unit // PEERS, index % per_chunk",
          "index % PEERS) % WORLD, unit // PEERS, index % per_chunk"),
    # long sequences in parts, and what ranks must agree on
    PARTS("an exchange may have more memory than its group", "row_bytes, config.exchange_limit_mib",
          "row_bytes, config.exchange_mib"),
    PARTS("one row of a position counts", "cut(positions, batch * row_bytes,", "cut(positions, row_bytes,"),
    PARTS("a part takes more memory than all slots may", "(SLOTS * bytes_of_position)", "bytes_of_position"),
    PARTS("parts of a batch are counted in positions", "rows // gcd(rows, batch)", "rows"),
    CALLS("parts of other lengths may pair up", "return self.also(f\"a part of {positions} positions a rank\")", "return self",
          f"{OWN}::test_ranks_with_other_numbers_of_rows_are_named"),
    CALLS("a batch is not counted", "return 1 if x.dim() == 2 else max(1, x.shape[1:-1].numel())", "return 1",
            f"{OWN}::test_a_batch_takes_no_more_memory_than_the_setting"),
    PARTS("parts end within tiles", "(1024, 512, 256, 128)", "(1024,)"),
    PARTS("parts have odd numbers of tiles", "(1024, 512, 256, 128)", "(128,)"),
    PARTS("the last part goes on beyond the sequence", "min(first + step, positions)", "first + step"),
    STEPS("parts: none leaves before the one before it is multiplied", "following.may_go_before(step)",
          "False", f"{IN_PARTS}::test_the_next_part_leaves_before_one_is_multiplied"),
    PLAN("parts: one leaves before a kernel that sends has sent", "self.kind == A2A_GEMM and TRAITS[self.method].pushes",
         "self.kind == A2A_GEMM",
         f"{IN_PARTS}::test_the_next_part_leaves_before_one_is_multiplied"),
    AHEAD("parts: a slot is reused before its reader is done", "self._sent_after = self._operator - 1",
          "self._sent_after = self._operator"),
    AHEAD("parts: what began ahead begins again", "not self.is_ahead and ", ""),
    AHEAD("parts: what an operator that raised had begun goes on", "] * SLOTS, []\n        self.is_ahead = False\n",
          "] * SLOTS, []\n", f"{UNIT}/test_slot_use.py"),
    ROOM("parts: one is sent before it is known that a slot is free", "            self._last.wait_for_start()\n", ""),
    ROOM("parts: what came tells nothing", "            self.use.receive()\n", ""),
    STARTS("parts: the first chunk of one peer only is waited for", "wait_chunk(self, 0, 0, self.world_size)",
           "wait_chunk(self, 0, 0, 2)"),
    STREAM("parts: what is sent is reused before it has left", "        self._ahead = len(self._held)\n",
           "        self._ahead = 0\n"),
    STREAM("parts: the next one's sends are waited for, too", "        if count is None:\n", "        if True:\n", AHEAD_ONLY),
    BRACKET("parts: what an operator that raised had sent ahead goes on", "if domain.workspace.use.is_ahead:", "if False:",
            f"{UNIT}/test_operator_bracket.py"),
    # TP x Ulysses
    TWO_GROUPS("TP x A2A: what is kept is a view of the slot", "return torch.cat(blocks.unbind(), dim=1)",
               "return blocks.transpose(0, 1).flatten(1)", f"{SHARDED}::test_a_ulysses_group_of_one_rank"),
    STEPS("two groups: what a product makes is sent before the product", "            if following is not None and",
          "            if False and", f"{FLIGHT}[column_forward]", f"{FLIGHT}[row_forward]"),
    TWO_GROUPS("two groups: columns are sent as they lie", "torch.index_select(product, 1, columns, out=block)",
               "block.copy_(product[:, : len(columns)])"),
    TWO_GROUPS("two groups: copies of a column are not added", "return summed_copies(blocks, self.copies, self.weight.shape[0])",
               "return blocks.transpose(0, 1).flatten(1)[:, : self.weight.shape[0]]"),
    TWO_GROUPS("two groups: a part multiplies the rows of the first", "x[part.first * batch : part.last * batch]",
               "x[: (part.last - part.first) * batch]"),
    TWO_GROUPS("two groups: gathered rows are taken for a shard's", "(self.shards if self.keeps_gathered else 1)", "1",
               f"{EXACT}[keep-4-True]"),
    TWO_GROUPS("two groups: what was received is not kept", "                kept.append(received)\n",
               "                kept.append(torch.zeros_like(received))\n", f"{EXACT}[keep-4-True]"),
    TURNS("two groups: x is read where dx is", "received()[:, back:]", "received()[:, : received().shape[1] - back]"),
    TURNS("two groups: dx is read where x is", "received()[:, :back]", "received()[:, -back:]"),
    TURNS("two groups: dx is that of the next part", "self._dx.take(before,", "self._dx.take(part or before,"),
    TURNS("two groups: an all-to-all ends before the product begins", "            received = cache(receiver.received_view)\n",
          "            received = cache(receiver.received_view)\n            received()\n",
          f"{FLIGHT}[row_backward]"),
    BOTH("two groups: every rank adds the first columns' bias", "[groups.ulysses.rank()]", "[0]"),
    BOTH("two groups: peers do not hear of a product that does not fit",
         "            plan_of(ALL_TO_ALL, sent, w, None, groups.ulysses, config, name, problem=of_tensor(refused))\n", "", HEARD),
    TOLD("two groups: the TP ranks alone hear what does not fit",
         "book_of(ulysses, name).refuse(wrong, ALL_TO_ALL, name)", "raise ValueError(wrong)"),
    BOTH("two groups: a TP rank is taken for one of the other group", "problem=of_tensor(refused)", "problem=str(refused)",
         HEARD),
    TOLD("two groups: peers are asked in calls that they know", "if tensor_knows and ulysses_knows:", "if False:",
         f"{TOLD_OF_ONE}::test_in_a_known_call_the_rank_raises_at_once"),
    TOLD("two groups: one projection's calls are taken for the other's", "if tensor_knows and ulysses_knows:",
         "if tensor_knows or ulysses_knows:"),
    TOLD("two groups: TP ranks are asked in a product that they know", "if not tensor_knows:", "if True:",
         f"{TOLD_OF_ONE}::test_a_tp_group_that_knows_its_product_is_not_asked"),
    BOTH("two groups: slots have room for one of two", "carries=2 if", "carries=1 if"),
    BOTH("two groups: parts are cut by the product's settings", "domain_of(groups.ulysses, None", "domain_of(groups.tensor, None",
         f"{PROTOCOL}/test_tp_ulysses.py::test_without_a_config_the_exchange_goes_by_its_own_groups"),
    SHARE_NORM("ranks with another eps pair up", ' with eps {eps:g}"', '"'),
    SHARE_ANGLES("ranks that rotate other features pair up", "{count} features rotated", "rotated"),
    BOTH("two groups: parts of other lengths may pair up", "if len(places) == 1 else terms.in_parts(sizes.positions)", "",
         f"{PROTOCOL}/test_tp_ulysses_order.py::test_ranks_with_other_numbers_of_rows_are_named"),
    BOTH("two groups: the product's ranks do not compare layouts", "multiplies.linear(name, meaning)", "multiplies.linear(name)",
         NAMED),
    BOTH("two groups: the exchange's ranks do not compare layouts", "exchanges.linear(name, meaning)", "exchanges.linear(name)",
         NAMED),
    PARTS("products are cut into parts that hide nothing", "rows // _LEAST_ROWS", "4"),
    PARTS("short products are cut", ", int(gemm_us // _LEAST_GEMM_US)", ""),
    BESIDE_PRODUCT("two groups: kernels exchange beside a product", 'Choice("chunked", "beside a product"',
         'Choice("direct" if config.method == "direct" else "chunked", "beside a product"', f"{UNIT}/test_exchange_plan.py"),
    In("overlap_train/config.py", (f"{ATTENTION}::test_an_exchange_takes_no_more_memory_than_the_group_may_have",))(
        "an exchange takes more than the group may have", "return min(self.exchange_mib,", "return max(self.exchange_mib,",
    ),
    # shards of different lengths
    SEQUENCE("lengths: padding is the last row", "max(lengths)), -1, device", "max(lengths)), sum(lengths) - 1, device"),
    SEQUENCE("lengths: ranks do not compare them", ", rows {' + '.join(map(str, self.lengths))}", "",
             f"{LENGTHS}::test_ranks_that_say_other_lengths_are_named"),
    SEQUENCE("lengths: any number of them", "len(self.lengths) != world_size", "False"),
    SEQUENCE("lengths: a negative one", "min(self.lengths) < 0 or not", "not"),
    SEQUENCE("lengths: blocks with padding are the sequence", ' and len(set(self.lengths)) < 2', ""),
    ARGUMENTS("lengths: a rank may have other rows than it says", "if x.shape[0] == expected:", "if True:", REFUSED_LENGTHS),
    ARGUMENTS("lengths: tensor-parallel ranks have unequal parts", "if any(length % shards", "if False and any(length % shards",
              REFUSED_LENGTHS),
    ARGUMENTS("lengths: angles of as many rows as equal shards have", "rows = sum(layout.lengths) or rows", "pass",
              BETWEEN_RANKS),
    SHARDS("lengths: a plan for the rows that are there", "like(x, sent, x.shape[-1]) if self.layout.lengths else x", "x"),
    SHARDS("lengths: y keeps its padding", "else y_shard_m[:length]", "else y_shard_m"),
    SHARDS("lengths: tensor-parallel ranks have the rows of all", "partial(UnequalRows, lengths=self.layout.divided(self.tensor)",
           "partial(UnequalRows, lengths=self.layout.divided(1)", BESIDE_TENSOR),
    ROWS("lengths: padding is sent as memory was", "            block[len(rows) :] = 0\n", ""),
    ROWS("lengths: every part takes the first rows", "            rows = shard[part.first : part.last]\n            rows.copy_(",
         "            rows = shard[: part.last - part.first]\n            rows.copy_(", f"{LENGTHS}::{IN_PADDED_PARTS}"),
    ROWS("lengths: every part gives the first rows", "            rows = shard[part.first : part.last]\n            block[",
         "            rows = shard[: part.last - part.first]\n            block[", f"{LENGTHS}::{IN_PADDED_PARTS}"),
    LAYOUT("lengths: padding is taken for a row", "        packed, rows = packed[rows >= 0], rows[rows >= 0]\n",
           "        pass\n"),
    LAYOUT("lengths: a row is sent in the place of padding", "    if rows.min() < 0:\n        packed = grads",
           "    if False:\n        packed = grads"),
    HEAD_ROWS("lengths: the kernel stores padding's first features", "        inside &= row >= 0\n", ""),
    HEAD_ROWS("lengths: the kernel stores padding's last features", "x, inside & (row >= 0), PER_GROUP", "x, inside, PER_GROUP"),
    HEAD_ROWS("lengths: the kernel sends a row in the place of padding", "there = inside & (row >= 0)", "there = inside"),
    PROJECTIONS("ranks may share the sequence otherwise", "bias, heads, shards.group, terms)",
                "bias, heads, shards.group, Terms(config, name))",
                f"{ATTENTION}::test_ranks_that_share_the_sequence_otherwise_are_named[layout]"),
    PROJECTIONS("ranks may take the output's rows otherwise", "bias, shards.group, terms)",
                "bias, shards.group, Terms(config, name))",
                f"{ATTENTION}::test_ranks_that_share_the_sequence_otherwise_are_named[output layout]"),
    # what shows in the PTX
    HOPPER("A2A: TMA reads a peer's block without a fence", "            fence_for_tma()\n", ""),
    HOPPER("A2A: a peer's block is loaded without a wait",
           "wait_both(signals_ptr, upper_word, word, expected, abort_ptr, record_ptr, limit, True)", "pass"),
    HOPPER("A2A: the kernel sends rows, and does not count its epoch", "    if DIRECT:\n        finalize_epoch",
           "    if False:\n        finalize_epoch",
           f"{PTX}::test_a_kernel_that_sends_itself_counts_the_epoch_when_its_last_cta_leaves"),
    HOPPER_SCATTER("A2A: who multiplies what leaves waits for the peers", "if REDUCE and source != rank:",
                   "if EXCHANGE and source != rank:"),
    # what only a GPU shows
    GPU_IN("GPU: A2A reads a peer's block from the own ones", "panels, step, received_desc, received_desc, b_desc",
           "panels, step, own_desc, own_desc, b_desc"),
    GPU_IN("GPU: A2A multiplies every block by the first rows", "source * k,", "0,"),
    GPU_IN("GPU: A2A reads the first block for all", "above = source * m_shard", "above = 0"),
    GPU_IN("GPU: A2A multiplies the blocks of a rank too few", "whole = (m_shard, n, WORLD * gl.cdiv(k, BLOCK_K) * BLOCK_K)",
           "whole = (m_shard, n, (WORLD - 1) * gl.cdiv(k, BLOCK_K) * BLOCK_K)"),
    GPU_IN("GPU: A2A multiplies as many panels as lie side by side", "WORLD * gl.cdiv(k, BLOCK_K) * BLOCK_K", "WORLD * k",
           "tests/gpu/test_operators.py::test_rows_that_end_within_a_tile[fused-to_rows-997]"),  # 264 features end within a panel
    GPU_DIRECT_IN("GPU: A2A sends the own rows to everybody", "STEP, True)", "STEP, False)"),
    GPU_DIRECT_IN("GPU: A2A expects the epoch before", "tag) if DIRECT else gl.load", "tag) if False else gl.load"),
    GPU_OUT("GPU: A2A sends the first columns to everybody", "b_col = target * n + tile_n * BLOCK_N if EXCHANGE",
            "b_col = tile_n * BLOCK_N if EXCHANGE"),
]  # fmt: skip
