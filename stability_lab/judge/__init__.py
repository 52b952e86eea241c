"""Verdicts on series of numbers, in pure numpy, the same for a running and a finished run."""
