"""Memory that ranks of a group share (heap.py), and what they tell each other outside the hot path (agreement.py, peers.py)."""

from .heap import SymmetricHeap, heap_by, open_heap, resolve_provider

__all__ = ["SymmetricHeap", "heap_by", "open_heap", "resolve_provider"]
