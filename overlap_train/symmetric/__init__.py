"""Memory that ranks of a group share."""

from .heap import SymmetricHeap, heap_by, open_heap, resolve_provider

__all__ = ["SymmetricHeap", "heap_by", "open_heap", "resolve_provider"]
