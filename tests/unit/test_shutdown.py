"""What shutdown() ends, without processes or devices."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import pytest

from overlap_train import OverlapTimeoutError, shutdown
from overlap_train.group import registry
from overlap_train.group.domain import OverlapDomain
from overlap_train.symmetric import nvshmem


class Domain:
    """As OverlapDomain, whose heap is gone once it is closed."""

    def __init__(self, provider: str | None, name: str = "", closed: list[str] | None = None, late: str = "") -> None:
        self.heap = None if provider is None else SimpleNamespace(provider=provider)
        self.group = SimpleNamespace(group_name=name)
        self.in_use, self.idle = threading.RLock(), partial(OverlapDomain.idle, self)
        self._closed, self._late = closed, late

    def close(self) -> None:
        if self._late:
            raise OverlapTimeoutError(self._late)
        self.heap = None
        if self._closed is not None:
            self._closed.append(self.group.group_name)


@pytest.mark.parametrize(
    ("providers", "ends"), [(["nvshmem"], 1), (["torch", "nvshmem"], 1), (["torch"], 0), ([None], 0), ([], 0)]
)
def test_nvshmem_ends_where_a_heap_came_from_it(
    providers: list[str | None], ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(registry, "_domains", {number: Domain(provider) for number, provider in enumerate(providers)})
    monkeypatch.setattr(nvshmem, "finalize", lambda: ended.append("nvshmem"))
    shutdown()
    assert len(ended) == ends and not registry._domains


def test_nvshmem_does_not_wait_for_a_rank_that_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is collective, too, and nothing could interrupt it."""
    ended: list[str] = []
    domains = [Domain("nvshmem", late="rank 1 did not come"), Domain("nvshmem", "other", ended)]
    monkeypatch.setattr(registry, "_domains", dict(enumerate(domains)))
    monkeypatch.setattr(nvshmem, "finalize", lambda: ended.append("nvshmem"))
    with pytest.raises(OverlapTimeoutError, match="rank 1 did not come"):
        shutdown()
    assert ended == ["other"], "domains that can be closed are"


@pytest.mark.parametrize("where", ["in a signal handler", "in another thread"])
def test_it_is_refused_in_the_middle_of_an_operator(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operator goes on with would be gone: it would wait without end for a copy engine that has ended."""
    closed: list[str] = []
    domains = {name: Domain("host", name, closed) for name in ("first", "in an operator")}
    monkeypatch.setattr(registry, "_domains", domains)
    refused: list[str] = []

    def end() -> None:
        try:
            shutdown()
        except RuntimeError as error:
            refused.append(str(error))

    with domains["in an operator"].in_use:
        if where == "in a signal handler":
            end()
        else:
            (thread := threading.Thread(target=end)).start()
            thread.join()
    assert len(refused) == 1 and "an operator is under way" in refused[0]
    assert closed == [] and len(domains) == 2, "it goes on as before"
    shutdown()
    assert closed == ["first", "in an operator"]
