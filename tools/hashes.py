"""Write requirements with hashes from a report of pip: ``python tools/hashes.py FILE``.

The report comes from ``pip install --dry-run --report FILE``. Each distribution has one hash, that
of the file for this platform and Python. Part of ``make hashes``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def requirements(report: Mapping[str, Any]) -> list[str]:
    """Return one line per distribution, sorted by name; those installed from a folder are left out.

    >>> archive = {"url": "https://x/y.whl", "archive_info": {"hashes": {"sha256": "00ff"}}}
    >>> y = {"metadata": {"name": "y", "version": "1.0"}, "download_info": archive}
    >>> requirements({"install": [y]})
    ['y==1.0 --hash=sha256:00ff']
    """
    lines = []
    for entry in report["install"]:
        info, about = entry["download_info"], entry["metadata"]
        if "dir_info" not in info:
            sha256 = info["archive_info"]["hashes"]["sha256"]
            lines.append(f"{about['name']}=={about['version']} --hash=sha256:{sha256}")
    return sorted(lines, key=str.lower)


if __name__ == "__main__":
    print("\n".join(requirements(json.loads(Path(sys.argv[1]).read_text()))))
