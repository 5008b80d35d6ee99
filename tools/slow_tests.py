"""Write docs/results/data/reliability-measured.json from build/test-slow.xml, after make test-slow.

``python tools/slow_tests.py [XML] [--note TEXT]``; then ``make results``. The rows of the GPU stay.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "results" / "data" / "reliability-measured.json"
KILLS = {
    "test_fifty_kills_lose_nothing": "boxcov fit, SIGKILL",
    "test_kills_in_both_passes": "fit with a second pass, SIGKILL",
    "test_fifty_kills_of_live_files[fitted]": "fit, SIGKILL while its checkpoint is written",
    "test_fifty_kills_of_live_files[predicted]": "predict, SIGKILL while its blocks are written",
}
MUTANT = "test_without_the_code_its_test_fails"
Row = list[Any]  # what, count, outcome


def rows(suite: ElementTree.Element) -> list[Row]:
    """Return the rows of the table that the report of pytest tells."""
    cases = [case for case in suite.iter("testcase") if case.get("classname")]
    found = [row for case in cases for row in measured(case)]
    mutants = outcomes([case for case in cases if str(case.get("name")).startswith(MUTANT)])
    told = ", ".join(f"{mutants[kind]} {name}" for kind, name in _MUTANTS.items() if mutants[kind])
    found.append(["mutants of the source", mutants.total(), told])
    every, seconds = outcomes(cases), float(str(suite.get("time")))
    told = ", ".join(f"{count} {kind}" for kind, count in every.most_common())
    found.append(["all slow tests", every.total(), f"{seconds / 60:.0f} minutes: {told}"])
    return found


_MUTANTS = {"passed": "detected by a test", "failed": "not detected"}


def outcomes(cases: list[ElementTree.Element]) -> Counter[str]:
    """Return the number of tests by outcome."""
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    return Counter(
        next((name for tag, name in kinds.items() if case.find(tag) is not None), "passed")
        for case in cases
    )


def measured(case: ElementTree.Element) -> list[Row]:
    """Return the rows of one test, from the properties that it recorded."""
    found: list[Row] = []
    for entry in case.iter("property"):
        name, value = str(entry.get("name")), str(entry.get("value"))
        if kills := re.match(r"(\d+) kills, (\d+) finished runs?", value):
            what = KILLS.get(str(case.get("name")), f"boxcov {name}, SIGKILL")
            told = f"{kills[2]} runs finished, equal to an uninterrupted one"
            found.append([what, int(kills[1]), told])
        elif name == "outcome":
            kinds = re.search(r"(\d+) kinds", value)
            assert kinds is not None
            count, special = re.findall(r"(\d+) (?:damaged|were no)", value)
            told = re.sub(r"; \d+ were no regular file", "", value.partition(": ")[2])
            found.append([f"hostile files, {kinds[1]} kinds", int(count), told])
            links = "of these pipes, devices, folders, links"
            found.append([links, int(special), "refused by name, or not what is read"])
        elif soak := re.match(r"(\w+): (\d+) frames.*, ([-+.\d]+ MiB)", value):
            what = f"{'MCGLM' if soak[1] == 'mcglm' else 'ExactGLM'} frames in one process"
            found.append([what, int(soak[2]), f"{soak[3]} after the first 500"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("xml", type=Path, nargs="?", default=ROOT / "build" / "test-slow.xml")
    parser.add_argument("--note", action="append", default=[], help="a sentence below the table")
    options = parser.parse_args()
    (suite,) = ElementTree.parse(options.xml).getroot().iter("testsuite")
    table = json.loads(TABLE.read_text())
    kept = [row for row in table["rows"] if "GPU" in row[0]]  # of benchmarks/gpu_checks.py
    table |= {"rows": rows(suite) + kept, "notes": options.note}
    table["date"] = str(suite.get("timestamp"))[:10]
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
