"""``make audit`` asks for known weaknesses: its own words, before a server that knows of one, of none, and that cannot be asked."""

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

ROOT = Path(__file__).parents[1]
FOUND = shutil.which("pip-audit", path=ROOT / ".venv" / "audit" / "bin") or shutil.which(
    "pip-audit"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOUND is None, reason="pip-audit is not installed: make audit does it"),
]


class Advisories(ThreadingHTTPServer):
    """What OSV would answer, in its own protocol: a weakness of each package in ``weak``, or an error of the server's own."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.weak: set[str] = set()
        self.out_of_order = False
        self.asked: dict[str, str] = {}  # versions by package


class Answer(BaseHTTPRequestHandler):
    server: Advisories

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = query["package"]["name"]
        self.server.asked[name] = query["version"]
        package = {"name": name, "ecosystem": "PyPI"}
        fixed = {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}
        weakness = {
            "id": "PYSEC-2099-1",
            "summary": "runs what it reads",
            "affected": [{"package": package, "ranges": [fixed]}],
        }
        content = json.dumps({"vulns": [weakness]} if name in self.server.weak else {}).encode()
        self.send_response(503 if self.server.out_of_order else 200)
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


def audited(server: Advisories, folder: Path) -> subprocess.CompletedProcess[str]:
    """The line of the Makefile, with the server in the place of the internet's."""
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


def pins() -> dict[str, str]:
    lines = [
        line.partition("#")[0].partition(";")[0].strip()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    ]
    return {
        name.lower().replace("_", "-"): version
        for name, _, version in (line.partition("==") for line in lines if line)
    }


def test_every_pin_is_asked_for_and_none_is_weak(advisories, tmp_path) -> None:
    done = audited(advisories, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "No known vulnerabilities found" in done.stderr
    assert advisories.asked == pins()


def test_a_weakness_fails_and_is_named(advisories, tmp_path) -> None:
    advisories.weak = {"pillow"}
    done = audited(advisories, tmp_path)
    assert done.returncode == 1
    assert "Found 1 known vulnerability in 1 package" in done.stderr
    assert "pillow" in done.stdout
    assert "PYSEC-2099-1" in done.stdout
    assert "99.0" in done.stdout  # the version that mends it


def test_a_server_that_cannot_be_asked_fails(advisories, tmp_path) -> None:
    advisories.out_of_order = True
    assert audited(advisories, tmp_path).returncode != 0
