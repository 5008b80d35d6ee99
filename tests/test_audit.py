"""``make audit`` looks up known vulnerabilities; here a local server takes the place of OSV."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from helpers.pins import pins

ROOT = Path(__file__).parents[1]
FOUND = shutil.which("pip-audit", path=ROOT / ".venv" / "audit" / "bin") or shutil.which(
    "pip-audit"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOUND is None, reason="pip-audit is not installed: make audit does it"),
]


class Advisories(ThreadingHTTPServer):
    """Answers as OSV does: one vulnerability per package in ``vulnerable``, or a server error."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.vulnerable: set[str] = set()
        self.is_broken = False
        self.queries: dict[str, str] = {}  # version by package


class Answer(BaseHTTPRequestHandler):
    server: Advisories

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = query["package"]["name"]
        self.server.queries[name] = query["version"]
        package = {"name": name, "ecosystem": "PyPI"}
        fixed = {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}
        vulnerability = {
            "id": "PYSEC-2099-1",
            "summary": "runs what it reads",
            "affected": [{"package": package, "ranges": [fixed]}],
        }
        content = json.dumps(
            {"vulns": [vulnerability]} if name in self.server.vulnerable else {}
        ).encode()
        self.send_response(503 if self.server.is_broken else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def advisories() -> Iterator[Advisories]:
    with Advisories() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def audit(server: Advisories, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the line of the Makefile against the local server."""
    (line,) = [
        line.strip()
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith("\t.venv/audit/bin/pip-audit ")
    ]
    _, *words = shlex.split(
        line.replace("$(AUDIT)", f"-s osv --osv-url http://127.0.0.1:{server.server_port}")
    )
    assert FOUND is not None
    return subprocess.run(
        [FOUND, *words, "--cache-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_pin_is_looked_up(advisories, tmp_path) -> None:
    done = audit(advisories, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "No known vulnerabilities found" in done.stderr
    assert advisories.queries == pins()


def test_a_vulnerability_fails_and_is_named(advisories, tmp_path) -> None:
    advisories.vulnerable = {"pillow"}
    done = audit(advisories, tmp_path)
    assert done.returncode == 1
    assert "Found 1 known vulnerability in 1 package" in done.stderr
    assert "pillow" in done.stdout
    assert "PYSEC-2099-1" in done.stdout
    assert "99.0" in done.stdout  # the fixed version


def test_a_broken_server_fails(advisories, tmp_path) -> None:
    advisories.is_broken = True
    assert audit(advisories, tmp_path).returncode != 0
