"""Where text and token ids come from."""
