"""`overlap-train tune`: which method is fastest for a model's linears, measured on these ranks and kept for `auto`."""
