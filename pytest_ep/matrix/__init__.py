"""Which cells there are, and which of them run."""
