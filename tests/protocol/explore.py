"""Runs one problem under many seeds.

A problem is a function `build(scheduler) -> check`: it allocates memory, spawns actors, and returns what has to hold
afterwards. `check` raises AssertionError; failures come back as `ScheduleError`s whose message starts with the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.protocol.actors import ScheduleError
from tests.protocol.interleaving import Scheduler

Build = Callable[[Scheduler], Callable[[], None]]
_replayed: set[str] = set()  # kinds of problems, in this process


def run_seed(build: Build, seed: int, **options: object) -> Scheduler:
    """Run the schedule of one seed and its check. Options are those of `Scheduler`."""
    scheduler = Scheduler(seed, **options)
    check = build(scheduler)
    scheduler.run()
    try:
        check()
    except AssertionError as error:
        what = str(error).splitlines()[0]  # pytest adds addresses in the lines below
        raise ScheduleError(f"seed {seed} ({scheduler.policy.name}): wrong result: {what}") from error
    return scheduler


def failure_of(build: Build, seed: int, **options: object) -> ScheduleError | None:
    """The failure of one seed, None when it passes."""
    try:
        run_seed(build, seed, **options)
    except ScheduleError as error:
        return error
    return None


def failures(build: Build, seeds: Iterable[int], **options: object) -> dict[int, ScheduleError]:
    """The failures by seed."""
    outcomes = {seed: failure_of(build, seed, **options) for seed in seeds}
    return {seed: error for seed, error in outcomes.items() if error is not None}


def assert_passes(build: Build, seeds: Iterable[int], **options: object) -> None:
    """Run all seeds; the first failure is raised and names its seed."""
    for seed in seeds:
        run_seed(build, seed, **options)


def assert_caught(build: Build, seeds: Iterable[int], **options: object) -> ScheduleError:
    """Run seeds until one fails, and return the failure. AssertionError when none fails, or when a replay differs.

    Replayed is what fails after the first seed, and the first failure of each kind of problem: nine of ten faults fail with the
    first seed, and a replay costs as much again.
    """
    for number, seed in enumerate(seeds):
        error = failure_of(build, seed, **options)
        if error is not None:
            if number or build.__qualname__ not in _replayed:
                _replayed.add(build.__qualname__)
                replay = failure_of(build, seed, **options)
                assert str(replay) == str(error), f"seed {seed} does not replay:\n{error}\n--- replayed:\n{replay}"
            return error
    raise AssertionError("the planted fault was not caught by any seed")
