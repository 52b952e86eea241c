"""What is minimised: next-token cross-entropy and the auxiliary terms that stabilizers add."""
