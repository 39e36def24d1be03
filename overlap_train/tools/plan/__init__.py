"""`overlap-train plan`: what overlap brings on a machine that need not be here, by simulating the schedule that would run there."""
