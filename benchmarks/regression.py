"""Fail if a ratio to the plain detector is 1.5 times the recorded one.

    python benchmarks/regression.py [--device cpu] [--record]

Ratios within one run do not depend on the machine's speed. --record writes the new record.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from boxcov.pipeline.bench import format_table, run
from boxcov.pipeline.options import BenchCommand

RECORD = Path(__file__).with_name("ratios.json")
WORSE = 1.5


def worsened(rows: list[dict[str, object]], record: dict[str, float]) -> list[str]:
    """Return messages for methods over the bound; the paper's own methods are exempt."""
    found = []
    for row in rows:
        known = record.get(_key(row))
        if known is not None and float(str(row["ratio"])) > WORSE * known:
            found.append(f"{_key(row)}: {row['ratio']:.2f} plain frames, {known:.2f} on record")
    return found


def _key(row: dict[str, object]) -> str:
    return f"{row['device']}, {row['method']}, samples {row['samples']}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    rows = run(BenchCommand(device=options.device))
    print(format_table(rows))
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if options.record:
        kept = {
            _key(row): round(row["ratio"], 3)
            for row in rows
            if row["method"] != "plain" and "published" not in row["method"]
        }
        RECORD.write_text(json.dumps({**record, **kept}, indent=1) + "\n")
        return
    if not any(_key(row) in record for row in rows):
        sys.exit(f"nothing on record for {options.device}: measure with --record first")
    found = worsened(rows, record)
    if found:
        sys.exit("slower than on record:\n" + "\n".join(found))


if __name__ == "__main__":
    main()
