"""Kernels without reductions."""
