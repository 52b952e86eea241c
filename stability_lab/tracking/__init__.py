"""What a run leaves behind: its own files, which are the truth, and a mirror of them in W&B."""
