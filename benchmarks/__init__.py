"""Benchmarks, each run from the root of the checkout: `python -m benchmarks.step`. The README lists them."""
