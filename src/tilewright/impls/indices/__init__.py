"""Operators with an index: scatters, gathers, and sums of rows."""
