"""What the ranks exchange: routing, values, and one rank's share of a case."""
