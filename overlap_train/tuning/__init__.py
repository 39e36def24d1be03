"""Which method is fastest where: measured on all ranks by `overlap-train tune`, kept on disk, used by `auto`.

The lower half (passes.py, table.py) is what every process of a training job reads; the upper half (measure.py, command.py)
stands on the benchmarks and runs only when it is asked to.
"""
