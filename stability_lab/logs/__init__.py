"""Anybody's training log, whatever its format, as a log that the judge reads."""
