"""The parts of recipes/pretrain_gpt.py, which torchrun finds beside that file."""
