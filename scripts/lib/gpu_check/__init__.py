"""What scripts/gpu_check runs: one module for each kind of part, the table of parts, and who runs them."""
