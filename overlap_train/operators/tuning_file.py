"""The measurements of a domain in the tuning folder. Rank 0 reads and writes them for all: home folders differ."""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.domain import OverlapDomain
from ..select import table
from ..select.table import Key, Table, Winner
from ..warn import warn_user


def key_of(domain: OverlapDomain) -> Key:
    """What measurements in a domain depend on."""
    return table.key_of(domain.device, domain.world_size, domain.topology.nodes, domain.config.network)


def read(domain: OverlapDomain) -> Table | None:
    """The tuning table that rank 0 finds, None on other ranks. Collective at a group's first call, which finds the nodes."""
    key = key_of(domain)
    return None if domain.rank else table.read(domain.config.tuning_dir, key)


def save(domain: OverlapDomain, found: Sequence[Winner]) -> str:
    """Store winners. Returns where they are, in words; a folder that cannot be written is a warning."""
    folder = domain.config.tuning_dir
    try:
        return f"kept in {table.save(folder, key_of(domain), found)}"
    except OSError as error:
        warn_user(f"tuning_dir={folder!r} cannot be written ({error}); name another folder")
        return "for this run only"
