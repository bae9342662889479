"""Training runs: configuration, loop, what is printed and written."""
