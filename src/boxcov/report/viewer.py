"""The HTML of the bird's-eye viewer; what moves in it is in ``assets``."""

from __future__ import annotations

_KINDS = (
    ("AC", "accurate, certain"),
    ("IC", "inaccurate, certain"),
    ("AU", "accurate, uncertain"),
    ("IU", "inaccurate, uncertain"),
)
_RATES = (("AvU", "AvU"), ("PAC", "P(A|C)"), ("PUI", "P(U|I)"))

_STAGE_BAR = """<div class="bar screen">
<span class="group"><button id="previous" aria-label="previous frame">←</button><select id="scene" aria-label="frame"></select>
<button id="next" aria-label="next frame">→</button></span>
<span class="group"><button id="zoom-in" aria-label="zoom in">+</button><button id="zoom-out" aria-label="zoom out">−</button>
<button id="zoom-all">all</button></span>
<label><input type="checkbox" id="show-points" checked>points</label>
<label><input type="checkbox" id="show-truth" checked>ground truth</label>
<label><input type="checkbox" id="show-sigma" checked>ellipses</label>
<label><input type="checkbox" id="show-numbers" checked>numbers</label>
</div>"""

_BAR = """<div class="bar">
<label>Method <select id="method"></select></label>
<label>Error <select id="error"><option value="IoU">IoU</option><option value="l2">ℓ₂</option></select></label>
</div>
<div class="bar">
<label>Uncertainty threshold
<input type="range" id="slider" class="screen" min="0" max="1000" step="1" value="0" aria-label="threshold, by share of boxes below"></label>
<span class="group"><input type="number" id="threshold" step="any" aria-label="threshold">
<button id="mean" class="screen" title="the paper's threshold">mean of u</button></span>
<span id="share" class="quiet"></span>
</div>
<p id="method-note" class="quiet"></p>"""

_STAGE = """<div>
<div id="stage"><canvas id="points"></canvas><svg id="boxes"><g id="world"></g><g id="labels"></g></svg></div>
<div class="key"><span class="k-truth">ground truth</span><span class="k-found">prediction, its u</span>
<span class="k-doubt">above the threshold</span><span class="k-wrong">filled: inaccurate</span>
<span class="k-sigma">1 and 3 σ of the position</span></div>
<p class="quiet"><span id="points-note"></span><span class="screen">. Drag to move, wheel or + − to zoom, ← → for frames.</span></p>
</div>"""


def viewer(stage: bool) -> str:
    """Controls and counts, and the picture where there is a scene to show.

    >>> 'id="stage"' in viewer(stage=True), 'id="stage"' in viewer(stage=False)
    (True, False)
    """
    counts = _counts("all", "All frames") + (_counts("shown", "This frame") if stage else "")
    side = f'<aside><div class="pairs">{counts}</div>{"""<div id="details" aria-live="polite"></div>""" if stage else ""}</aside>'
    return f"""{_BAR}{_STAGE_BAR if stage else ""}
<div class="split{"" if stage else " counts-only"}">{_STAGE if stage else ""}{side}</div>"""


def _counts(where: str, title: str) -> str:
    cells = {
        kind: f'<td class="{kind}" title="{words}"><b id="{where}-{kind}">–</b><small>{kind}</small></td>'
        for kind, words in _KINDS
    }
    rates = "".join(f'<dt>{name}</dt><dd id="{where}-{key}">–</dd>' for key, name in _RATES)
    return f"""<div><table class="counts"><caption>{title}</caption>
<tr><th></th><th>certain</th><th>uncertain</th></tr>
<tr><th>accurate</th>{cells["AC"]}{cells["AU"]}</tr>
<tr><th>inaccurate</th>{cells["IC"]}{cells["IU"]}</tr></table><dl class="rates">{rates}</dl></div>"""
