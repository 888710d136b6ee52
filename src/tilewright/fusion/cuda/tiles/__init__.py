"""Kernels that reduce dims that are no rows: blocks walk tiles of the space."""
