"""What the ranks of a group tell each other outside the hot path, within a time limit, through the job's key-value store.

A collective of gloo or NCCL waits as long as the group says and names nobody. Here a rank that does not come is named. What all
ranks have, or none of them (memory, a library that has started, a mapping), raises on all where one has not.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..config import flag_name
from ..warn import warn_user
from .bounded import Callers
from .peers import LOOK_S, OverlapMismatchError, OverlapTimeoutError, Peers, answer, answer_soon, warn_after

T = TypeVar("T")
# Beyond the time-out, and for each rank: a rank that is late is named first, by a question for each.
_ANSWER_S, _ANSWER_OF_RANK_S = 1.0, 1e-3
# A library takes its time to start, however short a wait in training may be. On 2 x H100 NVSHMEM still connected after 60 s.
_LEAST_CALL_S = 120.0


def say_on_rank_0(rank: int, text: str) -> None:
    """Print a line that all ranks of a group would print, once. rank: this one."""
    if rank == 0:
        print(f"overlap_train: {text}", file=sys.stderr, flush=True)


class Agreement:
    """What the ranks of one group exchange outside the hot path. All of them call the same methods in the same order.

    call_s: how long a library's call may take that nothing can interrupt (bounded.py); None: timeout_s, at least two minutes.
    called: the group in errors; where a call has two, the argument that it is. is_idle: whether all that this rank has enqueued
    on its device is done.
    """

    called = "the group"
    is_idle: Callable[[], bool] = staticmethod(lambda: True)

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, call_s: float | None = None) -> None:
        self.group, self.timeout_s, self.call_s = group, timeout_s, call_s
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        # Held while a thread of this rank asks the store, perhaps one that nobody waits for any more.
        self._asks = threading.Lock()
        self._group_store = dist.distributed_c10d._world.pg_map[group][1]
        self._generation = self._count_generation(1)  # of this group's domains: after shutdown another one
        self._store = dist.PrefixStore(f"overlap_train/{self._generation}", self._group_store)
        self._number = 0
        self.peers = Peers(self._store, self.rank, self.world_size)

    def exchange(self, value: Any, what: str, kind: str = "", closing: bool = False) -> list[Any]:
        """The values of all ranks, by rank; anything that can be pickled.

        what: what the ranks do here, for errors: "fc1: agree on its first call". kind: what must be equal on all ranks for their
        values to belong together; empty: `what`. closing: in shutdown(), to which ranks come that have failed, too.

        Raises:
            OverlapTimeoutError: a rank did not come in time, or the store is gone.
            OverlapMismatchError: a rank is in an exchange of another kind.
        """
        kind = kind or what
        if self.peers.takes_back:
            self.peers.go_on()
        found = self._answer(partial(self._values_of_all, self._number, (kind, what, value), what, closing), what)
        self._number += 1  # not before: a rank that gave up comes to the same round again
        for rank, (their_kind, theirs, _) in enumerate(found):
            if their_kind != kind:
                raise OverlapMismatchError(
                    f"{what}: rank {self.rank} is here, but rank {rank} of {self.called} is in: {theirs}; all ranks of a group "
                    f"must make the same calls, with the same shapes, in the same order"
                )
        return [value for *_, value in found]

    def asked_by(self, rank: int) -> str | None:
        """What another rank waits to agree on, in words, where this one has not come to that; None: nothing. Everything that it
        has enqueued before is done: nothing more comes from it."""
        key = f"{self._number}/{rank}"

        def ask() -> str | None:
            return str(pickle.loads(self._store.get(key))[1]) if self._store.check([key, f"{key}/waits"]) else None

        return answer_soon(ask)

    def store_of(self, name: str) -> dist.Store:
        """A part of the store for something of the group that needs one of its own."""
        return dist.PrefixStore(name, self._store)

    def name_of(self, what: str) -> str:
        """A name for something of the group that its ranks make now: the same on all of them, and never used again."""
        return f"overlap_train/{self.group.group_name}/{self._generation}/{self._number}/{what}"

    def barrier(self, what: str, closing: bool = False) -> None:
        """All ranks have come here. closing: as in exchange."""
        self.exchange(None, what, closing=closing)

    def callers(self, members: Iterable[int] | None = None) -> Callers:
        """The ranks that make a call of a library together, for `bounded`. members: ranks of the group; None: all."""
        ranks = dist.get_process_group_ranks(self.group)
        some = ranks if members is None else [ranks[member] for member in members]
        return Callers(ranks[self.rank], tuple(some), self.call_s or max(self.timeout_s, _LEAST_CALL_S))

    def all_succeed(self, error: str | None, what: str) -> None:
        """Raise RuntimeError on all ranks if one of them reports an error."""
        try:
            errors = {rank: text for rank, text in enumerate(self.exchange(error, what)) if text is not None}
        except OverlapTimeoutError as late:
            if error is not None:  # its peers may wait inside a library for what failed here
                late.add_note(f"rank {self.rank} itself had failed: {error}")
            raise
        if errors:
            raise RuntimeError(f"{what}: " + "; ".join(f"rank {rank}: {text}" for rank, text in errors.items()))

    def forget(self) -> None:
        """The domain ends. If its ranks never came together, the next one has this generation again: some have had none."""
        if self._number == 0:
            self._count_generation(-1)

    def _count_generation(self, step: int) -> int:
        return self._answer(partial(self._counted, step), "overlap_train: count the domains of the group")

    def _counted(self, step: int, given_up: threading.Event) -> int:
        key = f"overlap_train/generation/{self.rank}"
        count = self._group_store.add(key, step)
        if given_up.is_set():  # the store went on: without a domain here nothing counts
            self._group_store.add(key, -step)
        return count

    def _answer(self, ask: Callable[[threading.Event], T], what: str) -> T:
        """What `ask` returns. It gets an event that is set when nobody waits for it any more, after Ctrl-C, too. Then it takes
        back what it has told, before another thread of this rank asks."""
        given_up = threading.Event()

        def in_turn() -> T:
            with self._asks:
                if given_up.is_set():
                    raise InterruptedError
                return ask(given_up)

        try:
            return answer(in_turn, self.timeout_s + _ANSWER_S + self.world_size * _ANSWER_OF_RANK_S)
        except TimeoutError:
            raise OverlapTimeoutError(
                f"{what}: rank {self.rank} waited {self.timeout_s:g} s, and the key-value store of the job does not answer; the "
                f"process that hosts it, usually torchrun or rank 0 of the job, is stopped or cannot be reached"
            ) from None
        except (OverlapTimeoutError, OverlapMismatchError):
            raise
        except (RuntimeError, ConnectionError) as error:
            raise OverlapTimeoutError(
                f"{what}: rank {self.rank} lost the key-value store of the job ({error}); the process that hosts it, usually "
                f"rank 0 of the job, has ended: its own log says why"
            ) from error
        finally:
            given_up.set()

    def _values_of_all(self, number: int, mine: Any, what: str, closing: bool, given_up: threading.Event) -> list[Any]:
        keys = [f"{number}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], pickle.dumps(mine))
        self._wait_for(keys, what, closing, given_up)
        found = [pickle.loads(self._store.get(key)) for key in keys]
        self._store.delete_key(f"{number}/{self.rank}/waits")
        if number:  # everybody has read the previous round, because everybody has come to this one
            self._store.delete_key(f"{number - 1}/{self.rank}")
        return found

    def _wait_for(self, keys: list[str], what: str, closing: bool, given_up: threading.Event) -> None:
        begin, pause, warned, look_at = time.monotonic(), 2e-4, False, min(LOOK_S, self.timeout_s / 10)
        where = f"{what}: rank {self.rank}"
        try:
            while not self._store.check(keys):
                if given_up.is_set():
                    raise InterruptedError
                waited = time.monotonic() - begin
                # The last one may have come just now. Others have seen all keys then, and go on: so does this rank.
                if waited > min(look_at, self.timeout_s) and (missing := self._missing(keys)):
                    look_at = waited + LOOK_S
                    late = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.called}"
                    if waited > self.timeout_s:
                        raise OverlapTimeoutError(
                            f"{where} waited {self.timeout_s:g} s for {late}. A rank that does not come is dead, "
                            f"stopped, or in another call; if it is only slow, raise timeout_s (--overlap-train-timeout-s)."
                        )
                    if self.is_idle():
                        self._store.set(f"{keys[self.rank]}/waits", b"")
                    if (failure := self.peers.error(where, missing, closing)) is not None:
                        raise failure
                    if not warned and waited > warn_after(self.timeout_s):
                        warned = True
                        warn_user(f"{where} has waited {waited:.3g} s for {late}")
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        except (InterruptedError, OverlapTimeoutError, OverlapMismatchError):
            self._store.delete_key(keys[self.rank])  # or a late rank would believe that everybody has come
            raise

    def _missing(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]


def on_all_ranks(
    make: Callable[[], T], agreement: Agreement, what: str, undo: Callable[[T], object] = lambda made: None
) -> T:
    """What `make` returns, if it returns on every rank; `undo` ends it otherwise. Collective. what: see Agreement.exchange.

    Raises:
        RuntimeError: on every rank, if one of them raised, with what that one said.
    """
    try:
        made = make()
    except Exception as failure:  # libraries raise classes of their own
        agreement.all_succeed(str(failure) or repr(failure), what)
        raise
    try:
        agreement.all_succeed(None, what)
    except RuntimeError:
        undo(made)
        del made  # who catches the error holds this frame
        raise
    return made


def allocated(make: Callable[[], torch.Tensor], nbytes: int, agreement: Agreement, what: str) -> torch.Tensor:
    """on_all_ranks of memory of `nbytes` bytes; where there is no room, with the way out."""

    def make_or_say_why() -> torch.Tensor:
        try:
            return make()
        except Exception as failure:
            raise RuntimeError(
                f"{nbytes} bytes: {failure}; leave more room on its GPU, with fewer rows in a call or less memory for exchanges "
                f"({flag_name('exchange_mib')}), or take another provider ({flag_name('provider')})"
            ) from failure

    return on_all_ranks(make_or_say_why, agreement, what)
