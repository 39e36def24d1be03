"""What all pictures share: colours and names of things, bars, lanes of time, and which machine they are of.

Benchmark and recipes draw with it.
"""
