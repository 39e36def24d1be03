"""What the ranks of a group tell each other outside of operators: in time, and by name."""
