"""The judge in anybody's own training loop."""
