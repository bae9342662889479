"""Arrays: operations, backends, memory, element types, random numbers."""
