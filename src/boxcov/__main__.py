"""``python -m boxcov``."""

from boxcov.cli import main

main()
