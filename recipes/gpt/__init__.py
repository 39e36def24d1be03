"""The parts of recipes/pretrain_gpt.py; `torchrun recipes/pretrain_gpt.py` puts this package's folder on sys.path."""
