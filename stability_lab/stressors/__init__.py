"""Stressors: what makes a small model fail on purpose. Each is a file of `configs/stressor` that sets keys, and says
what they provoke."""
