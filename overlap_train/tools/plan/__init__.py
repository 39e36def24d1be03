"""`overlap-train plan`: what overlap brings on a machine that need not be here, by simulating what would run there."""
