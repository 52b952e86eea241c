"""Token ids on the disk: written, recognised, checked and mapped."""
