"""What one rank lacks while symmetric memory is opened raises on all of them: a peer would wait. Libraries are stand-ins."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train.ranks.agreement import OverlapMismatchError, OverlapTimeoutError, on_all_ranks
from overlap_train.ranks.bounded import Callers
from overlap_train.symmetric import SymmetricHeap, nvshmem, open_heap, torch_symm

CPU = torch.device("cpu")
START, ALLOCATE, OPEN = (f"overlap_train: {step} NVSHMEM{memory}" for step, memory in (
    ("start", ""), ("allocate", " memory"), ("open", " memory"))
)  # fmt: skip
OPEN_TORCH = "overlap_train: open torch symmetric memory"


class OwnError(Exception):
    """Of a library."""


class Ranks:
    """The Agreement of rank 0 of two. told: what it has told the other one. The other one raises `theirs` in step `at`."""

    rank, world_size, group = 0, 2, SimpleNamespace(group_name="group")

    def __init__(self, at: str = "", theirs: Exception | None = None) -> None:
        self.at, self.theirs = at, theirs
        self.told: list[tuple[str, str | None]] = []
        self.exchanged: list[Any] = []

    def all_succeed(self, error: str | None, what: str) -> None:
        self.told.append((what, error))
        if error is not None:
            raise RuntimeError(f"{what}: rank 0: {error}")
        if self.theirs is not None and what == self.at:
            raise self.theirs

    def exchange(self, value: Any, what: str) -> list[Any]:
        self.exchanged.append(value)
        return [value, None]

    def barrier(self, what: str) -> None: ...

    def callers(self, members: Any = None) -> Callers:
        return Callers(0, (0, 1), 60.0)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for nvshmem.core, which is there to be imported, and NVSHMEM not yet initialised."""
    found = ModuleType("nvshmem.core")
    answers = {"get_unique_id": "uid", "bytetensor": torch.ones(16, dtype=torch.uint8)}
    answers |= dict.fromkeys(("init", "free_tensor", "finalize"))
    for name, answer in answers.items():
        setattr(found, name, mock.Mock(return_value=answer))
    found.get_peer_tensor = lambda memory, rank: memory  # type: ignore[attr-defined]
    package, cuda = ModuleType("nvshmem"), ModuleType("cuda.core")
    package.core = found  # type: ignore[attr-defined]
    cuda.Device = mock.Mock()  # type: ignore[attr-defined]
    for module in (package, found, cuda):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(nvshmem, "_worlds", [])
    monkeypatch.setattr(nvshmem, "_ranks", lambda group, members: tuple(members))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    found.limits = limits_of(nvshmem, monkeypatch)  # type: ignore[attr-defined]
    return found


def limits_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Callers]]:
    """The calls that the module makes within a time limit, and by whom."""
    limits: list[tuple[str, Callers]] = []

    @contextlib.contextmanager
    def bounded(what: str, callers: Callers) -> Iterator[None]:
        limits.append((what, callers))
        yield

    monkeypatch.setattr(module, "bounded", bounded)
    return limits


def opened(ranks: Any) -> SymmetricHeap:
    return nvshmem.open_nvshmem_heap(ranks, 16, CPU)


def test_what_one_rank_raised_raises_on_all_in_its_words() -> None:
    assert on_all_ranks(lambda: "made", Ranks(), "open") == "made"  # type: ignore[arg-type]
    for failure, text in ((OwnError("no link"), "no link"), (OwnError(), r"OwnError\(\)")):
        ranks = Ranks()
        with pytest.raises(RuntimeError, match=f"open: rank 0: {text}"):
            on_all_ranks(mock.Mock(side_effect=failure), ranks, "open")  # type: ignore[arg-type]
        assert len(ranks.told) == 1
    with pytest.raises(RuntimeError, match="rank 1: no link"):
        on_all_ranks(list, Ranks("open", RuntimeError("rank 1: no link")), "open")  # type: ignore[arg-type]


def test_a_provider_that_cannot_serve_one_rank_is_refused_on_all() -> None:
    """As where one host lacks nvshmem4py, or one rank's tensors are elsewhere."""
    choose = "overlap_train: choose the provider of symmetric memory"
    ranks: Any = Ranks()
    with pytest.raises(RuntimeError, match=f"{choose}: rank 0: provider='torch' with tensors on cpu"):
        open_heap(ranks, 16, "torch", CPU)
    with pytest.raises(RuntimeError, match="rank 1: nvshmem4py is not installed"):
        open_heap(Ranks(choose, RuntimeError("rank 1: nvshmem4py is not installed")), 16, "host", CPU)  # type: ignore[arg-type]


def test_nvshmem_starts_allocates_and_opens_by_all_ranks(core: Any) -> None:
    """Each collective call within a time limit: nothing could interrupt it."""
    ranks = Ranks()
    opened(ranks).close()
    assert core.limits == [(what, ranks.callers()) for what in (START, ALLOCATE, "overlap_train: free NVSHMEM memory")]
    assert ranks.told == [(START, None), (START, None), (ALLOCATE, None), (OPEN, None)]
    assert core.init.call_args.kwargs["uid"] == "uid" and nvshmem._worlds == [ranks.callers()]
    nvshmem.finalize()
    assert core.limits[3:] == [("overlap_train: end NVSHMEM", ranks.callers())] and core.finalize.called


