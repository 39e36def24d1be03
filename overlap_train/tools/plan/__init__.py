"""`overlap-train plan`: what overlap brings on a machine that need not be here, by the estimate that `auto` goes by
(select/cost.py)."""
