"""Faults of the operators: engines, autograd functions, plans that are looked up, launches and the proof of their PTX."""

from __future__ import annotations

from tests.mutations.mutation import In

UNIT, PROTOCOL = "tests/unit", "tests/protocol"
OPERATORS = "overlap_train/operators"
LINEAR_RUNS = f"{PROTOCOL}/test_interleaving_linear.py"
SHAPES, MODES = f"{PROTOCOL}/test_processes.py::test_every_shape", f"{PROTOCOL}/test_modes.py::test_modes"
FOOTPRINT = f"{PROTOCOL}/test_footprint.py::test_what_is_kept_for_backward_how_peers_find_memory_and_when_it_is_freed"

START = In(
    f"{OPERATORS}/start.py", (f"{PROTOCOL}/test_processes.py::test_layouts_freezing_microbatches_and_recomputation",)
)
GATHER = In(f"{OPERATORS}/all_gather_gemm.py", (f"{LINEAR_RUNS}::test_chunked_passes",))
KEPT = In(GATHER.file, (f"{LINEAR_RUNS}::test_fused_passes",))
GIVEN_UP = In(
    GATHER.file,
    (
        f"{PROTOCOL}/test_interleaving_shared_slot.py"
        "::test_what_has_not_come_is_nan_in_gathered_rows_whose_own_were_kept_beside_a_product",
    ),
)
BESIDE = f"{LINEAR_RUNS}::test_own_rows_are_copied_beside_a_kernel_that_outlasts_the_pushes"
OUTLASTS = In("overlap_train/planning/engine_plan.py", (BESIDE,))
COLUMN_ROW = In(f"{OPERATORS}/column_row.py", (BESIDE,))
TUNED = In(
    "overlap_train/tools/tune/candidates.py",
    (f"{PROTOCOL}/test_tuning_processes.py::test_the_tuner_runs_a_columns_backward_as_autograd_does",),
)
SCATTER = In(
    f"{OPERATORS}/gemm_reduce_scatter.py",
    (f"{PROTOCOL}/test_interleaving_gemm_reduce_scatter.py::test_chunked_passes",),
)
DEFERRED = In(SCATTER.file, (f"{PROTOCOL}/test_interleaving_gemm_reduce_scatter.py::test_a_deferred_reduction_passes",))
TOLD = In(f"{OPERATORS}/kernel_args.py", (f"{UNIT}/test_launch_limits.py",))
PERSISTENT = In(f"{OPERATORS}/persistent.py", (f"{UNIT}/test_operands.py",))
LENGTHS = In(f"{OPERATORS}/plan_book.py", ("tests/protocol/test_new_lengths.py",))
BOOK = In(f"{OPERATORS}/plan_book.py", (f"{UNIT}/test_plan_book.py",))
HERE, FILE, PLANNED = (In(f"{OPERATORS}/{file}.py", BOOK.tests) for file in ("runs_here", "tuning_file", "planned"))
COLLECTIVES = In(f"{OPERATORS}/collectives.py", (f"{PROTOCOL}/test_processes.py::test_every_shape[collective-2]",))
APPLIED = In(f"{OPERATORS}/autograd.py", (f"{UNIT}/test_autograd.py",))
KEEPS = In(f"{OPERATORS}/planned.py", (FOOTPRINT,))
LINEAR = In("overlap_train/linear.py", (FOOTPRINT,))
ONCE = In(f"{OPERATORS}/autograd.py", (MODES,))
LAUNCH = In(
    "overlap_train/gpu/launch.py",
    (f"{UNIT}/test_packed_launch.py::test_addresses_and_the_stream_are_those_of_the_launch",),
)
PARAMETERS = In("overlap_train/gpu/parameters.py", LAUNCH.tests)
PTX = In(
    "overlap_train/gpu/ptx_check.py", (f"{UNIT}/test_ptx_check.py::test_a_kernel_that_lacks_its_wait_is_not_launched",)
)
KEYS = f"{UNIT}/test_compile_probe.py::test_a_kernel_has_one_key_whatever_was_compiled_before_it"
COMPILING = In("overlap_train/gpu/compiling.py", (KEYS,))
ASKED = f"{UNIT}/test_specialisation.py::test_triton_is_asked_once_for_launches_of_a_kind"
KINDS = In(
    "overlap_train/gpu/specialisation.py", (f"{UNIT}/test_specialisation.py::test_equal_kinds_are_equal_binaries",)
)

