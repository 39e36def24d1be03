"""Faults of what training measures in its first calls: whose turn it is, what counts, and what becomes of it."""

from __future__ import annotations

from tests.mutations.mutation import In

TRIALS, UNIT = "tests/protocol/test_trials.py", "tests/unit/test_trial.py"
EVERY_METHOD = f"{TRIALS}::test_every_method_takes_its_turn_and_is_exact"
TOO_FEW = f"{TRIALS}::test_too_few_calls_to_tell_are_not_repeated"
LENGTHS = f"{TRIALS}::test_every_length_takes_part_and_the_trial_ends"
LAYOUT = f"{TRIALS}::test_a_weight_that_lies_otherwise_when_the_trial_ends"
AFTER = f"{TRIALS}::test_the_winners_are_for_calls_without_gradients_too"
REFUSED = f"{TRIALS}::test_what_does_not_fit_takes_no_part"
GRAPHS = "tests/unit/test_trial_plans.py"
ROOM = f"{GRAPHS}::test_methods_share_the_memory_that_there_may_be"
TURNS = In("overlap_train/operators/trials.py", ("tests/unit/test_trial_times.py",))
PLANS = In("overlap_train/operators/in_trial.py", (TRIALS,))
ENDS = In("overlap_train/operators/trial_book.py", (TRIALS,))
WINS = In("overlap_train/planning/trial.py", (UNIT,))
BOOK = In("overlap_train/operators/plan_book.py", (TRIALS,))
HERE, FILE, CALL = (
    In(f"overlap_train/operators/{file}.py", (TRIALS,)) for file in ("runs_here", "tuning_file", "call_plan")
)
NEEDS = In("overlap_train/planning/arguments.py", (ROOM,))
HOLDS = In("overlap_train/runtime/room.py", (REFUSED,))
CALLS = In("overlap_train/linear.py", (TRIALS,))
IN_GRAPHS = In("overlap_train/operators/in_trial.py", (GRAPHS,))
ULYSSES = "tests/protocol/test_ulysses_trials.py"
ONE_TURN = f"{ULYSSES}::test_all_parts_of_a_call_have_one_turn_and_one_time"
PARTS, TIMED = (In(f"overlap_train/ulysses/{file}.py", (ONE_TURN,)) for file in ("calls", "turns"))
CALLS_MADE = "return calls >= self.steps and"

