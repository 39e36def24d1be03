"""`overlap-train launch`: describe a Slurm job (job.py), write it from launch/*.sbatch (script.py), submit it (submit.py).

The .sbatch and .sh files here are links to launch/, so that a wheel brings them along.
"""

from __future__ import annotations
