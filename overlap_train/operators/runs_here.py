"""Why a call cannot run on this rank as it is: by its plan (planning/refusals.py), or by the measurements that it names."""

from __future__ import annotations

from ..config import OverlapConfig, flag_name
from ..planning.plan import Plan
from ..planning.refusals import why_not, why_not_across_nodes
from ..runtime.domain import OverlapDomain
from . import portable


def why_not_here(plan: Plan, domain: OverlapDomain) -> str | None:
    """Why a plan cannot run in a domain, or None."""
    interpreted = domain.device.type != "cuda" and portable.is_interpreted()
    return why_not(plan, domain.device, interpreted) or why_not_across_nodes(plan, domain.nodes.problem)


def other_table(domain: OverlapDomain, config: OverlapConfig) -> str | None:
    """What is wrong with a call whose measurements are not those that its domain has read, or None."""
    if config.tuning_dir == domain.config.tuning_dir:
        return None
    return (
        f"tuning_dir={config.tuning_dir!r}, but the group's domain was made with {domain.config.tuning_dir!r} "
        f"({flag_name('tuning_dir')}); call shutdown() to change it"
    )
