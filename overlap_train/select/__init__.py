"""Which method runs a pass, and what it costs."""
