"""The two kinds of picture: bars of a ratio (bars.py), and a time axis of GPU work (lanes.py), in one look (style.py).

Benchmark and recipes draw with it.
"""
