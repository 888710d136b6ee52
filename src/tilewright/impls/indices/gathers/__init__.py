"""Elements and rows that an index fetches."""
