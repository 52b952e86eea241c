"""Files that are replaced whole, and locks."""