FAILURES: dict[str, Callable[[Any], Any]] = {  # by what the others are told
    "nvshmem": lambda core: sys.modules.update({"nvshmem": None, "nvshmem.core": None}),  # type: ignore[dict-item]
    "no network": lambda core: core.get_unique_id.configure_mock(side_effect=OwnError("no network")),
    "init refused": lambda core: core.init.configure_mock(side_effect=OwnError("init refused")),
    r"NVSHMEM world has ranks \[0, 4\]": lambda core: nvshmem._worlds.append(Callers(0, (0, 4), 60.0)),
}


@pytest.mark.parametrize("text", FAILURES)
def test_a_rank_that_cannot_start_nvshmem_tells_the_others(core: Any, text: str) -> None:
    FAILURES[text](core)
    worlds, ranks = list(nvshmem._worlds), Ranks()
    with pytest.raises(RuntimeError, match=f"{START}: rank 0: .*{text}"):
        opened(ranks)
    assert nvshmem._worlds == worlds, "this rank has joined none"


def test_a_world_that_a_peer_could_not_join_is_kept(core: Any) -> None:
    """NVSHMEM is initialised in this process, which can have no other world."""
    ranks = Ranks(START, RuntimeError("rank 1: init refused"))
    core.get_unique_id.side_effect = lambda: ranks.__setattr__("at", "")  # the peer still agrees to start
    core.init.side_effect = lambda **_: ranks.__setattr__("at", START)
    with pytest.raises(RuntimeError, match="rank 1: init refused"):
        opened(ranks)
    assert nvshmem._worlds == [ranks.callers()]


def test_nobody_starts_nvshmem_for_a_rank_that_cannot(core: Any) -> None:
    with pytest.raises(RuntimeError, match="rank 1: no nvshmem"):
        opened(Ranks(START, RuntimeError("rank 1: no nvshmem")))
    assert not core.init.called and not nvshmem._worlds


def test_a_node_that_has_its_world_already_meets_one_that_starts(core: Any) -> None:
    for _ in range(2):
        ranks = Ranks()
        opened(ranks)
        assert len(ranks.told) == 4 and len(ranks.exchanged) == 1
    assert core.init.call_count == core.get_unique_id.call_count == 1


def test_a_peer_that_is_not_mapped_is_told_and_the_memory_freed(core: Any) -> None:
    core.get_peer_tensor = mock.Mock(side_effect=OwnError)
    with pytest.raises(RuntimeError, match=f"{OPEN}: rank 0: group: rank 1 has no peer access"):
        opened(Ranks())
    assert core.free_tensor.called


def test_memory_that_another_rank_could_not_map_is_freed(core: Any) -> None:
    with pytest.raises(RuntimeError, match="rank 1: no access"):
        opened(Ranks(OPEN, RuntimeError("rank 1: no access")))
    assert core.free_tensor.called


@pytest.mark.parametrize("kind", [OverlapTimeoutError, OverlapMismatchError])
def test_memory_is_not_freed_without_the_others(core: Any, kind: type[Exception]) -> None:
    """NVSHMEM frees by all ranks together. One that does not come, or is elsewhere, would be waited for."""
    with pytest.raises(kind):
        opened(Ranks(OPEN, kind("rank 1")))
    assert not core.free_tensor.called


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for torch's symmetric memory and for the process group of a node."""
    import torch.distributed._symmetric_memory as symmetric_memory

    handle = SimpleNamespace(
        world_size=2, rank=0, get_buffer=lambda rank, shape, dtype: torch.zeros(shape, dtype=dtype)
    )
    found = SimpleNamespace(rendezvous=mock.Mock(return_value=handle), group=mock.Mock())
    monkeypatch.setattr(symmetric_memory, "empty", lambda nbytes, **_: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(symmetric_memory, "rendezvous", found.rendezvous)
    monkeypatch.setattr(torch_symm, "_group_of", found.group)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    found.limits = limits_of(torch_symm, monkeypatch)
    return found


def test_the_rendezvous_of_torch_has_a_time_limit(torchs: Any) -> None:
    torch_symm.open_torch_heap(Ranks(), 16, CPU, range(2))  # type: ignore[arg-type]
    assert torchs.limits == [(OPEN_TORCH, Ranks().callers())]


@pytest.mark.parametrize("step", ["group", "rendezvous"])
def test_a_rank_that_torch_cannot_connect_tells_the_others(torchs: Any, step: str) -> None:
    getattr(torchs, step).side_effect = OwnError(f"no {step}")
    with pytest.raises(RuntimeError, match=f"{OPEN_TORCH}: rank 0: no {step}"):
        torch_symm.open_torch_heap(Ranks(), 16, CPU, range(2))  # type: ignore[arg-type]


def test_nobody_waits_in_torchs_rendezvous_for_a_rank_without_a_group(torchs: Any) -> None:
    with pytest.raises(RuntimeError, match="rank 1: no group"):
        torch_symm.open_torch_heap(Ranks(OPEN_TORCH, RuntimeError("rank 1: no group")), 16, CPU, range(2))  # type: ignore[arg-type]
    assert torchs.group.called and not torchs.rendezvous.called
