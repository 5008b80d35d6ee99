"""``python -m boxcov`` and the ``boxcov`` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line; SIGINT while it is imported ends it without a traceback."""
    # read when torch is imported: threads that spin while they wait take the time of those that
    # compute as soon as the cores are busy with something else
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from boxcov.cli.app import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
