"""Reads run directories and turns them into tables and figures; imports no torch."""
