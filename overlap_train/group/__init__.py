"""The state of a process group: slots, signals, waits, the copy engine, errors, symmetric memory, CUDA graphs."""
