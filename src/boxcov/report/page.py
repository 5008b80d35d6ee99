"""The report as one HTML page: no network, no package, nothing outside the file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from pathlib import Path

from boxcov.files import replacing
from boxcov.report import sections
from boxcov.report.payload import pack
from boxcov.report.sections import Section
from boxcov.report.study import Study
from boxcov.version import __version__

SCRIPTS = ("data.js", "stage.js", "details.js", "viewer.js", "start.js")


def write(path: str | Path, study: Study, replicates: int = 200) -> None:
    """The page, there whole or not at all; ``replicates`` are the draws behind each interval.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/report.html", Study("Night & rain"))
    ...     "<h1>Night &amp; rain</h1>" in Path(f"{folder}/report.html").read_text(encoding="utf-8")
    True
    """
    with replacing(path) as temporary:
        temporary.write_text(page(study, replicates), encoding="utf-8")


def page(study: Study, replicates: int = 200) -> str:
    """The page's text.

    >>> page(Study("Nothing yet")).startswith("<!doctype html>")
    True
    """
    data = pack(study)
    made = [
        sections.provenance(study),
        sections.quality(study, replicates),
        sections.curves(study),
        sections.reliability(study),
        sections.groups(study, replicates),
        sections.runtime(study),
        sections.look(study, bool(data["scenes"])),
    ]
    parts = [section for section in made if section is not None]
    script = "\n".join(_asset(name) for name in SCRIPTS)
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<title>{escape(study.title)}</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<main>
<header><h1>{escape(study.title)}</h1>
{_contents(parts)}</header>
{"".join(part.html for part in parts)}
<footer>Made by boxcov {escape(__version__)}, {today}. One file, no network: everything shown is in it.</footer>
</main>
<script type="application/json" id="data">{_embedded(data)}</script>
<script>
"use strict";
{{
{script}}}
</script>
</body>
</html>
"""


def _contents(parts: Sequence[Section]) -> str:
    return (
        "<nav>"
        + "".join(f'<a href="#{part.identity}">{escape(part.title)}</a>' for part in parts)
        + "</nav>\n"
    )


def _asset(name: str) -> str:
    return (files("boxcov.report") / "assets" / name).read_text(encoding="utf-8")


def _embedded(data: object) -> str:
    """JSON that cannot end its script element, whatever the names in it are."""
    return json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
