"""Overlap in a built model: turned on, reported as a table, counted, and captured into CUDA graphs."""
