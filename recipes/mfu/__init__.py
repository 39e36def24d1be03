"""The parts of recipes/compare_mfu.py; `torchrun recipes/compare_mfu.py` puts this package's folder on sys.path."""
