"""The overlap domains of this process, one a process group; how peers hear that it ends; and operators inside a CUDA graph.

The device counts epochs, so that a replay sends new ones. But a graph uses the same slots at every replay, and calls before and
after it do not know which ones (docs/design.md, rule 3). Therefore a graph begins and ends with a barrier of signals, 10
microseconds each.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ..config import OverlapConfig, check_type, flag_name
from ..ranks.peers import UNCAUGHT
from .domain import OverlapDomain, barrier
from .signals import Tag

# Settings that all calls of a group share.
DOMAIN_WIDE = (
    "provider", "symmetric_mib", "timeout_s", "node_ranks", "network", "network_sms", "reduce_sms", "tuning_dir",
)  # fmt: skip

_domains: dict[dist.ProcessGroup, OverlapDomain] = {}
# Of two threads one makes a group's domain: ranks count how many they have made (Agreement).
_making = threading.RLock()


def domain_of(group: dist.ProcessGroup, config: OverlapConfig | None, device: torch.device) -> OverlapDomain:
    """The domain of `group`, made at its first use. Symmetric memory is allocated when the first operator asks for it.
    ValueError: no group, this process is not in it, another device, or one of DOMAIN_WIDE differs from the domain's."""
    domain = _domains.get(group)
    if domain is None:
        check_type(config)
        if group is None:  # as torch calls the group of all ranks, which tensor parallelism rarely means
            raise ValueError(
                "group=None: pass the tensor-parallel group, or that of experts; of all ranks it is "
                "torch.distributed.group.WORLD, once init_process_group has made it"
            )
        if not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"group={group!r} is a {type(group).__name__}; it must be a torch.distributed.ProcessGroup, which "
                f"mesh['tp'].get_group() gives of a DeviceMesh"
            )
        if device.type not in ("cpu", "cuda"):  # a domain there would be the group's until shutdown()
            raise ValueError(
                f"input is on {device}; operators run on cuda and cpu; move input and weight there first (meta: to_empty)"
            )
        if dist.get_rank(group) < 0:
            raise ValueError(
                f"group={group}: rank {dist.get_rank()} is not a member; pass a group that contains this rank"
            )
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            raise ValueError(
                f"input is on {device}, the current device is {torch.cuda.current_device()}; set_device first"
            )
        with _making:
            _tell_at_the_end()
            domain = _domains.get(group) or OverlapDomain(group, config or OverlapConfig(), device)
            _domains[group] = domain
    _check_same(domain, group, config, device)
    return domain


def tell_peers(error: BaseException) -> None:
    """Let the peers of all groups hear that this process ends by an error."""
    for domain in list(_domains.values()):
        if not domain.closed:
            domain.agreement.peers.tell(error, "", UNCAUGHT)


@functools.cache
def _tell_at_the_end() -> None:
    """Let peers hear of an error that ends this process. Once, when its first domain is made."""
    hook = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, *rest: Any) -> Any:
        tell_peers(error)
        return hook(kind, error, *rest)

    sys.excepthook = tell
    multiprocessing.util.Finalize(None, _tell_at_exit, exitpriority=100)


def _tell_at_exit() -> None:
    """The same in a process of multiprocessing, which calls no excepthook: its error is on its way here, or the SystemExit that
    torch.multiprocessing.spawn raises for it."""
    error = sys.exception()
    error = error.__context__ if isinstance(error, SystemExit) else error
    if error is not None:
        tell_peers(error)


def _close_in_child() -> None:
    """A forked process has no copy engine, and is not the rank: what it raises is no peer's concern."""
    for domain in _domains.values():
        domain.closed = True


os.register_at_fork(after_in_child=_close_in_child)


def made_domain(group: dist.ProcessGroup) -> OverlapDomain | None:
    """The domain of `group` if an operator has made it. Does not communicate."""
    return _domains.get(group)


def _check_same(
    domain: OverlapDomain, group: dist.ProcessGroup, config: OverlapConfig | None, device: torch.device
) -> None:
    if device != domain.device:
        raise ValueError(
            f"input is on {device}, but the group's symmetric memory is on {domain.device}; use one device"
        )
    if group.size() != domain.world_size:
        raise ValueError(f"group has {group.size()} ranks, its symmetric memory {domain.world_size}; call shutdown()")
    if config is None or config is domain.config:
        return
    check_type(config)
    for name in DOMAIN_WIDE:
        mine, theirs = getattr(config, name), getattr(domain.config, name)
        if mine != theirs:
            error = ValueError(
                f"{name}={mine!r}, but the group's domain was made with {theirs!r} ({flag_name(name)}); call shutdown() to "
                f"change it"
            )
            domain.fault.tell(error, f"settings of the group: {name}", begun=False)
            raise error


