"""Transports with one fault each."""
