"""The state of a process group: its domain, the registry of all domains, and CUDA graphs."""
