"""MoE expert-parallel communication benchmarks as pytest cases."""

from pytest_ep.suite import EPSuite

__all__ = ["EPSuite"]
__version__ = "0.1.0"
