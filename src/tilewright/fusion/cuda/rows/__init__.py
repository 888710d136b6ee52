"""Kernels that reduce rows, and those that also add up over all rows."""
