"""A kernel is loaded when it runs for the first time, and CUDA may put that off until the GPU has nothing to do.

So no kernel may be loaded while one of this rank waits for what its host, or that of a peer, has yet to enqueue.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.simulated_nodes import NodeSimulation
from tests.protocol.simulated_ranks import core
from tests.protocol.test_interleaving_nodes import METHODS, PROBLEMS, backward


def with_loads(machine: NodeSimulation, build: Build) -> Build:
    """The same problem where the host waits for its GPU before it launches what it has not launched yet."""

    def loading(scheduler: Scheduler) -> Callable[[], None]:
        cache, loaded = core("gpu.launch").LaunchCache, set[Hashable]()
        run = cache.run

        def load_and_run(launches: Any, key: Hashable, values: tuple[int, ...], describe: Any, *told: Any) -> None:
            launch, rank = describe(*told), scheduler.running_actor().rank
            dtypes = tuple(getattr(argument, "dtype", None) for argument in launch.arguments.values())
            binary = (rank, launch.kernel, dtypes, *sorted(launch.constants.items()))
            if binary not in loaded:
                loaded.add(binary)
                for stream in machine.gpus[rank].streams:
                    stream.synchronize()
            run(launches, key, values, lambda: launch)

        scheduler.patch(cache, "run", load_and_run)
        return build(scheduler)

    return loading


@pytest.mark.parametrize(("world", "node_ranks"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("operator", PROBLEMS)
def test_operators_pass(operator: str, method: str, world: int, node_ranks: int) -> None:
    machine = NodeSimulation(world, node_ranks=node_ranks)
    assert_passes(with_loads(machine, PROBLEMS[operator](method, machine, 2)), range(1))


@pytest.mark.parametrize("puts", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_backward_passes(method: str, puts: bool) -> None:
    machine = NodeSimulation(4, node_ranks=2, puts=puts, method=method)
    assert_passes(with_loads(machine, backward(machine)), range(1))
