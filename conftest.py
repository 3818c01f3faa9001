"""Nothing here imports torch: the stock ``pytest-benchmark compare`` imports this file."""
