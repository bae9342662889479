"""What is wrong with a machine, an MPI or a launch, each with its remedy: ``mpishard doctor``."""
