"""The mirror in Weights & Biases."""