FAULTS = [
    TURNS("all linears share their turns", "turns, count = self._calls[name]", 'turns, count = self._calls[name := ""]'),
    TURNS("one method has every turn", "else (turns + turns // count) % count", "else 0"),
    TURNS("rounds begin alike", "(turns + turns // count) % count", "turns % count"),
    TURNS("the untuned plan has no turn", "return None if turns < 0 else ", "return "),
    IN_GRAPHS("a graph gets one of the methods", "            self._note_capture(name)\n            return self\n",
              "            self._note_capture(name)\n            return self.candidates[0]\n"),
    IN_GRAPHS("a graph that ends no trial is not spoken of", "            self._note_capture(name)\n", ""),
    IN_GRAPHS("each linear in a graph is spoken of", "if not trial.captured and", "if"),
    IN_GRAPHS("each rank speaks of a graph", "if not trial.captured and self.domain.rank == 0:", "if not trial.captured:"),
    TURNS("a trial never ends", CALLS_MADE, "return False and"),
    TURNS("a trial ends a call early", CALLS_MADE, "return calls >= self.steps - 1 and"),
    TURNS("a trial does not wait for backward", "(self._is_enough() or calls", "(True or calls"),
    TURNS("a trial waits for ever", " or calls >= _PATIENCE * self.steps)", ")"),
    TURNS("the first call counts", "        if first not in self._seen:\n", "        if False:\n"),
    TURNS("the first of all linears alone is left out", "self.mark(), timed[:3]", "self.mark(), timed[1:3]"),
    TURNS("the oldest samples are kept", "deque(maxlen=_MOST_SAMPLES)", "deque()"),
    TURNS("sizes do not count", "median(_ms(begin, end) / of for", "median(_ms(begin, end) / work for"),
    TURNS("a pass that raises is timed", "if raised[0] is None and", "if"),
    TURNS("a graph's events are timed", "torch.cuda.is_current_stream_capturing()", "False"),
    PLANS("backward is timed as forward", "self._timed(bracket, self.trial.fprop.dgrad.kind)",
          "self._timed(bracket, self.trial.fprop.kind)"),
    PLANS("some methods have no turn", "else self.candidates[turn]", "else self.candidates[min(turn, 1)]", EVERY_METHOD),
    PLANS("memory is that of the default", "reduce(Request.covering, requests, self.plan.request)", "self.plan.request",
          EVERY_METHOD),
    PLANS("ranks do not compare their steps", " in {trial.steps} calls", "", f"{TRIALS}::test_ranks_compare_their_steps"),
    ENDS("a trial is begun again", "        self._trials[key_of(trial.fprop, domain.device)] = None\n",
         "        del self._trials[key_of(trial.fprop, domain.device)]\n", TOO_FEW),
    ENDS("each rank takes its own winners", "winners(trial.fprop, of_all_ranks,",
         "winners(trial.fprop, [of_all_ranks[domain.rank]],"),
    FILE("winners are not kept", "table.save(folder, key_of(domain), found)", "folder"),
    ENDS("every rank prints", "if dist.get_rank() == 0:", "if True:"),
    ENDS("every rank keeps", "if self._domain.rank == 0 else", "if True else"),
    ENDS("what was measured is tried again", "not in self._trials and is_known(", "not in self._trials and False and is_known("),
    ENDS("nodes are connected for what was measured", "if self._is_over(fprop, known):", "if False:", GRAPHS),
    HERE("who shares no memory tries to", " or why_not_across_nodes(plan, domain.nodes.problem)", "", GRAPHS),
    ENDS("what the kernels refuse is tried", "why_not_here(plan, domain) is None and ", "", REFUSED),
    ENDS("what memory does not hold is tried", " and may_hold(domain, together)", "", REFUSED),
    ENDS("memory is for one of the methods", "may_hold(domain, together)", "may_hold(domain, plan.request)", REFUSED),
    ENDS("a method finds the memory of the others taken", "admitted[method], needed = plan, together", "admitted[method] = plan",
         ROOM),
    NEEDS("blocks of one method are those of all", "max(self.slot_bytes, other.slot_bytes)", "self.slot_bytes"),
    NEEDS("words of one method are those of all", "max(self.flagged_bytes, other.flagged_bytes)", "self.flagged_bytes"),
    HOLDS("memory never ends", "(not self.is_captured and self._fits(self._needed(request)))", "not self.is_captured"),
    BOOK("other winners are forgotten", "{**self.table.winners, **{", "{**{", EVERY_METHOD),
    BOOK(
        "a graph cannot take a plan that is made again",
        " or self.before.get(key) == planned.request",
        "",
        "tests/protocol/test_ulysses_trials.py",
    ),
    BOOK("plans outlive their table", "        self.plans.clear()\n", "", AFTER),
    CALL("a plan that is new does not end a trial", "planned = planned or book.agree(",
         "if planned is None:\n            return book.agree(", LENGTHS, LAYOUT),
    BOOK("frozen weights are tried", "config.tune_steps and trains:", "config.tune_steps:"),
    BOOK("every caller takes part", "tries=bool(key[-1]) and error is None", "tries=error is None",
         f"{TRIALS}::test_who_takes_no_turns_takes_no_part"),
    WINS("the fastest rank counts", "{method: max(times[kind, method]", "{method: min(times[kind, method]"),
    WINS("the slowest method wins", "min(ms, key=lambda method: ms[method])", "max(ms, key=lambda method: ms[method])"),
    WINS("what was tuned is measured over", " or winner_of(pass_, device, table, nodes) is not None:", ":"),
    WINS("a default that was not timed loses", " or default not in ms", ""),
    WINS("noise decides", "ms[fastest] > (1 - SAME) * ms[default]", "False"),
    WINS("what one rank lacks wins", "if all((kind, method) in times for times in of_all_ranks)", "if True"),
    WINS("methods that stay in a node are tried across", "may_choose(method, nodes)", "may_choose(method, 1)"),
    WINS("the default does not begin", "[untuned(fprop, device, nodes).method, *fits]", "fits"),
    WINS("one trial is of two kinds of kernels", "return fprop.bucket, on_hopper(fprop, device)", "return fprop.bucket, True"),
    PARTS("each part takes a turn", "if not self.is_begun and self.settings", "if self.settings"),
    PARTS("only the first part runs by its turn", "self.terms.config if self.trial is None else",
          "self.terms.config if self.is_begun else"),
    PARTS("Ulysses takes no turns", "config, name, tries=True)", "config, name)"),
    TIMED("a part alone is timed", "self.rows_of_rank * self.world_size", "self.parts[0].last * self.batch * self.world_size"),
    TIMED("Ulysses' backward is timed as forward", "return self._timed(self.trial.fprop.dgrad.kind) if",
          "return self._timed(self.trial.fprop.kind) if"),
    TIMED("a backward that gives no dx is timed", "if wants_dx else nullcontext()", "if True else nullcontext()",
          f"{ULYSSES}::test_what_is_not_timed"),
    PLANS("what stands in for a method is timed as that", "candidate.method if isinstance(candidate, Candidate) else None",
          "self.in_trial.methods[self.candidates.index(candidate)]", f"{ULYSSES}::test_what_stands_in_is_not_timed"),
    CALLS("a gather takes no turns", "w_shard_n, bias, group, config, name, tries=True)\n    linear = planned.next_call(name)",
          "w_shard_n, bias, group, config, name, tries=True)\n    linear = planned.linear(name)"),
    CALLS("a scatter takes no turns", "w_shard_k, bias, group, config, name, tries=True)\n    linear = planned.next_call(name)",
          "w_shard_k, bias, group, config, name, tries=True)\n    linear = planned.linear(name)"),
]  # fmt: skip
