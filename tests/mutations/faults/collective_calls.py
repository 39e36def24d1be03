"""Faults of the calls of collectives that ranks note, or ask each other about."""

from __future__ import annotations

from tests.mutations.mutation import In

FILE = "overlap_train/protocol/collective_calls.py"
NOTED = In(FILE, ("tests/unit/test_collective_calls.py",))
ASKED = In(FILE, ("tests/protocol/test_mismatched_calls.py::test_every_rank_raises_by_name",))
WATCHDOG = In("overlap_train/protocol/watchdog.py", ("tests/unit/test_collective_calls.py",))
SHARED = In("overlap_train/symmetric/host.py", ("tests/unit/test_collective_calls.py",))

FAULTS = [
    NOTED(
        "a call of another epoch counts as another call",
        "theirs != word and epoch_of(theirs) == epoch_of(word)",
        "theirs != word",
    ),
    NOTED("nobody compares the calls that are noted", "if seen.count(word) == self._world:", "if True:"),
    NOTED(
        "a rank writes into the column of another", "self._words[row + self._rank] = word", "self._words[row] = word"
    ),
    NOTED("errors do not know the call that a rank has entered", "        self._fault.know(tag)\n", ""),
    NOTED(
        "calls differ by their epochs for who looks later",
        "((table >> 32) == (mine >> 32)) & (table != mine)",
        "table != mine",
    ),
    NOTED("the last call that differs is named", "row, rank = min(", "row, rank = max("),
    NOTED("nobody looks at the calls to which this rank came first", "    fault.looks.append(calls.look)\n", ""),
    NOTED(
        "a rank that cannot have the table takes its peers along",
        "except RuntimeError as error:",
        "except ValueError as error:",
    ),
    ASKED("CPU processes do not compare their calls", "if theirs != tag:", "if False:"),
    WATCHDOG(
        "nobody calls the looks",
        "        for look in fault.looks:\n            look()\n",
        "",
    ),
    WATCHDOG(
        "what was noted is not raised",
        "            self._error = self._error_of(peer, chunk, expected, seen)\n            warn",
        "            warn",
    ),
    SHARED("ranks of all machines share one table", "if place[-1] == machine)", ")"),
]
