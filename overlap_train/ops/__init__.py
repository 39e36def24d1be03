"""The operators, one file each with all its methods, their plans, and the table from which a pass takes its engine."""
