"""The two kinds of picture, of benchmark and recipes: bars of a ratio, and a time axis of GPU work, in one look (style.py)."""
