"""`overlap-train launch`: a Slurm job (job.py), its script and its submission (script.py).

The .sbatch and .sh files here are links to launch/, for the wheel.
"""
