"""Faults of signals, slots, waits, pushes, and of what ranks tell each other before their first call."""

from __future__ import annotations

from tests.mutations.mutation import In

UNIT, PROTOCOL = "tests/unit", "tests/protocol"
WAITS, SHARED = f"{PROTOCOL}/test_device_waits.py", f"{PROTOCOL}/test_interleaving_shared_slot.py"
IN_A_ROW, NAN = f"{SHARED}::test_barriers_in_a_row", f"{SHARED}::test_what_has_not_come_is_nan_in_the_result"
TURNS = f"{SHARED}::test_methods_take_turns_on_one_slot"
STREAMS = f"{PROTOCOL}/test_interleaving_streams.py"

SIGNAL = In("kernels/signal.py", (WAITS,))
OWN_BLOCK = In("kernels/own_block.py", (WAITS,))
GATHER = In("kernels/all_gather_gemm.py", (NAN,))
SCATTER = In("kernels/gemm_reduce_scatter.py", (NAN,))
SLOT = In("overlap_train/protocol/slot.py", (TURNS,))
USE = In("overlap_train/protocol/slot_use.py", (f"{UNIT}/test_slot_use.py",))
HOST_WAITS = In("overlap_train/protocol/waits.py", (f"{UNIT}/test_launch_limits.py",))
WATCHDOG = In("overlap_train/protocol/watchdog.py", (f"{UNIT}/test_watchdog.py",))
WORKSPACE = In("overlap_train/protocol/workspace.py", (f"{PROTOCOL}/test_interleaving_columns.py",))
ENGINES = (f"{UNIT}/test_copy_engine.py",)
ROUTE = In("overlap_train/protocol/copy_engine.py", ENGINES)
THREAD = In("overlap_train/protocol/copy_thread.py", ENGINES)
STREAM = In("overlap_train/protocol/copy_stream.py", ENGINES)
LAYOUT = In("overlap_train/protocol/layout.py", (f"{UNIT}/test_plan.py",))
TAGS = In("overlap_train/protocol/tags.py", (f"{UNIT}/test_watchdog.py",))
AGREEMENT = In("overlap_train/symmetric/agreement.py", (f"{UNIT}/test_agreement.py",))
PROVIDERS = In("overlap_train/symmetric/__init__.py", (f"{UNIT}/test_providers.py",))
ALLOCATION = In("overlap_train/symmetric/allocation.py", (f"{UNIT}/test_providers.py",))
NVSHMEM = In("overlap_train/symmetric/nvshmem.py", (f"{UNIT}/test_providers.py",))
TOGETHER = (f"{UNIT}/test_open_together.py",)
ON_ALL_RANKS = In("overlap_train/symmetric/allocation.py", TOGETHER)
OPEN_NVSHMEM = In("overlap_train/symmetric/nvshmem.py", TOGETHER)
OPEN_TORCH = In("overlap_train/symmetric/torch_symm.py", TOGETHER)

