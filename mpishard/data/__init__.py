"""Token files, the order in which they are read, and the corpus that is there without a download."""
