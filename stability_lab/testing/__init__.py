"""Checks for whoever adds to the lab, in this package or in one of their own. They need no pytest."""

from stability_lab.testing.stabilizer_checks import TINY, TINY_ENCODER, check_stabilizer

__all__ = ["TINY", "TINY_ENCODER", "check_stabilizer"]
