"""Requirements with hashes, from what ``pip install --dry-run --report FILE`` would install: ``python tools/hashes.py FILE``, ``make hashes``.

One hash a distribution: that of the file for this platform and Python, which is what ``pip install --require-hashes --no-deps -r`` will take.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def requirements(report: Mapping[str, Any]) -> list[str]:
    """A line for each distribution, in the order of their names; those of a folder, as boxcov itself, are left out.

    >>> archive = {"url": "https://x/y.whl", "archive_info": {"hashes": {"sha256": "00ff"}}}
    >>> requirements({"install": [{"metadata": {"name": "y", "version": "1.0"}, "download_info": archive}]})
    ['y==1.0 --hash=sha256:00ff']
    """
    lines = []
    for entry in report["install"]:
        info, about = entry["download_info"], entry["metadata"]
        if "dir_info" not in info:
            lines.append(
                f"{about['name']}=={about['version']} --hash=sha256:{info['archive_info']['hashes']['sha256']}"
            )
    return sorted(lines, key=str.lower)


if __name__ == "__main__":
    print("\n".join(requirements(json.loads(Path(sys.argv[1]).read_text()))))
