"""A seeded scheduler that runs every CTA of every rank, and the copy engines, as greenlets of one process.

    actor       one greenlet: a CTA of a kernel launch, or a plain Python function (a host thread, a copy engine)
    step        what one actor does between two switches: at most one global load, store or atomic operation
    schedule    the sequence of steps; a function of the seed alone, so a failure replays from the seed it names

Switches come before each global memory access of a kernel (see `interpreter_hooks`) and wherever a Python actor asks
for one. An actor that only polls is parked until a word that it polled changes. When all actors are parked the
scheduler resumes each of them a few more times; if still nothing changes it raises `Deadlock`, which lists who waits
for what.
The model is sequentially consistent; the memory order that hardware needs on top is checked by rule in
`interpreter_hooks`.
"""

from __future__ import annotations

import gc
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import numpy as np
import torch
from greenlet import GreenletExit, getcurrent, greenlet

from tests.protocol.actors import Actor, Deadlock, Launch, ScheduleError, StepLimit
from tests.protocol.interpreter_hooks import InterpreterHooks, MemoryAccess
from tests.protocol.policies import Policy, policy_of_seed

CONFIRM_ROUNDS = 20  # extra resumes of every parked actor before a deadlock is believed


class Scheduler:
    """Runs actors under one seeded schedule.

    seed            chooses policy, order and CTA start order
    resident        most CTAs of one launch that are live at once; None for all. The rest start when one ends: somebody
                    else's kernel holds the other SMs
    step_limit      steps after which `StepLimit` is raised
    spin            False: a deadlock raises. True: parked actors are resumed for ever, so that a spin limit inside the
                    kernels runs out and the kernels report it by their own means
    """

    # Hooks of planted faults (planted.py): changes a kernel's access, or a torch operation of a host, to a word that has a name;
    # the kernel, or "CTA barrier", that is left out.
    fault: Callable[..., object] | None = None
    host_fault: Callable[..., bool] | None = None
    left_out = ""

    def __init__(
        self, seed: int, *, resident: int | None = None, step_limit: int = 200_000, spin: bool = False
    ) -> None:
        self.seed, self.resident, self.step_limit, self.spin = seed, resident, step_limit, spin
        self.policy: Policy = policy_of_seed(seed)
        self.steps = 0
        self.digest = 0  # checksum of the whole schedule, equal for equal seeds
        self.signals: set[int] = set()  # addresses of the words that somebody waits for
        self.enqueue_launch: Callable[[Callable[[], None]], bool] = lambda run: False  # True: somebody else will run it
        self._trace: deque[str] = deque(maxlen=24)
        self._watched: dict[str, tuple[torch.Tensor, np.ndarray]] = {}
        self._buffers: list[memoryview] = []  # of all watched tensors
        self._names: dict[int, str] = {}  # by address, of those that were asked for
        self._seen_bytes: bytes | None = None
        self._version = 0  # grows with every write that the scheduler knows of
        self._actors: list[Actor] = []
        self._by_greenlet: dict[greenlet, Actor] = {}
        self._hub: greenlet | None = None
        self._failure: tuple[Actor, BaseException] | None = None
        self._hooks = InterpreterHooks(self)

    # ---- what tests call before the run ---------------------------------------------------------------------------

    def watch(self, **memory: torch.Tensor) -> None:
        """Name shared tensors (contiguous) for reports. Changes of their bytes tell whether a Python actor wrote."""
        self._names.clear()
        for name, tensor in memory.items():
            assert tensor.is_contiguous(), f"{name} is not contiguous"
            self._watched[name] = (tensor, tensor.detach().view(-1).view(torch.uint8).numpy())
        self._buffers = [memoryview(buffer) for _, buffer in self._watched.values()]

    def patch(self, owner: object, name: str, value: object) -> None:
        """Set an attribute for the duration of `run`."""
        self.during_run(mock.patch.object(owner, name, value))

    def during_run(self, context: AbstractContextManager[object]) -> None:
        """Enter a context manager for the duration of `run`."""
        self._hooks.patches.append(context)

    def spawn(self, name: str, body: Callable[[], object], *, rank: int = 0) -> None:
        """Add a Python actor. A kernel launch by it returns when all CTAs, actors of their own, have ended."""
        self._add(Actor(name, rank, body))

    def run(self) -> None:
        """Run until all actors have ended; raise `ScheduleError` (or a subclass) naming the seed otherwise."""
        self._hub = getcurrent()
        self._note_python_writes()
        # Kept per thread, which all actors share, also those that are ended here.
        with torch.no_grad(), _without_collector():
            try:
                with self._hooks:
                    self._loop()
            finally:
                self._kill()

    # ---- what Python actors call ----------------------------------------------------------------------------------

    def step(self) -> None:
        """Let others run before the calling actor's next effect on memory."""
        self._note_python_writes()
        self._switch(self._current(), "step")

    def pause(self) -> None:
        """Let others run: what a poll loop calls. Sleeps until some memory changes."""
        actor = self._current()
        wrote = self._note_python_writes()
        actor.parked, actor.parked_at_version, actor.waits_for = not wrote, self._version, actor.polls_for
        self._switch(actor, "pause")

    def polls_for(self, what: str) -> None:
        """Name what the calling actor polls for from here on."""
        self._current().polls_for = what

    def wait_until(self, predicate: Callable[[], bool], what: str) -> None:
        """Block the calling actor until `predicate()` holds; `what` names it in a deadlock report."""
        actor = self._current()
        self._note_python_writes()
        while not predicate():
            actor.parked, actor.predicate, actor.waits_for = True, predicate, what
            self._switch(actor, f"wait for {what}")
        actor.predicate = None

    # ---- what the interpreter hooks call --------------------------------------------------------------------------

    def running_actor(self) -> Actor | None:
        """The actor whose greenlet runs now, None outside the schedule."""
        return self._by_greenlet.get(getcurrent())

    def launch(
        self, name: str, ctas: list[tuple[tuple[int, ...], Callable[[], object]]], grid: tuple[int, ...]
    ) -> None:
        """Run the CTAs `(program ids, body)` of one kernel as actors; return when they have ended."""
        host = self._current()
        launch = Launch([])
        for ids, body in ctas:
            cta = Actor(f"{name}@{host.rank}[{','.join(map(str, ids))}]", host.rank, body, (ids, grid), launch)
            launch.waiting.append(cta)
        self.policy.random.shuffle(launch.waiting)  # hardware promises no start order
        self._start_ctas(launch)
        self.wait_until(lambda: not launch.waiting and not launch.live, f"kernel {name}@{host.rank} to end")

    def before_access(self, actor: Actor, access: MemoryAccess) -> None:
        """Switch before a kernel's memory access; park first when the actor has been polling the word."""
        if actor.is_polling(access):
            actor.parked = True
            words = (f"{self.name_of(address)} == {word}" for address, word in actor.words.items())
            actor.waits_for = f"{', '.join(words)} to change"
        self._switch(actor, str(access))

    def after_access(self, actor: Actor, access: MemoryAccess) -> None:
        """Keep the books."""
        self._version += not access.reads_only
        actor.note(access)

    def fail(self, actor: Actor, text: str) -> ScheduleError:
        """End the schedule with a `ScheduleError`, which the caller raises to leave the actor."""
        error = ScheduleError(self._message(f"{actor.name} {text}"))
        self._failure = self._failure or (actor, error)  # the interpreter may wrap what is raised inside a kernel
        return error

    def name_of(self, address: int) -> str:
        """A watched word by name and index."""
        if address not in self._names:
            self._names[address] = self._find_name(address)
        return self._names[address]

    def _find_name(self, address: int) -> str:
        for name, (tensor, buffer) in self._watched.items():
            offset = address - tensor.data_ptr()
            if 0 <= offset < buffer.nbytes:
                index = np.unravel_index(offset // tensor.element_size(), tensor.shape)
                return f"{name}[{', '.join(map(str, index))}]"
        return "an unnamed word"

    # ---- the loop -------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        idle_rounds = 0
        while self._actors:
            ready = [actor for actor in self._actors if not (actor.parked and actor.blocked(self._version))]
            if ready:
                version = self._version
                self._resume(self.policy.choose(ready))
                idle_rounds = 0 if self._version != version else idle_rounds
                continue
            pollers = [actor for actor in self._actors if actor.predicate is None]
            if not pollers or (idle_rounds >= CONFIRM_ROUNDS and not self.spin):
                blocked = (f"{actor.name} waits for {actor.waits_for}" for actor in reversed(self._actors))
                raise Deadlock(self._message(f"deadlock, blocked: {'; '.join(blocked)}"))
            idle_rounds += 1
            for actor in pollers:
                self._resume(actor)

    def _resume(self, actor: Actor) -> None:
        self.steps += 1
        if self.steps > self.step_limit:
            raise StepLimit(self._message(f"no end after {self.step_limit} steps"))
        actor.parked = False
        if actor.program is not None:
            self._hooks.set_program(*actor.program)
        actor.greenlet.switch()
        if self._failure is not None:
            failed, error = self._failure
            if isinstance(error, ScheduleError):
                raise error
            raise ScheduleError(self._message(f"{failed.name} raised {type(error).__name__}: {error}")) from error

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
        self._version += 1
        self._actors.remove(actor)
        self._record(f"{actor.name}: end")
        if actor.launch is not None:
            actor.launch.live -= 1
            self._start_ctas(actor.launch)

    def _start_ctas(self, launch: Launch) -> None:
        while launch.waiting and (self.resident is None or launch.live < self.resident):
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
            while actor.greenlet:  # started and not ended; one that cleans up may wait once more
                actor.greenlet.throw(GreenletExit)
        self._actors.clear()
        self._by_greenlet.clear()

    def _note_python_writes(self) -> bool:
        """Compare the watched bytes with the last look. Without watched tensors every Python step counts as a write."""
        now = b"".join(self._buffers)  # 2.4 us for 90 tensors of some words; a checksum of each took 40
        wrote, self._seen_bytes = now != self._seen_bytes or not self._watched, now
        self._version += wrote
        return wrote

    def _record(self, what: str) -> None:
        self._trace.append(what)
        self.digest = zlib.crc32(what.encode(), self.digest)

    def _message(self, text: str) -> str:
        latest = "\n  ".join(self._trace)
        return f"seed {self.seed} ({self.policy.name}, step {self.steps}): {text}\nlatest steps:\n  {latest}"


@contextmanager
def _without_collector() -> Iterator[None]:
    """No search for garbage inside: it would run finalizers in the middle of a step, at places that no seed decides."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