FAULTS = [
    # the own block beside a wait
    OWN_BLOCK("the own block's beginning is left out", "tl.cast(program - 1, tl.int64)", "tl.cast(program, tl.int64)"),
    OWN_BLOCK(
        "what lies behind the own block is overwritten", "mask=place < size), mask=place < size)", "mask=place < size))"
    ),
    OWN_BLOCK(
        "some of the own block is left out",
        "tl.cast(tl.num_programs(0) - 1, tl.int64)",
        "tl.cast(tl.num_programs(0), tl.int64)",
    ),
    OWN_BLOCK("nobody waits beside the copy", "rank, 0, count, 0, row_ptr", "rank, 0, 0, row_ptr"),
    HOST_WAITS("the own block goes to a peer's place", "kept_ptr=call.blocks[self.rank]", "kept_ptr=call.blocks[0]"),
    HOST_WAITS("a program too few copies the own block", "grid = (1 + min(", "grid = (min("),
    # own rows that go into a slot beside a product
    STREAM(
        "what is kept is copied in the caller's stream",
        "target.nbytes, self._handle)\n        self._driver.check(failed or",
        "target.nbytes, self._driver.current_stream())\n        self._driver.check(failed or",
    ),
    STREAM(
        "the caller waits for what was kept before",
        "record_event(self._kept, self._handle))",
        "record_event(self._joined, self._handle))",
    ),
    THREAD(
        "what is kept is not waited for",
        "wait_for(lambda: self._pending == 0)\n\n    def begin_ahead",
        "wait_for(lambda: True)\n\n    def begin_ahead",
    ),
    # waits on the device
    SIGNAL(
        "a wait polls for its own epoch and no later one",
        "EPOCH_SHIFT) << EPOCH_SHIFT) >= 0",
        "EPOCH_SHIFT) << EPOCH_SHIFT) < (1 << EPOCH_SHIFT)",
        IN_A_ROW,
    ),
    SIGNAL(
        "a signal of a later call counts as another call", " | ((seen >> EPOCH_SHIFT) != (expected >> EPOCH_SHIFT))", ""
    ),
    SIGNAL("a signal of another call is as good", "same_call = (seen == expected)", "same_call = (seen == seen)"),
    SIGNAL("a failed wait does not end the others", "& (late == 0) & (aborted == 0)", "& (late == 0)"),
    SIGNAL("a later failure overwrites the record", "    if first == 0:", "    if first >= 0:"),
    SIGNAL(
        "a failed wait leaves no record",
        "        record_fault(abort_ptr, record_ptr, word, expected, seen)",
        "        pass",
    ),
    SIGNAL(
        "the record says that nothing failed",
        "tl.atomic_xchg(record_ptr + FAULT_SET, tl.cast(1, tl.int64)",
        "tl.atomic_xchg(record_ptr + FAULT_SET, tl.cast(0, tl.int64)",
    ),
    SIGNAL(
        "the record has seen and expected swapped",
        "tl.store(record_ptr + FAULT_SEEN, seen)",
        "tl.store(record_ptr + FAULT_SEEN, expected)",
    ),
    SIGNAL("nobody says that a wait is late", "elapsed * 10 > limit", "elapsed > limit * 10"),
    SIGNAL("a wait is late at once", "elapsed * 10 > limit", "elapsed * 10 >= 0", IN_A_ROW),
    SIGNAL(
        "after a wait that failed nothing is poisoned",
        "missing += (tl.load(abort_ptr, volatile=True) != 0).to(tl.int32)",
        "pass",
        f"{PROTOCOL}/test_interleaving_failures.py::test_a_barrier_that_gives_up_is_named_and_poisons_what_comes_after_it",
    ),
    SIGNAL(
        "a block that does not come is not counted as missing",
        "missing += (arrived == 0).to(tl.int32)",
        "pass",
        survives="whatever does not come raises the flag, which the same kernel looks at next",
    ),
    SIGNAL("more than the row is poisoned", "mask=offsets < row_size)", "mask=offsets < row_size + 2)"),
    SIGNAL(
        "only the first part of the row is poisoned", "range(0, row_size, BLOCK)", "range(0, row_size - BLOCK, BLOCK)"
    ),
    SIGNAL("the next epoch resets a word too many", "mask=counters < count)", "mask=counters <= count)"),
    SIGNAL("the next epoch leaves the last counter", "mask=counters < count)", "mask=counters < count - 1)"),
    SIGNAL(
        "signals of chunks lie over those of the next rank",
        "return source * MAX_CHUNKS + chunk",
        "return source * (MAX_CHUNKS - 1) + chunk",
    ),
    GATHER("what is not gathered is not poisoned", '        acc = tl.where(arrived, acc, float("nan"))\n', ""),
    SCATTER(
        "what is not received is not poisoned",
        'acc += tl.where(arrived, part.to(tl.float32), float("nan"))',
        "acc += part.to(tl.float32)",
    ),
    SCATTER(
        "the reduction after a wait that failed is a number",
        'total = tl.where(tl.load(abort_ptr, volatile=True) != 0, float("nan"), total)',
        "pass",
        f"{PROTOCOL}/test_reduce_partials.py",
    ),
    # slots
    SLOT(
        "kernels that send share the counters of the others",
        "self.direct_counters = Counters(torch.zeros(count, dtype=torch.int64, device=device))",
        "self.direct_counters = self.counters",
    ),
    SLOT(
        "claimed tiles and exited CTAs are counted in one word", "self.claimed = words[1:2]", "self.claimed = words[:1]"
    ),
    SLOT("pieces and tiles are claimed from one word", "self.sent = words[2:3]", "self.sent = words[1:2]"),
    SLOT(
        "a push waits for one tile",
        "self.slot.counters.complete[word : word + 1], tiles)",
        "self.slot.counters.complete[word : word + 1], 1)",
        f"{PROTOCOL}/test_interleaving_gemm_reduce_scatter.py::test_fault_of_fused_is_caught",
    ),
    SLOT(
        "every call of a slot gets the routes of the first",
        "key = (legs, tiles, pitch)",
        'key = "routes"',
        f"{PROTOCOL}/test_interleaving_gemm_reduce_scatter.py::test_chunked_passes",
    ),
    USE("slots are free one operator too early", "self._sent_after]", "self._sent_after + 1]"),
    USE("operators without calls are counted", " and self._operator in self._last_used:", ":"),
    USE(
        "after a barrier the slots of the operator before stay taken",
        "list(range(SLOTS))",
        "[0]",
    ),
    USE(
        "an operator that raised leaves its slots free",
        "self._last_used, self._free = [self._operator] * SLOTS, []",
        "pass",
    ),
    USE("slots are taken in turn", "slot, *self._free = self.free()", "*self._free, slot = self.free()"),
    WORKSPACE("a barrier that was asked for is left out", "(barrier_first or len", "(len"),
    WORKSPACE(
        "ranks that raised in different places go on",
        "if self.use.has_raised else",
        "if False else",
        f"{PROTOCOL}/test_modes.py::test_ranks_that_raised_in_different_places_do_not_go_on",
    ),
    WORKSPACE("an operator finds too few slots", "len(self.use.free()) < calls", "len(self.use.free()) < 1"),
    WORKSPACE(
        "after a barrier no slot is free", "            raise\n        self.use.clear()\n", "            raise\n"
    ),
    WORKSPACE(
        "calls of another dtype share views",
        "key = (block_shape, dtype, chunks)",
        "key = (block_shape, chunks)",
        f"{PROTOCOL}/test_processes.py::test_half_precision",
    ),
    LAYOUT(
        "the barrier's signals lie in the first block",
        "_aligned((BARRIER + 1) * self.signals_bytes)",
        "(BARRIER) * self.signals_bytes",
    ),
    LAYOUT("a smaller call shrinks the heap", "max(self.slot_bytes, slot_bytes)", "slot_bytes"),
    LAYOUT(
        "a call without flagged words takes them away",
        "max(self.flagged_bytes, flagged_bytes)",
        "flagged_bytes",
        f"{UNIT}/test_low_latency.py::test_flagged_words_lie_behind_the_blocks",
    ),
    LAYOUT("slots overlap", "+ slot * _aligned(self.slot_bytes)", "+ slot * (self.slot_bytes // _ALIGN * _ALIGN)"),
    TAGS("epochs grow past an int64", "return (number + _WORD // 2) % _WORD - _WORD // 2", "return number"),
    TAGS(
        "a wait on the host polls for its own epoch and no later one",
        "return _signed(seen - (epoch_of(expected) << EPOCH_SHIFT)) >= 0",
        "return epoch_of(seen) == epoch_of(expected)",
    ),
    TAGS(
        "a later call counts as another call",
        "return seen == expected or epoch_of(seen) != epoch_of(expected)",
        "return seen == expected",
    ),
    TAGS("calls of one name have one fingerprint", 'f"{self.op}|{self.what}"', 'f"{self.op}"'),
    TAGS("a barrier has its operator's fingerprint", 'return Tag(f"{self.op}/barrier", "barrier")', "return self"),
    # waits of the host, and what kernels are told
    HOST_WAITS(
        "the waiting kernel's limit is in microseconds",
        "limit=int(self.timeout_s * 1e9), rank=self.rank, row_ptr=row",
        "limit=int(self.timeout_s * 1e6), rank=self.rank, row_ptr=row",
    ),
    HOST_WAITS(
        "the barrier's limit is in microseconds",
        "tag=call.tag.word, limit=int(self.timeout_s * 1e9)",
        "tag=call.tag.word, limit=int(self.timeout_s * 1e6)",
    ),
    HOST_WAITS(
        "a wait poisons the own block", "victim = first if first != self.rank else", "victim = first if True else"
    ),
    HOST_WAITS(
        "a wait on the host takes any call's signal",
        "if not (in_time or has_arrived(seen, expected)) or not is_same_call(seen, expected):",
        "if not (in_time or has_arrived(seen, expected)):",
        f"{PROTOCOL}/test_mismatched_calls.py::test_every_rank_raises_by_name",
    ),
    HOST_WAITS(
        "a wait on the host that gave up goes on",
        "if not (in_time or has_arrived(seen, expected)) or not is_same_call(seen, expected):",
        "if not is_same_call(seen, expected):",
        f"{PROTOCOL}/test_interleaving_all_gather_gemm.py::test_stopped_peer_is_named",
    ),
    WATCHDOG("a wait warns at every turn", "            warn_at = timeout_s\n", ""),
    WATCHDOG("a poll looks once", "while not ready():", "if not ready():"),
    WATCHDOG(
        "a failure is raised once",
        "        self._error = self._error_of(peer, chunk, expected, seen)\n        raise self._error",
        "        raise self._error_of(peer, chunk, expected, seen)",
        survives="the record stays, and raises the same again; a wait "
        "of the host raises at once, and peers time out at the next call, too",
    ),
    WATCHDOG("a record that is not complete is read", "if words[FAULT_SET]:", "if words[FAULT_EXPECTED]:"),
    WATCHDOG("a peer in another call counts as late", "if has_arrived(seen, expected):", "if False:"),
    WATCHDOG(
        "the newest call is forgotten",
        "popitem(last=False)",
        "popitem()",
        survives="after 65,536 kinds of calls an error says 'an operator' for a name",
    ),
    # pushes
    THREAD("rows are sent although their kernel gave up", "return  # the kernel", "pass  # the kernel"),
    THREAD("rows are sent when all but one are stored", "counter.item() >= goal", "counter.item() >= goal - 1"),
    THREAD("a push waits for its count to pass the goal", "counter.item() >= goal", "counter.item() > goal"),
    STREAM(
        "what the driver did not copy is signalled",
        "failed or copy(route.signal_at, route.epoch_at, 8, stream)",
        "copy(route.signal_at, route.epoch_at, 8, stream) or failed",
    ),
    STREAM(
        "what the driver does not wait for is copied",
        "failed or copy(route.place, start + route.offset, route.nbytes, stream)",
        "copy(route.place, start + route.offset, route.nbytes, stream) or failed",
    ),
    ROUTE(
        "every push takes the first rows",
        "source.storage_offset() + self.first,",
        "source.storage_offset(),",
    ),
    ROUTE("the driver copies from the first row", "first * target.element_size()", "0 * target.element_size()"),
    ROUTE("the driver's offset is in elements", "first * target.element_size()", "first"),
    THREAD(
        "what the thread raised is lost", "        if self._error is not None:\n            raise self._error\n", ""
    ),
    THREAD(
        "a thread that raised pushes nothing more",
        "                self._error = error\n",
        "                self._error = error\n                return\n",
    ),
    THREAD(
        "an operator ends before the last push",
        "wait_for(lambda: self._pending <= left)",
        "wait_for(lambda: self._pending <= 1)",
    ),
    THREAD("the thread's join waits for what was sent ahead, too", "self._ahead or 0, None", "0, None"),
    THREAD("what was sent ahead is never waited for", "self._ahead or 0, None", "self._ahead or 0, self._ahead"),
    STREAM(
        "an operator in another stream does not wait",
        "self._driver.check(self._driver.wait_event(current, self._ended, 0))",
        "pass",
        f"{STREAMS}::test_a_caller_may_use_two_streams",
    ),
    STREAM(
        "the stream of the first operator counts for ever",
        "        self._last_stream = current\n",
        "        self._last_stream = current if last is None else last\n",
        f"{STREAMS}::test_a_caller_may_use_two_streams",
    ),
    # before the first call
    AGREEMENT("rounds share their keys", 'f"{number}/{rank}"', 'f"0/{rank}"'),
    AGREEMENT(
        "a round is deleted before all have read it",
        'delete_key(f"{number - 1}/{self.rank}")',
        'delete_key(f"{number}/{self.rank}")',
    ),
    AGREEMENT("keys stay in the store", "if number:  #", "if False:  #"),
    AGREEMENT("those who came are named", "if not self._store.check([key])]", "if self._store.check([key])]"),
    AGREEMENT("ranks wait for ever", "if waited > self.timeout_s and", "if waited > self.timeout_s * 1e9 and"),
    AGREEMENT(
        "who came at the last moment is late",
        "if waited > self.timeout_s and (late := self._missing(keys)):",
        "if waited > self.timeout_s and (late := self._missing(keys)) is not None:",
        f"{UNIT}/test_agreement.py::test_one_that_comes_at_the_last_moment_is_not_late",
    ),
    AGREEMENT(
        "a warning names nobody",
        "self.timeout_s / 10 and (late := self._missing(keys)):",
        "self.timeout_s / 10 and (late := self._missing(keys)) is not None:",
        f"{UNIT}/test_agreement.py::test_one_that_comes_at_the_last_moment_is_not_late",
    ),
    AGREEMENT("a rank's own error is not raised", "if text is not None}", "if text is not None and rank != self.rank}"),
    AGREEMENT(
        "a store that is gone is not translated",
        "except (RuntimeError, ConnectionError) as error:",
        "except ConnectionError as error:",
    ),
    PROVIDERS(
        "auto takes nvshmem where it cannot serve",
        'return "nvshmem" if can_serve(group, ranks) else "torch"',
        'return "nvshmem"',
    ),
    PROVIDERS(
        "a GPU is given the host's memory",
        'if on_gpu == (provider == "host"):',
        'if not on_gpu and provider != "host":',
    ),
    ALLOCATION("a rank without room leaves its peers waiting", "    agreement.all_succeed(error, what)\n", ""),
    ALLOCATION(
        "only torch's errors are told to the peers",
        "except Exception as failure:  # torch",
        "except RuntimeError as failure:  # torch",
    ),
    NVSHMEM(
        "nvshmem serves a second group",
        "return not _worlds or _worlds[0].ranks == _ranks(group, ranks)",
        "return True",
    ),
    NVSHMEM(
        "nvshmem serves its group once",
        "return not _worlds or _worlds[0].ranks == _ranks(group, ranks)",
        "return not _worlds",
    ),
    NVSHMEM("nvshmem serves where it is not installed", "    if not is_installed():\n        return False\n", ""),
    ON_ALL_RANKS(
        "what a rank could not do is not told to the peers",
        "        agreement.all_succeed(str(failure) or repr(failure), what)\n",
        "",
    ),
    ON_ALL_RANKS("an error without words is told without a name", "str(failure) or repr(failure)", "str(failure)"),
    ON_ALL_RANKS("what a peer could not do is not heard", "    agreement.all_succeed(None, what)\n", ""),
    In("overlap_train/symmetric/__init__.py", TOGETHER)(
        "a rank without the provider leaves its peers waiting",
        'on_all_ranks(choose, agreement, "overlap_train: choose the provider of symmetric memory")',
        "choose()",
    ),
    OPEN_NVSHMEM(
        "a rank without NVSHMEM leaves its peers waiting",
        "on_all_ranks(partial(_prepared, agreement, device, members), agreement, _START)",
        "_prepared(agreement, device, members)",
    ),
    OPEN_NVSHMEM(
        "a rank that NVSHMEM refuses leaves its peers waiting",
        "on_all_ranks(partial(_start, prepared, uid), agreement, _START)",
        "_start(prepared, uid)",
    ),
    OPEN_NVSHMEM(
        "a rank that cannot map a peer leaves all waiting",
        "on_all_ranks(partial(self._mapped, ranks, agreement.rank, device), agreement, _OPEN)",
        "self._mapped(ranks, agreement.rank, device)",
    ),
    OPEN_NVSHMEM(
        "a world that a peer could not join is forgotten",
        "    _worlds.append(callers)  # also",
        "    # also",
    ),
    OPEN_NVSHMEM(
        "memory that nobody can use stays", "            self.close()\n            raise\n", "            raise\n"
    ),
    OPEN_NVSHMEM(
        "memory is freed without the peers", "except (OverlapTimeoutError, OverlapMismatchError):", "except KeyError:"
    ),
    OPEN_NVSHMEM(
        "only ranks that start tell each other the id of their world",
        "uid = agreement.exchange(prepared.uid, _START)[members.start]",
        "uid = None if _worlds else agreement.exchange(prepared.uid, _START)[members.start]",
    ),
    OPEN_TORCH(
        "a rank without a group leaves its peers waiting",
        "on_all_ranks(partial(_group_of, agreement, ranks), agreement, _OPEN)",
        "_group_of(agreement, ranks)",
    ),
    OPEN_TORCH(
        "a rank that torch cannot connect leaves its peers waiting",
        "on_all_ranks(mapped, agreement, _OPEN)",
        "mapped()",
    ),
]
