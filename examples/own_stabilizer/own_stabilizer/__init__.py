"""A stabilizer in a package of its own."""
