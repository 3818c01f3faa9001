"""The processes of a run, and their agreement."""
