"""A decoder-only GPT, written once, whose seams stabilizers fill."""
