"""Bridges from other training frameworks to `overlap_train`; one folder for each, and the only code that imports it."""
