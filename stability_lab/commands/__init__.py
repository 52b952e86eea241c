"""One file a sub-command."""
