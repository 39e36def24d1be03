"""How a seed turns into a choice of the next actor.

Drawing uniformly keeps all actors abreast of each other, which hides the bugs that need one rank a whole call behind.
So the seed also chooses one of three policies:

    weighted      each actor has a speed, log-uniform over 1/64..1; the next one is drawn by speed
    priorities    strict priorities; now and then the running actor drops to the lowest (after "probabilistic
                  concurrency testing", Burckhardt et al., ASPLOS 2010)
    slow ranks    as priorities, but all actors of a rank share its place, so whole ranks fall behind
"""

from __future__ import annotations

import random
from typing import Protocol


class Schedulable(Protocol):
    """What a policy needs to know about an actor."""

    rank: int


class Policy:
    """Seeded choice among the actors that can move; subclasses implement `enroll` and `choose`."""

    name = ""

    def __init__(self, rng: random.Random) -> None:
        self.random = rng

    def enroll(self, actor: Schedulable) -> None:
        """Give a new actor its speed or priority."""
        raise NotImplementedError

    def choose(self, ready: list) -> object:
        """The actor that moves next."""
        raise NotImplementedError


class Weighted(Policy):
    name = "weighted"

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._speed: dict[object, float] = {}

    def enroll(self, actor: Schedulable) -> None:
        self._speed[actor] = 2.0 ** self.random.uniform(-6, 0)

    def choose(self, ready: list) -> object:
        return self.random.choices(ready, [self._speed[actor] for actor in ready])[0]


class Priorities(Policy):
    name = "priorities"

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._priority: dict[object, tuple[float, float]] = {}
        self._lowest = 0.0
        self._change = rng.choice([1 / 20, 1 / 100, 1 / 500])

    def enroll(self, actor: Schedulable) -> None:
        self._priority[actor] = (1.0, self.random.random())

    def choose(self, ready: list) -> object:
        best = max(ready, key=self._priority.__getitem__)
        if self.random.random() < self._change:
            self._demote(best)
        return best

    def _demote(self, actor: Schedulable) -> None:
        self._lowest -= 1.0
        self._priority[actor] = (self._lowest, 0.0)


class SlowRanks(Priorities):
    name = "slow ranks"

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._rank: dict[int, float] = {}

    def enroll(self, actor: Schedulable) -> None:
        place = self._rank.setdefault(actor.rank, 1.0 + self.random.random())
        self._priority[actor] = (place, self.random.random())

    def _demote(self, actor: Schedulable) -> None:
        self._lowest -= 1.0
        self._rank[actor.rank] = self._lowest
        for other, (_, inner) in list(self._priority.items()):
            if other.rank == actor.rank:
                self._priority[other] = (self._lowest, inner)


def policy_of_seed(seed: int) -> Policy:
    """The policy and its random numbers; both are functions of the seed."""
    kind = (Weighted, Priorities, SlowRanks)[seed % 3]
    return kind(random.Random(seed))
