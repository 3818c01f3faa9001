"""What a run leaves: rows, files, tables."""
