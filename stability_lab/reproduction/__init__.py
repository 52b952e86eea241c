"""Published claims, the sweeps that test them, and the verdicts."""
