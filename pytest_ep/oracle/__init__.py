"""What an exchange must bring and return, and the verdict on what it did."""