def check() -> None:
    """Raise OverlapTimeoutError if a wait of this process has given up. Every operator checks before and after, so this is needed
    after the last operator of a program and after replays of a CUDA graph, which call no operator."""
    for domain in list(_domains.values()):  # another thread may make one meanwhile
        domain.fault.check()


def shutdown() -> None:
    """Free all symmetric memory. Collective over every group that was used; call it before destroy_process_group.

    Raises:
        RuntimeError: an operator is under way, in another thread or in this one, as in a signal handler. Nothing has ended then.
    """
    # In one order on all ranks, which may have used their groups in different orders.
    domains = sorted(_domains.values(), key=lambda domain: domain.group.group_name)
    providers = {domain.heap.provider for domain in domains if domain.heap is not None}
    errors: list[Exception] = []
    with ExitStack() as held:
        for domain in domains:
            # Also where a signal handler runs in the middle of an operator: what that goes on with would be gone.
            if domain.in_use._is_owned() or not domain.in_use.acquire(False):  # type: ignore[attr-defined]
                raise RuntimeError(
                    "shutdown: an operator is under way, in another thread or, where a signal handler calls shutdown, in this "
                    "one; call it when the operator has returned"
                )
            held.callback(domain.in_use.release)
        _domains.clear()
        for domain in domains:
            try:
                domain.close()
            except Exception as error:  # the others end all the same
                errors.append(error)
        if errors:  # NVSHMEM would wait for the rank for which a domain could not be closed
            raise errors[0]
        if "nvshmem" in providers:
            from ..symmetric.nvshmem import finalize

            finalize()


@contextmanager
def graphed(group: dist.ProcessGroup) -> Iterator[None]:
    """Bracket of all operators of `group` that are captured into one CUDA graph.

        with torch.cuda.graph(graph), overlap_train.graphed(group):
            y = model(x)
            y.backward(dy)

    Keep this order: a capture that begins inside `graphed` would have no barriers. All ranks capture the same operators, in one
    stream. They replay the graph equally often, in the stream of the eager calls or ordered with them by events. Run the same
    twice before capturing: then kernels are compiled and symmetric memory is there. A replay calls no operator; `check()` after
    it raises what a wait in it has found. Calls of the method collective are captured as PyTorch captures NCCL's.

    Raises:
        ValueError: no operator of this group has run yet.
    """
    domain = made_domain(group)
    if domain is None:
        raise ValueError(
            "graphed: no operator of this group has run yet; run what is captured twice before capturing it"
        )
    domain.graphed = True
    try:
        # Without a heap all calls are collectives, and so are all that can be captured across nodes.
        uses_slots = domain.heap is not None and domain.span.graphs
        with _between_barriers(domain) if uses_slots else nullcontext():
            yield
        # Not before: a capture that failed leaves no graph. One of collectives holds no address of the heap.
        domain.captured |= domain.is_capturing() and uses_slots
    finally:
        domain.graphed = False


@contextmanager
def _between_barriers(domain: OverlapDomain) -> Iterator[None]:
    workspace = domain.workspace
    before = copy.deepcopy(workspace.use)
    try:
        barrier(domain, Tag("graph/begin", "barrier"))
        yield
        barrier(domain, Tag("graph/end", "barrier"))
    except BaseException:
        before.invalidate()
        raise
    finally:
        # Capturing runs nothing, not even barriers: eager calls before the first replay go on where they were.
        workspace.use = before


def forget_graphs(group: dist.ProcessGroup) -> None:
    """Allow symmetric memory to be replaced again. All ranks call it, and none replays a graph that was captured before."""
    domain = made_domain(group)
    if domain is not None:
        domain.captured = False


def is_graphed(group: dist.ProcessGroup) -> bool:
    """Whether operators of this group are called inside `graphed`."""
    domain = made_domain(group)
    return domain is not None and domain.graphed
