"""Which method runs a pass, on which GPU, and what each takes: measured (table.py, autotune.py), or estimated (system.py,
cost.py)."""
