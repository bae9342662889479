"""Measurements from outside: what the operating system says that processes hold, and PyTorch beside mpishard."""
