"""Whole rows that an index sends to places: sums of rows, their extremes, their last write."""
