"""``python -m sensitivity.cli``: the same as the console script."""

from sensitivity.cli import main

main()
