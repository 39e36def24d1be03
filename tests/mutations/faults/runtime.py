"""Faults of domains, of the bracket around an operator, and of graphs."""

from __future__ import annotations

from tests.mutations.mutation import In

UNIT, PROTOCOL = "tests/unit", "tests/protocol"
DOMAIN_FILE, PREPARE_FILE = "overlap_train/runtime/domain.py", "overlap_train/runtime/prepare.py"
BRACKET = In("overlap_train/runtime/bracket.py", (f"{UNIT}/test_operator_bracket.py",))
REGISTRY = In("overlap_train/runtime/registry.py", (f"{UNIT}/test_registry.py",))
GRAPH = In("overlap_train/runtime/graph.py", (f"{UNIT}/test_graph_guard.py",))
ROOM = In(
    "overlap_train/runtime/room.py",
    ("tests/protocol/test_new_lengths.py::test_a_thousand_lengths_agree_once_a_bucket",),
)
DOCTOR = In("overlap_train/tools/doctor/job.py", (f"{UNIT}/test_doctor_installation.py",))
GUARD, PREPARE_GUARD = (In(file, (f"{UNIT}/test_graph_guard.py",)) for file in (DOMAIN_FILE, PREPARE_FILE))
ROOM_LIMIT = In("overlap_train/runtime/room.py", (f"{UNIT}/test_room.py",))
FIRST_CALL = In("overlap_train/runtime/first_call.py", (f"{UNIT}/test_first_call.py",))
REFUSED = f"{PROTOCOL}/test_ulysses_attention.py::test_what_does_not_fit"
REFUSE = In(
    "overlap_train/operators/call_plan.py",
    (f"{REFUSED}_on_one_rank_is_an_error_on_all_at_the_first_call",),
)

