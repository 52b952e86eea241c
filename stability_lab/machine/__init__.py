"""What the lab asks of the machine that it runs on."""
