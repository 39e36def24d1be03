"""How tests are shared out where pytest-xdist runs several at once (make test)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.script_server import ScriptServer

WAITING = ("test_agreement", "test_doctor", "test_faults", "test_first_calls", "test_told_at_once")


@pytest.fixture(scope="session")
def script_server() -> Iterator[ScriptServer]:
    """One process that those of user scripts and commands are forked from."""
    server = ScriptServer()
    yield server
    server.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that share something slow stay together: what a file makes for its tests, and the pool of Megatron processes, or the
    process that compiles kernels, for all files that use it. So do files that mostly wait: two at once would leave cores idle.
    Interleavings share nothing, and their files are the longest."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    shared = {item.path: name for item in items for name in ("workers", "compiling") if name in _fixtures(item)}
    for item in items:
        if item.path in shared:
            item.add_marker(pytest.mark.xdist_group(shared[item.path]))
        elif not item.path.name.startswith("test_interleaving"):
            item.add_marker(pytest.mark.xdist_group("waiting" if item.path.stem in WAITING else item.path.stem))


def _fixtures(item: pytest.Item) -> tuple[str, ...]:
    return tuple(getattr(item, "fixturenames", ()))
