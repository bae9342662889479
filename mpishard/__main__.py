"""``python -m mpishard`` is the program ``mpishard``."""

from mpishard.cli import main

main()