FAULTS = [
    GATHER("gathered x is complete before it has come", "self._call.receive(self._own)", "self._call.keep(self._own)"),
    GATHER("the own rows are missing in gathered x", "self._call.receive(self._own)", "self._call.wait_for_all()"),
    KEPT("own rows: read before they are copied beside a product", "            self._domain.engine.wait_kept()\n", ""),
    GIVEN_UP(
        "own rows: a wait that failed does not show beside them",
        "            self._call.wait_for_all()\n            self._domain.engine.wait_kept()\n",
        "            self._domain.engine.wait_kept()\n",
    ),
    KEPT(
        "own rows: not copied beside a product",
        "            self._domain.engine.keep(self._own, self._call.blocks[self._domain.rank])\n",
        "            pass\n",
    ),
    OUTLASTS(
        "own rows: copied behind pushes that outlast the kernel",
        " and not self.reduces_later)\n        return",
        ")\n        return",
    ),
    TUNED("own rows: the tuner measures a copy that training hides", "            gather.keep_own(plan)\n", ""),
    COLUMN_ROW(
        "own rows: a column linear copies them behind its product",
        "                gather.keep_own(dgrad)\n",
        "                pass\n",
    ),
    COLUMN_ROW(
        "own rows: a row linear copies them behind its product",
        "                gather.keep_own(plan.dgrad)\n",
        "                pass\n",
    ),
    GATHER("the own rows are missing after a product", "self._call.keep(self._own)", "pass"),
    GATHER("kept x stays in its slot", "return self.gathered_view().clone()", "return self.gathered_view()", FOOTPRINT),
    GATHER(
        "a second product is launched again",
        "        self._is_over = True\n        y = ",
        "        y = ",
        f"{PROTOCOL}/test_interleaving_all_gather_gemm.py::test_what_is_gathered_can_be_multiplied_twice",
    ),
    GATHER(
        "direct sends nothing without a product",
        "        if not self._is_over:  # no",
        "        if False:  # no",
        f"{PROTOCOL}/test_interleaving_all_gather_gemm.py::test_what_is_gathered_by_direct_without_a_product_is_sent_all_the_same",
    ),
    START(
        "a shard that is not contiguous is sent",
        "engine(domain, plan, tag, x_shard_m.contiguous())",
        "engine(domain, plan, tag, x_shard_m)",
    ),
    GATHER(
        "a gather by NCCL is read before it has come",
        "            self._work.wait()\n        return self._x",
        "            pass\n        return self._x",
        f"{PROTOCOL}/test_processes.py::test_collectives_beside_the_callers_work",
    ),
    GATHER("blocks are sent in the last call's epoch", "        self._call.next_epoch()\n", ""),
    SCATTER(
        "the own rows are those of rank 0",
        "torch.mm(rows[domain.rank], self._b, out=self._partials[domain.rank])",
        "torch.mm(rows[0], self._b, out=self._partials[domain.rank])",
    ),
    SCATTER(
        "partials are added to what was there before",
        "torch.mm(rows[target], self._b, out=self._partials[target])",
        "self._partials[target].addmm_(rows[target], self._b)",
    ),
    SCATTER("the own block is added to itself", "        if source != call.rank:\n", "        if True:\n"),
    SCATTER("partials are added before they have come", "    call.wait_for_all()\n", ""),
    DEFERRED(
        "a split reduction is left out",
        "        if self._plan.reduces_later:\n            return",
        "        if False:\n            return",
    ),
    PERSISTENT(
        "a push waits for the tiles of a whole block",
        "rows // plan.chunks, cols)",
        "rows, cols)",
        f"{PROTOCOL}/test_interleaving_gemm_reduce_scatter.py::test_fused_passes_where_a_chunk_has_fewer_tiles_than_its_block",
    ),
    SCATTER(
        "a scatter by NCCL is read before it has come",
        "            self._work.wait()\n        return self._y",
        "            pass\n        return self._y",
        f"{PROTOCOL}/test_processes.py::test_collectives_beside_the_callers_work",
    ),
    COLLECTIVES("a collective that is not aside is not waited for", "if not aside and work is not None:", "if False:"),
    COLLECTIVES(
        "a collective that is aside is waited for by nobody",
        "return work if aside else None",
        "return None",
        f"{PROTOCOL}/test_processes.py::test_collectives_beside_the_callers_work",
    ),
    APPLIED("torch.func's transforms are not noticed", "if torch._C._are_functorch_transforms_active()", "if False"),
    TOLD(
        "kernels that send count in the others' words",
        "counters = call.slot.direct_counters if direct else call.slot.counters",
        "counters = call.slot.counters",
    ),
    TOLD(
        "kernels on GPUs count polls",
        "(1e9 if on_gpu else _INTERPRETER_POLLS_PER_SECOND)",
        "_INTERPRETER_POLLS_PER_SECOND",
    ),
    TOLD("kernels on GPUs count microseconds", "(1e9 if on_gpu else", "(1e6 if on_gpu else"),
    TOLD(
        "pieces are claimed from the others' words",
        "sent_ptr=slot.direct_counters.sent",
        "sent_ptr=slot.counters.sent",
    ),
    TOLD(
        "more CTAs than tiles",
        "min(programs, multiprocessors(device) - spared_sms)",
        "multiprocessors(device) - spared_sms",
    ),
    PERSISTENT(
        "TMA is given a matrix between two words",
        "and nbytes % 16 == 0 and a_mk.data_ptr() % 16 == 0",
        "and nbytes % 16 == 0",
    ),
    PERSISTENT("TMA is given rows between two words", "and nbytes % 16 == 0 and", "and"),
    PERSISTENT("TMA is given an expanded gradient", "and nbytes > 0 and", "and"),
    PERSISTENT("TMA is given columns", "step == 1 and nbytes", "nbytes"),
    PERSISTENT("portable kernels get a copy", "    if plan.kernels != HOPPER:\n        return a_mk\n", ""),
    PERSISTENT("an address on 8 bytes counts as aligned", "address % 16 == 0 for", "address % 8 == 0 for"),
    PERSISTENT(
        "a product that sends shares the launch of one that does not",
        "(plan.kernels, operands.sends, operands.leaves)",
        "(plan.kernels, operands.leaves)",
    ),
    PERSISTENT(
        "a split reduction shares the launch of a whole one",
        "staging is None, plan.reduces_later)",
        "staging is None)",
    ),
    PERSISTENT(
        "a weight of another layout shares a launch", "b_kn.shape, b_kn.stride(), _compiled", "b_kn.shape, _compiled"
    ),
    LENGTHS("every length is agreed on", "self.agreed.put(any_rows, True)", "pass"),
    LENGTHS(
        "more memory is not agreed on",
        "fits = there and domain.layout.covering",
        "fits = there or domain.layout.covering",
    ),
    LENGTHS("rows that cannot be divided pass", "            if problem is not None:\n", "            if False:\n"),
    BOOK(
        "calls with another config share a plan",
        "shape_of_bias, trains, config, tries)",
        "shape_of_bias, trains, tries)",
    ),
    BOOK(
        "weights of another layout share a plan",
        "planned.get((w.stride(), w.data_ptr() % 16))",
        "next(iter(planned.values()))",
    ),
    BOOK("what is trained does not count", "shape_of_bias, trains, config, tries)", "shape_of_bias, config, tries)"),
    HERE("the table of another folder is taken", "if config.tuning_dir == domain.config.tuning_dir:", "if True:"),
    PLANNED("every pass has the forward's tag", 'Tag(f"{name}/{part}", what)', 'Tag(f"{name}/fprop", what)'),
    PLANNED(
        "all linears of one shape have the tags of the first",
        "key = (name, meaning)",
        'key = ("", meaning)',
    ),
    PLANNED(
        "all backwards of a linear have the slots of the first",
        "wanted = (wants_dx, wants_dw)",
        "wanted = (True, True)",
    ),
    PLANNED("a backward without dw takes the slot of its gather", "plan.wgrad if wants_dw else None", "plan.wgrad"),
    PLANNED("a backward without dx takes the slot of its scatter", "wants_dx * plan.dgrad.slots", "plan.dgrad.slots"),
    FILE(
        "ranks read tables of their own",
        "return None if domain.rank else table.read(",
        "return table.read(",
        survives="what rank 0 has found is taken by all; the others only read for nothing",
    ),
    KEEPS(
        "x is kept although it is gathered again",
        "keeps = self.plan.wgrad is None and self.trains",
        "keeps = self.trains",
    ),
    BOOK("x is kept without gradients", "trains = torch.is_grad_enabled() and", "trains =", MODES),
    LINEAR(
        "x of a frozen weight is kept for backward",
        "saved if ctx.needs_input_grad[1] else None, w_shard_n)",
        "saved, w_shard_n)",
        MODES,
    ),
    LINEAR(
        "the weight of a hook on saved tensors is taken",
        "dw = WeightGradient(ctx.weight, ctx.linear.plan.config.main_grad) if wants_dw else None\n        dx_shard_m",
        "dw = WeightGradient(w_shard_n, ctx.linear.plan.config.main_grad) if wants_dw else None\n        dx_shard_m",
        MODES,
    ),
    LINEAR(
        "a backward may be differentiated",
        "    @once_differentiable\n    def backward(ctx: Any, dy_shard_m",
        "    def backward(ctx: Any, dy_shard_m",
        MODES,
    ),
    ONCE("no backward refuses to be differentiated", "(refused if torch.is_grad_enabled() else backward)", "backward"),
    LINEAR(
        "a column's bias is forgotten",
        "x_shard_m.shape[1:-1], -1)\n    return y if bias is None else y + bias",
        "x_shard_m.shape[1:-1], -1)\n    return y",
        f"{PROTOCOL}/test_processes.py::test_every_shape[chunked-2]",
    ),
    LAUNCH(
        "a sealed address stays that of the first launch", "self._check(self._replace(place, values[number]))", "pass"
    ),
    PARAMETERS("an address is stored where it is not read", "== expected", "is not None"),
    PARAMETERS(
        "an address is never stored",
        "== expected",
        "is None",
        f"{UNIT}/test_packed_launch.py::test_the_driver_replaces_an_address_only_where_a_store_does_not",
    ),
    LAUNCH("a launch stays in the stream of the first", "self._configuration.stream = self._current_stream()", "pass"),
    LAUNCH(
        "a launch that the driver refuses goes unnoticed",
        "        if failed:\n            self._check(failed)",
        "",
        f"{UNIT}/test_packed_launch.py::test_what_the_driver_refuses_raises_and_does_not_last",
    ),
    LAUNCH(
        "a value for what is no parameter is dropped",
        "for number, name in replaced if name not in sealed)",
        "for number, name in replaced if name in indices)",
        f"{UNIT}/test_packed_launch.py::test_a_value_for_what_is_no_parameter_is_refused",
    ),
    LAUNCH("pointers stay those of the first launch", "            words[index] = values[number]", "            pass"),
    LAUNCH(
        "a kernel is packed again and again",
        "            self._refused.add(key)\n",
        "",
        f"{UNIT}/test_packed_launch.py::test_a_kernel_that_cannot_be_packed_runs_through_triton_and_says_so_once",
    ),
    LAUNCH(
        "every length goes through Triton",
        "has_run = compiled.hash in launcher.entries",
        "has_run = False",
        f"{UNIT}/test_packed_launch.py::test_a_kernel_that_has_run_is_packed_for_other_sizes_without_triton",
    ),
    LAUNCH(
        "another length is packed and not launched",
        "            packed(values)\n        elif",
        "            pass\n        elif",
        f"{UNIT}/test_packed_launch.py::test_a_kernel_that_has_run_is_packed_for_other_sizes_without_triton",
    ),
    LAUNCH(
        "a length that cannot be packed is not launched",
        "        elif has_run:\n            launch.through_triton()\n",
        "",
        f"{UNIT}/test_packed_launch.py::test_sizes_that_cannot_be_packed_run_through_triton",
    ),
    PARAMETERS(
        "a descriptor that is there several times is copied once",
        "ctypes.memmove(place, first, MAP_BYTES)",
        "pass",
        f"{UNIT}/test_packed_launch.py::test_a_descriptor_that_is_there_twice_is_encoded_once",
    ),
    PARAMETERS(
        "parameters lie on 32 bytes",
        "_MAP_ALIGNMENT = 64",
        "_MAP_ALIGNMENT = 32",
        f"{UNIT}/test_packed_launch.py::test_parameters_lie_on_64_bytes_and_keep_their_values",
    ),
    PARAMETERS(
        "negative numbers do not fit",
        "number & (2**64 - 1)",
        "abs(number)",
        f"{UNIT}/test_packed_launch.py::test_parameters_lie_on_64_bytes_and_keep_their_values",
    ),
    PTX(
        "a kernel is launched before it is checked",
        "        if lacking is not None:\n            import triton",
        "        if False:\n            import triton",
    ),
    PTX(
        "a kernel is checked at each first launch",
        "        if binary.hash in self._verified:\n            return\n",
        "",
        f"{UNIT}/test_ptx_check.py::test_a_kernel_is_checked_once",
    ),
    PTX("a kernel is hashed before the functions it calls", "id(kernel), kinds", "kernel, kinds", KEYS),
    COMPILING(
        "keys of called functions come as they may", "            settle_key(called)\n", "            pass\n", KEYS
    ),
    PTX("Triton is asked at each launch", "if key not in self._known:", "if True:", ASKED),
    KINDS("an address on 4 bytes counts as one on 16", "value.data_ptr() % _ALIGNMENT == 0", "True"),
    KINDS("1 counts as any number", "value == 1, ", ""),
    KINDS("17 counts as 16", "value % _ALIGNMENT == 0, bits", "bits"),
    KINDS("long integers count as short ones", "bits > 31, ", ""),
    KINDS("dtypes do not count", "return value.dtype, value", "return value"),
    KINDS("constexprs do not count", ", tuple(constants.items())", ""),
    PTX(
        "proofs may lie in any order",
        "        place = found.end()",
        "        place = 0",
        f"{UNIT}/test_ptx_check.py::test_a_poll_that_was_moved_out_of_its_loop_is_noticed",
    ),
    PTX(
        "one rank needs the proofs of many",
        'alone = constants.get("WORLD") == 1',
        "alone = False",
        f"{UNIT}/test_ptx_check.py::test_one_rank_has_nobody_to_wait_for",
    ),
]
