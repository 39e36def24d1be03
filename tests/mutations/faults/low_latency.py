"""Faults of the low-latency protocol: its words, its kernels, their launches, and what planning says of it."""

from __future__ import annotations

from tests.mutations.mutation import In

INTERLEAVED, UNIT = "tests/protocol/test_interleaving_low_latency.py", "tests/unit/test_low_latency.py"
BITS = f"{INTERLEAVED}::test_the_sum_is_that_of_rank_order_to_the_bit"
NAMED = f"{INTERLEAVED}::test_another_call_of_a_peer_is_named_on_both_ranks"
LATE = f"{INTERLEAVED}::test_late_words_of_a_peer_that_has_come_are_a_time_out"
REFUSED, AUTO = (
    f"{UNIT}::test_it_is_refused_by_name_where_it_cannot_serve",
    f"{UNIT}::test_auto_takes_it_for_few_rows_of_few_bytes",
)
WRAPS = f"{INTERLEAVED}::test_epochs_wrap_around"
NAN = "tests/protocol/test_interleaving_shared_slot.py::test_what_has_not_come_is_nan_in_the_result"

WORDS = In("kernels/flagged_words.py", (BITS,))
KERNELS = In("kernels/low_latency.py", (BITS,))
ORDER = In(
    "kernels/low_latency.py",
    ("tests/protocol/test_low_latency_order.py::test_kernels_send_and_receive_in_the_schedules_order",),
)
LAUNCH = In("overlap_train/operators/low_latency.py", (BITS,))
PLANS = In("overlap_train/planning/low_latency.py", (f"{UNIT}::test_words_take_twice_the_bytes_of_whole_blocks",))
LAYOUT = In("overlap_train/protocol/layout.py", (f"{UNIT}::test_flagged_words_lie_behind_the_blocks",))

FAULTS = [
    WORDS("a flag may be zero", "tl.where(flag == 0, INSTEAD_OF_ZERO, flag)", "flag", WRAPS),
    WORDS(
        "what has not come is as good as data",
        "tl.where(state == COMPLETE, words.to(tl.int32), -1)",
        "words.to(tl.int32)",
        NAN,
    ),
    WORDS(
        "another call is waited for to its end", "tl.where(elsewhere, ELSEWHERE,", "tl.where(elsewhere, WAITING,", NAMED
    ),
    WORDS(
        "data that do not come look like another call",
        "tl.where(seen == expected, expected - ONE_EPOCH, seen)",
        "seen",
        LATE,
    ),
    WORDS(
        "a wait that gave up leaves no record",
        "if (state == LATE) | (state == ELSEWHERE):",
        "if state == ELSEWHERE:",
        LATE,
    ),
    WORDS(
        "negative payloads change the flag", "(payload.to(tl.int64) & LOW_HALF) | flag", "payload.to(tl.int64) | flag"
    ),
    WORDS("the second half of a word is lost", "low | (high << 16)", "low | (high & 0)"),
    WORDS(
        "the last half word is not stored",
        "mask=2 * places < size)\n        tl.store",
        "mask=2 * places + 1 < size)\n        tl.store",
    ),
    KERNELS("the own rows are added last", "for source in range(WORLD):", "for source in range(WORLD - 1, -1, -1):"),
    ORDER(
        "few rows: a gather sends to the preceding rank first",
        "peer_block(words_at_ptr, (rank + step)",
        "peer_block(words_at_ptr, (rank + WORLD - step)",
    ),
    ORDER(
        "few rows: a gather waits for the following rank first", "(rank + WORLD - 1 - index %", "(rank + 1 + index %"
    ),
    ORDER(
        "few rows: a scatter sends to the preceding rank first", "(rank + 1 + index %", "(rank + WORLD - 1 - index %"
    ),
    ORDER(
        "few rows: the preceding rank is told of the call first",
        "outgoing_at_ptr + (rank + step)",
        "outgoing_at_ptr + (rank + WORLD - step)",
    ),
    LAUNCH(
        "blocks that end within a word are read by whole words",
        "(block_bytes | first_at | second_at) % 4",
        "(first_at | second_at) % 4",
    ),
    PLANS("words take as much as their data", "* _WORD_BYTES", "* _DATA_BYTES"),
    PLANS("half a word has no room", "-(-received // world // _DATA_BYTES)", "(received // world // _DATA_BYTES)"),
    PLANS("all-to-alls are served", "if kind in EXCHANGES:", "if False:", REFUSED),
    PLANS("any size is served", "if nbytes > most:", "if False:", REFUSED),
    PLANS("auto takes it whatever is sent", "pass_.m <= rows and sent <= most", "pass_.m <= rows", AUTO),
    PLANS("auto takes it for many rows", "pass_.m <= rows and sent <= most", "sent <= most", AUTO),
    LAYOUT(
        "flagged words lie over blocks",
        "return self.offset(BARRIER) + slot * _aligned(self.flagged_bytes)",
        "return self.offset(0) + slot * _aligned(self.flagged_bytes)",
    ),
]
