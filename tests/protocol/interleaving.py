"""A seeded scheduler that runs every CTA of every rank, and the copy engines, as greenlets of one process.

    actor       one greenlet: a CTA of a kernel launch, or a plain Python function (a host thread, a copy engine)
    step        what one actor does between two switches: at most one global load, store or atomic operation
    schedule    the sequence of steps; a function of the seed alone, so a failure replays from the seed it names

Switches come before each global memory access of a kernel (see `interpreter_hooks`) and at each `pause()` of a Python actor.
An actor that only polls is parked until a word it polled changes. When all actors are parked the scheduler resumes each
of them a few more times, and if still nothing changes it raises `Deadlock`, which lists who waits for what. The model is
sequentially consistent; the memory order that hardware needs on top is checked by rule in `interpreter_hooks`.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
from greenlet import GreenletExit, getcurrent, greenlet

from tests.protocol.interpreter_hooks import InterpreterHooks, MemoryAccess, read_word
from tests.protocol.policies import Policy, policy_of_seed

CONFIRM_ROUNDS = 20  # extra resumes of every parked actor before a deadlock is believed
SAME_WORD_READS = 3  # reads of one unchanged word, with no other progress between, that count as polling


class ScheduleError(AssertionError):
    """A schedule failed. The message starts with the seed that replays it."""


class Deadlock(ScheduleError):
    """No actor can move: all that are left poll for something that nobody will write."""


class StepLimit(ScheduleError):
    """The schedule did not end within the step limit."""


@dataclass(eq=False)
class Actor:
    """One greenlet and what the scheduler knows about it."""

    name: str
    rank: int
    body: Callable[[], object]
    grid: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # (program ids, grid) of a CTA
    launch: Launch | None = None
    greenlet: greenlet | None = None
    words: dict[int, list[int]] = field(default_factory=dict)  # address -> [bytes, value, reads] since the last progress
    parked: bool = False
    predicate: Callable[[], bool] | None = None  # set while a Python actor waits for a condition
    waits_for: str = ""
    polls_for: str = "something it polls through pause()"
    parked_at_version: int = -1
    stored_since_barrier: bool = False

    def progress(self) -> None:
        """Forget the polling so far: the actor has done something else than poll."""
        self.words.clear()


@dataclass(eq=False)
class Launch:
    """One kernel launch of one rank: CTAs that have not started yet, and how many are live."""

    name: str
    waiting: list[Actor]
    live: int = 0


class Scheduler:
    """Runs actors under one seeded schedule.

    seed            chooses policy, order and CTA start order
    resident        most CTAs of one launch that are live at once; None for all. The rest start when one ends: other SMs are
                    held by somebody else's kernel for as long as this takes
    step_limit      steps after which `StepLimit` is raised
    spin            False: a deadlock raises. True: parked actors are resumed for ever, so that a spin limit inside the
                    kernels runs out and the kernels report it by their own means
    """

    def __init__(
        self,
        seed: int,
        *,
        resident: int | None = None,
        step_limit: int = 200_000,
        spin: bool = False,
    ) -> None:
        self.seed, self.resident, self.step_limit, self.spin = seed, resident, step_limit, spin
        self.policy: Policy = policy_of_seed(seed)
        self.steps = 0
        self.signals: set[int] = set()  # addresses of the words that somebody waits for
        self.enqueue_launch: Callable[[Callable[[], None]], bool] = lambda run: False  # True: somebody else will run it
        self.trace: deque[str] = deque(maxlen=24)
        self.digest = 0  # checksum of the whole schedule, equal for equal seeds
        self._watched: dict[str, tuple[torch.Tensor, np.ndarray]] = {}
        self._seen_bytes = 0
        self._version = 0  # grows with every write that the scheduler knows of
        self._actors: list[Actor] = []
        self._by_greenlet: dict[greenlet, Actor] = {}
        self._hub: greenlet | None = None
        self._failure: tuple[Actor, BaseException] | None = None
        self._hooks = InterpreterHooks(self)

    # ---- what tests call -------------------------------------------------------------------------------------------

    def watch(self, **memory: torch.Tensor) -> None:
        """Name the shared tensors (contiguous). Reports use the names; changes of the bytes tell whether a Python actor wrote."""
        for name, tensor in memory.items():
            assert tensor.is_contiguous(), f"{name} is not contiguous"
            self._watched[name] = (tensor, tensor.detach().view(-1).view(torch.uint8).numpy())

    def spawn(self, name: str, body: Callable[[], object], *, rank: int = 0) -> None:
        """Add a Python actor. It may launch kernels (the launch returns when they have ended), `pause` and `wait_until`."""
        self._add(Actor(name, rank, body))

    def patch(self, owner: object, name: str, value: object) -> None:
        """Set an attribute for the duration of `run`."""
        self.during_run(mock.patch.object(owner, name, value))

    def during_run(self, context: AbstractContextManager[object]) -> None:
        """Enter a context manager for the duration of `run`."""
        self._hooks.patches.append(context)

    def step(self) -> None:
        """Let others run before the calling Python actor's next effect on memory."""
        actor = self._current()
        self._note_python_writes()
        self._switch(actor, "step")

    def pause(self) -> None:
        """Let others run; what a Python actor calls inside a poll loop. It sleeps until some memory changes."""
        actor = self._current()
        wrote = self._note_python_writes()
        actor.parked, actor.parked_at_version = not wrote, self._version
        actor.waits_for = actor.polls_for
        self._switch(actor, "pause")

    def polls_for(self, what: str) -> None:
        """Name what the calling Python actor polls for from here on."""
        self._current().polls_for = what

    def wait_until(self, predicate: Callable[[], bool], what: str) -> None:
        """Block the calling Python actor until `predicate()` holds; `what` names it in a deadlock report."""
        actor = self._current()
        self._note_python_writes()
        while not predicate():
            actor.parked, actor.predicate, actor.waits_for = True, predicate, what
            self._switch(actor, f"wait for {what}")
        actor.predicate = None

    def run(self) -> None:
        """Run until all actors have ended; raise `ScheduleError` (or a subclass) naming the seed otherwise."""
        self._hub = getcurrent()
        self._note_python_writes()
        try:
            with self._hooks:
                self._loop()
        finally:
            self._kill()

    # ---- what the interpreter hooks call ---------------------------------------------------------------------------

    def running_actor(self) -> Actor | None:
        """The actor whose greenlet runs now, None outside the schedule."""
        return self._by_greenlet.get(getcurrent())

    def launch(self, name: str, ctas: list[tuple[tuple[int, ...], Callable[[], object]]], grid: tuple[int, ...]) -> None:
        """Run the CTAs `(program ids, body)` of one kernel as actors; return when they have ended."""
        host = self._current()
        self._note_python_writes()
        actors = [Actor(_cta_name(name, host.rank, ids), host.rank, body, (ids, grid)) for ids, body in ctas]
        self.policy.random.shuffle(actors)  # hardware promises no start order
        launch = Launch(name, actors)
        for actor in actors:
            actor.launch = launch
        self._start_ctas(launch)
        self.wait_until(lambda: not launch.waiting and not launch.live, f"kernel {name}@{host.rank} to end")

    def before_access(self, actor: Actor, access: MemoryAccess) -> None:
        """Switch before a kernel's memory access; park first when the actor has been polling the word."""
        seen = actor.words.get(access.address)
        polling = access.reads_only and seen is not None and seen[2] >= (1 if access.is_poll else SAME_WORD_READS)
        if polling:
            actor.parked, actor.parked_at_version = True, self._version
            words = ", ".join(f"{self.name_of(word)} == {seen[1]}" for word, seen in actor.words.items())
            actor.waits_for = f"{words} to change"
        self._switch(actor, str(access))

    def after_access(self, actor: Actor, access: MemoryAccess) -> None:
        """Keep the books: writes wake parked actors, reads of one word may turn out to be polling."""
        if not access.reads_only:
            self._version += 1
            actor.progress()
        elif not access.is_word:
            actor.progress()  # a block was read: what the polling was for
        else:
            value = read_word(access.address, access.bytes)
            seen = actor.words.get(access.address)
            reads = seen[2] + 1 if seen is not None and seen[1] == value else 1
            actor.words[access.address] = [access.bytes, value, reads]

    def fail(self, actor: Actor, text: str) -> ScheduleError:
        """End the schedule with a `ScheduleError`, which the caller raises to leave the actor."""
        error = ScheduleError(self._message(f"{actor.name} {text}"))
        self._failure = self._failure or (actor, error)  # the interpreter may wrap what is raised inside a kernel
        return error

    # ---- the loop --------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        idle_rounds = 0
        while self._actors:
            ready = [actor for actor in self._actors if not self._is_blocked(actor)]
            if ready:
                version = self._version
                self._resume(self.policy.choose(ready))
                idle_rounds = 0 if self._version != version else idle_rounds
                continue
            pollers = [actor for actor in self._actors if actor.predicate is None]
            if not pollers or (idle_rounds >= CONFIRM_ROUNDS and not self.spin):
                raise Deadlock(self._message("deadlock, blocked: " + "; ".join(map(_describe, reversed(self._actors)))))
            idle_rounds += 1
            for actor in pollers:
                self._resume(actor)

    def _resume(self, actor: Actor) -> None:
        self.steps += 1
        if self.steps > self.step_limit:
            raise StepLimit(self._message(f"no end after {self.step_limit} steps"))
        actor.parked = False
        assert actor.greenlet is not None
        if actor.grid is not None:
            self._hooks.set_program(*actor.grid)
        actor.greenlet.switch()
        if self._failure is not None:
            failed, error = self._failure
            if isinstance(error, ScheduleError):
                raise error
            raise ScheduleError(self._message(f"{failed.name} raised {type(error).__name__}: {error}")) from error

    def _is_blocked(self, actor: Actor) -> bool:
        if not actor.parked:
            return False
        if actor.predicate is not None:
            return not actor.predicate()
        if actor.grid is not None:
            return all(read_word(address, word[0]) == word[1] for address, word in actor.words.items())
        return actor.parked_at_version == self._version

    # ---- actors ----------------------------------------------------------------------------------------------------

    def _add(self, actor: Actor) -> None:
        self.policy.enroll(actor)
        actor.greenlet = greenlet(lambda: self._run_body(actor))
        self._by_greenlet[actor.greenlet] = actor
        self._actors.append(actor)

    def _run_body(self, actor: Actor) -> None:
        getcurrent().parent = self._hub
        try:
            actor.body()
        except GreenletExit:
            return
        except BaseException as error:  # a failing actor ends the schedule, whatever it raised
            self._failure = self._failure or (actor, error)
            return
        if actor.grid is None:
            self._note_python_writes()
        self._version += 1
        self._actors.remove(actor)
        self._record(f"{actor.name}: end")
        if actor.launch is not None:
            actor.launch.live -= 1
            self._start_ctas(actor.launch)

    def _start_ctas(self, launch: Launch) -> None:
        limit = self.resident or len(launch.waiting) + launch.live
        while launch.waiting and launch.live < limit:
            launch.live += 1
            self._add(launch.waiting.pop())

    def _current(self) -> Actor:
        actor = self.running_actor()
        assert actor is not None, "called outside an actor"
        return actor

    def _switch(self, actor: Actor, what: str) -> None:
        self._record(f"{actor.name}: {what}")
        self._hub.switch()

    def _kill(self) -> None:
        for actor in self._actors:
            if actor.greenlet:  # started and not ended
                actor.greenlet.throw(GreenletExit)
        self._actors.clear()
        self._by_greenlet.clear()

    # ---- reports ---------------------------------------------------------------------------------------------------

    def _note_python_writes(self) -> bool:
        """Compare the watched bytes with the last look. Without watched tensors every Python step counts as a write."""
        if not self._watched:
            self._version += 1
            return True
        now = 0
        for _, buffer in self._watched.values():
            now = zlib.crc32(buffer, now)
        wrote, self._seen_bytes = now != self._seen_bytes, now
        self._version += wrote
        return wrote

    def _record(self, what: str) -> None:
        self.trace.append(what)
        self.digest = zlib.crc32(what.encode(), self.digest)

    def name_of(self, address: int) -> str:
        """A watched word by name and index."""
        for name, (tensor, buffer) in self._watched.items():
            offset = address - tensor.data_ptr()
            if 0 <= offset < buffer.nbytes:
                index = np.unravel_index(offset // tensor.element_size(), tensor.shape)
                return f"{name}[{', '.join(map(str, index))}]"
        return hex(address)

    def _message(self, text: str) -> str:
        latest = "\n  ".join(self.trace)
        return f"seed {self.seed} ({self.policy.name}, step {self.steps}): {text}\nlatest steps:\n  {latest}"


def _cta_name(kernel: str, rank: int, ids: tuple[int, ...]) -> str:
    while len(ids) > 1 and ids[-1] == 0:
        ids = ids[:-1]
    return f"{kernel}@{rank}[{','.join(map(str, ids))}]"


def _describe(actor: Actor) -> str:
    return f"{actor.name} waits for {actor.waits_for}"