FAULTS = [
    BRACKET(
        "nobody looks at the record after an operator",
        "        if raised is None:\n            domain.fault.check()\n",
        "",
    ),
    BRACKET(
        "nobody looks at the record before an operator",
        "        domain.fault.check()\n        if not",
        "        if not",
    ),
    BRACKET(
        "an operator that cannot begin stays under way",
        "            self.__exit__(True)\n            raise",
        "            raise",
    ),
    BRACKET("a range in a profile never ends", "ended.__exit__(None, None, None)", "pass"),
    BRACKET("a range in a profile ends once", "self._range, ended = OUTSIDE, self._range", "ended = self._range"),
    BRACKET("slots count as free after an operator that raised", "domain.workspace.use.invalidate()", "pass"),
    BRACKET(
        "slots never count as free",
        "if raised is not None and self._slots:",
        "if self._slots:",
    ),
    BRACKET("two threads are let in", "not domain.in_use.acquire(False)", "domain.in_use.acquire(False) and False"),
    BRACKET("pushes outlive their operator", "domain.engine.join()  # whatever", "pass  # whatever"),
    BRACKET(
        "the flag of a barrier is dropped",
        "domain.workspace.begin(self._tag, slots, self._barrier_first)",
        "domain.workspace.begin(self._tag, slots, False)",
        f"{PROTOCOL}/test_interleaving_columns.py::test_ranks_meet_where_asked_and_where_slots_run_out",
    ),
    ROOM(
        "the heap grows with every length", "with_room(request.slot_bytes), with_room", "request.slot_bytes, with_room"
    ),
    ROOM(
        "words grow with every length",
        "with_room(request.flagged_bytes))",
        "request.flagged_bytes)",
        "tests/protocol/test_new_lengths.py::test_words_with_flags_grow_in_buckets_too",
    ),
    ROOM(
        "room for longer rows counts against symmetric_mib",
        "return roomy if self._fits(roomy) and not",
        "return roomy if not",
        f"{UNIT}/test_room.py::test_room_does_not_pass_symmetric_mib",
    ),
    GUARD("an operator runs after shutdown", "if self.closed or (slots", "if (slots"),
    GUARD("a foreign graph is not noticed", "        if not self.graphed:\n", "        if False:\n"),
    GUARD(
        "operators inside graphed are refused",
        "        if not self.graphed:\n",
        "        if True:\n",
    ),
    PREPARE_GUARD(
        "new shapes are let into a capture",
        "    if domain.is_capturing():\n        raise",
        "    if False:\n        raise",
    ),
    GUARD("CUDA is asked on the CPU", "return self.on_gpu and torch", "return torch"),
    REGISTRY(
        "another timeout_s is accepted",
        '("provider", "symmetric_mib", "timeout_s", "node_ranks", "network", "network_sms", "reduce_sms")',
        '("provider", "symmetric_mib", "node_ranks")',
    ),
    REGISTRY(
        "another provider is accepted",
        '("provider", "symmetric_mib", "timeout_s", "node_ranks", "network", "network_sms", "reduce_sms")',
        '("symmetric_mib", "timeout_s", "node_ranks")',
    ),
    REGISTRY("an equal config is refused", "        if mine != theirs:", "        if mine is not None:"),
    REGISTRY("a tensor on another device is accepted", "    if device != domain.device:", "    if False:"),
    REGISTRY("a group that has changed is accepted", "if group.size() != domain.world_size:", "if False:"),
    REGISTRY(
        "only the first group is checked",
        "        domain.fault.check()\n",
        "        domain.fault.check()\n        break\n",
    ),
    REGISTRY(
        "groups are closed in the order of their first use",
        "sorted(_domains.values(), key=lambda domain: domain.group.group_name)",
        "list(_domains.values())",
        f"{UNIT}/test_shutdown.py",
    ),
    REGISTRY(
        "a forked process waits for its parent's copy engine",
        "os.register_at_fork(after_in_child=_close_in_child)\n",
        "",
        f"{PROTOCOL}/test_modes.py::test_a_forked_process_is_refused",
    ),
    REGISTRY(
        "two threads make two domains",
        "        with _making:\n            domain = _domains.get(group) or ",
        "        if True:\n            domain = ",
    ),
    REGISTRY(
        "shutdown ends an operator of another thread",
        "            idle.enter_context(Idle(domain.in_use))\n",
        "            pass\n",
        f"{UNIT}/test_shutdown.py",
    ),
    BRACKET(
        "a signal handler shuts down in the middle of an operator",
        "self._lock._is_owned() or ",
        "",
        f"{UNIT}/test_shutdown.py",
    ),
    REGISTRY("a domain is found after shutdown", "    _domains.clear()\n", "", f"{UNIT}/test_shutdown.py"),
    REGISTRY(
        "nvshmem never ends",
        "providers = {domain.heap.provider for domain in domains if domain.heap is not None}",
        "providers: set[str] = set()",
        f"{UNIT}/test_shutdown.py",
    ),
    REGISTRY(
        "shutdown waits a second time for a rank that did not come",
        'if "nvshmem" in providers and not errors:',
        'if "nvshmem" in providers:',
        f"{UNIT}/test_shutdown.py",
    ),
    GRAPH("no barrier at a graph's end", '        barrier(domain, Tag("graph/end", "barrier"))\n', ""),
    GRAPH("no barrier at a graph's beginning", '        barrier(domain, Tag("graph/begin", "barrier"))\n', ""),
    GRAPH(
        "a second capture forgets the first",
        "domain.captured |= domain",
        "domain.captured = domain",
        survives="both are captured by then, unless the second was not captured at all: a run of it without a graph",
    ),
    GRAPH("eager calls count as graphed for ever", "        domain.graphed = False", "        pass"),
    GRAPH("graphs are never forgotten", "        domain.captured = False", "        pass"),
    GRAPH(
        "capturing changes the use of slots",
        "        workspace.use = before",
        "        pass",
        f"{PROTOCOL}/test_interleaving_graph.py::test_capturing_leaves_the_use_of_slots_as_it_was",
    ),
    GRAPH(
        "capturing changes the use of slots in place",
        "before = copy.deepcopy(workspace.use)",
        "before = workspace.use",
        f"{PROTOCOL}/test_interleaving_graph.py::test_capturing_leaves_the_use_of_slots_as_it_was",
    ),
    ROOM_LIMIT(
        "a block to send from is held beyond symmetric_mib", "return self._nbytes(layout) <=", "return layout.nbytes <="
    ),
    ROOM_LIMIT("a block to send from is not said", " if self.staged_blocks else", " if False else"),
    In(PREPARE_FILE, (f"{UNIT}/test_room.py",))(
        "room does not know of a block to send from", ", domain.across_nodes.staged_blocks)", ")"
    ),
    ROOM_LIMIT("room passes what exchanges may have", " and not self._passes_limit(needed, roomy)", ""),
    ROOM_LIMIT(
        "large linears have no room",
        "slots <= self.exchange_mib * _MIB < roomy_slots",
        "self.exchange_mib * _MIB < roomy_slots",
    ),
    In(
        PREPARE_FILE,
        (f"{PROTOCOL}/test_faults.py::test_ranks_with_other_limits_are_refused_before_memory_is_allocated",),
    )("ranks may have other limits of exchanges", ", exchange_mib={config.exchange_mib}", ""),
    In("overlap_train/ulysses/calls.py", (f"{REFUSED}_on_one_rank_is_an_error_on_all_at_the_first_call",))(
        "peers do not hear of a weight that does not fit",
        "        refuse(wrong, LINEAR_ALL_TO_ALL, group, terms.config, x.device, terms.name)\n",
        "        raise ValueError(wrong)\n",
    ),
    In("overlap_train/ulysses/attention.py", (f"{REFUSED}_on_one_rank_is_an_error_on_all_at_the_first_call",))(
        "peers do not hear of a context that does not fit",
        "        _refuse(wrong, ALL_TO_ALL_LINEAR, LINEAR_REDUCE_SCATTER, shards, x, Terms(config, name))\n",
        "        raise ValueError(wrong)\n",
    ),
    FIRST_CALL("a problem that nobody heard becomes a time-out", "if mine.problem is None:", "if True:"),
    FIRST_CALL("nobody compares the first call", "    compare(agreement.rank, said)\n", ""),
    REFUSE("peers do not hear what does not fit", "        book.refuse(problem, spec, name)\n", "        pass\n"),
    REFUSE(
        "peers are asked in calls that they know",
        "if not book.knows(spec):",
        "if True:",
        survives="a rank that nobody hears says its own problem in the end, too, but timeout_s later",
    ),
    DOCTOR("a store that is gone fails the job", "with suppress(dist.DistError):", "if True:"),
    DOCTOR("the store goes while ranks ask it", "            if self.rank == speaker:\n", "            if False:\n"),
]
