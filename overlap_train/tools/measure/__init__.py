"""Measuring on several ranks: who takes part, operands, timing, comparing results. Used by bench, tune and doctor."""
