"""What shutdown() ends, without processes or devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from overlap_train import registry, shutdown
from overlap_train.symmetric import nvshmem


class Domain:
    """As OverlapDomain, whose heap is gone once it is closed."""

    def __init__(self, provider: str | None) -> None:
        self.heap = None if provider is None else SimpleNamespace(provider=provider)

    def close(self) -> None:
        self.heap = None


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
