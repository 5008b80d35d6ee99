"""``python -m boxcov`` and the ``boxcov`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; SIGINT while it is imported ends it without a traceback."""
    try:
        from boxcov.cli.app import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
