"""examples/watchdog.py behind a pipe, as a shell runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WATCHDOG = Path(__file__).parents[1] / "examples" / "watchdog.py"
SLOW = "import sys, time; print('a', flush=True); time.sleep(1.0); print('b', flush=True)"


def run_watchdog(source: str, *words: str) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as before:
        return subprocess.run(
            [sys.executable, str(WATCHDOG), *words],
            stdin=before.stdout,
            capture_output=True,
            text=True,
            timeout=60,
        )


def test_an_alarm_for_a_late_result() -> None:
    done = run_watchdog(SLOW, "--budget-ms", "300")
    assert done.stdout == "a\nb\n"
    assert done.stderr == "ALARM: no result within 300 ms, after 1 results\n"
    assert done.returncode == 1


def test_no_alarm_within_the_budget() -> None:
    done = run_watchdog(SLOW, "--budget-ms", "30000")
    assert (done.stdout, done.stderr, done.returncode) == ("a\nb\n", "", 0)


def test_an_alarm_for_a_model_without_results() -> None:
    done = run_watchdog("import time; time.sleep(1.0)", "--budget-ms", "100", "--grace-ms", "300")
    assert done.stderr == "ALARM: no result within 300 ms, after 0 results\n"
    assert done.returncode == 1
