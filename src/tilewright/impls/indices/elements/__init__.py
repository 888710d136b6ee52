"""Separate elements that an index sends to places: scatters, and sums of one column."""
