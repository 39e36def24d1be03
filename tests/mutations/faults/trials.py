"""Faults of what training measures in its first calls: whose turn it is, what counts, and what becomes of it."""

from __future__ import annotations

from tests.mutations.mutation import In

TRIALS, UNIT = "tests/protocol/test_trials.py", "tests/unit/test_trial.py"
EVERY_METHOD = f"{TRIALS}::test_every_method_takes_its_turn_and_is_exact"
TOO_FEW = f"{TRIALS}::test_too_few_calls_to_tell_are_not_repeated"
TURNS = In("overlap_train/operators/trials.py", (TRIALS,))
ENDS = In("overlap_train/operators/trial_book.py", (TRIALS,))
WINS = In("overlap_train/planning/trial.py", (UNIT,))
PLANS = In("overlap_train/operators/plan_book.py", (TRIALS,))
CALLS = In("overlap_train/linear.py", (TRIALS,))
CALLS_MADE = "return self._calls.get(name, 0) >= self.steps"
TIMED_BACKWARD = "self._timed(bracket, self.trial.fprop.dgrad)"

FAULTS = [
    TURNS("all linears share their turns", "calls = self._calls.get(name, 0)", 'calls = self._calls.get(name := "", 0)'),
    TURNS("one method has every turn", "return calls % len(self.methods)", "return 0"),
    TURNS("a trial never ends", CALLS_MADE, "return False"),
    TURNS("a trial ends a call early", CALLS_MADE, f"{CALLS_MADE} - 1"),
    TURNS("the first sample counts", "for begin, end, rows in samples[1:])", "for begin, end, rows in samples)"),
    TURNS("rows do not count", "median(_ms(begin, end) / rows for", "median(_ms(begin, end) / 8 for"),
    TURNS("a pass that raises is timed", "if raised[0] is None and", "if"),
    TURNS("backward is timed as forward", TIMED_BACKWARD, "self._timed(bracket, self.trial.fprop)"),
    TURNS("some methods have no turn", "self.candidates[turn].linear", "self.candidates[min(turn, 1)].linear", EVERY_METHOD),
    TURNS("memory is that of the default", "max(request.flagged_bytes for request in requests)", "asked.flagged_bytes",
          EVERY_METHOD),
    ENDS("a trial is begun again", "self._trials[trial.fprop.bucket] = None", "del self._trials[trial.fprop.bucket]", TOO_FEW),
    ENDS("each rank takes its own winners", "winners(trial.fprop, of_all_ranks,",
         "winners(trial.fprop, [of_all_ranks[domain.rank]],"),
    ENDS("winners are not kept", "table.save(domain.config.tuning_dir, key, found)", "domain.config.tuning_dir"),
    ENDS("every rank prints", "if dist.get_rank() == 0:", "if True:"),
    ENDS("every rank keeps", "if domain.rank == 0 else", "if True else"),
    TURNS("a graph's events are timed", "torch.cuda.is_current_stream_capturing()", "False"),
    ENDS("a method that was asked for is tried", 'config.method != "auto" or ', ""),
    ENDS("what was measured is tried again", "is_known(fprop, known) or len(methods)", "len(methods)"),
    ENDS("other winners are forgotten", "{**known.winners, **{", "{**{", EVERY_METHOD),
    WINS("the fastest rank counts", "{method: max(times[kind, method]", "{method: min(times[kind, method]"),
    WINS("the slowest method wins", "min(ms, key=lambda method: ms[method])", "max(ms, key=lambda method: ms[method])"),
    WINS("what was tuned is measured over", " or table.find(pass_) is not None:", ":"),
    WINS("noise decides", "ms[fastest] > (1 - SAME) * ms[default]", "False"),
    WINS("what one rank lacks wins", "if all((kind, method) in times for times in of_all_ranks)", "if True"),
    WINS("methods that stay in a node are tried across", "if nodes == 1 or not TRAITS", "if nodes or not TRAITS"),
    WINS("the default does not begin", "tuple(dict.fromkeys([default, *fits]))", "tuple(fits)"),
    PLANS("frozen weights are tried", "if config.tune_steps and trains and error", "if config.tune_steps and error"),
    PLANS("plans of a trial outlive it", "                self.plans.discard(key)\n", "                pass\n"),
    CALLS("a gather takes no turns", "w_shard_n, bias, group, config, name).next_call(name)",
          "w_shard_n, bias, group, config, name).linear(name)"),
    CALLS("a scatter takes no turns", "w_shard_k, bias, group, config, name).next_call(name)",
          "w_shard_k, bias, group, config, name).linear(name)"),
]  # fmt: skip
