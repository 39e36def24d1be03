"""`overlap-train tune`: its measurements make the table of overlap_train/planning/table.py. Training measures only under tune_steps
(operators/trials.py)."""
