"""`overlap-train doctor`: are this machine, this installation and this job fit for overlapped linears; if not, where and why."""
