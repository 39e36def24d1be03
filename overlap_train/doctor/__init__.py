"""overlap-train doctor: is this machine, this installation and this job fit for overlapped linears, and if not, where and why.

Importing it touches no device.
"""
