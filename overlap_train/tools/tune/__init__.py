"""`overlap-train tune`: its measurements make the table of overlap_train/planning/table.py. Training measures nothing, unless
tune_steps says so (operators/trials.py)."""
