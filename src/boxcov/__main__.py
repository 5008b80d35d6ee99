"""``python -m boxcov``."""

from boxcov.cli.app import main

main()
