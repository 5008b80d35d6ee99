"""Run notebooks without Jupyter, and show them in the documentation.

``python tools/notebook.py`` runs the notebooks of docs/notebooks and stores their outputs. MkDocs
runs this file as a hook, which makes a page of each.
"""

from __future__ import annotations

import ast
import base64
import json
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stdout
from importlib.util import find_spec
from io import BytesIO, StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
Cell = dict[str, Any]


def run(notebook: dict[str, Any], progress: Callable[[int], None] = lambda n: None) -> None:
    """Run all cells in a temporary folder and store what they print, return and draw.

    A cell with the tag ``needs-PACKAGE`` is left as it is where that package is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    list(_figures())  # closes those that were open
    scope: dict[str, Any] = {"__name__": "__main__"}
    with TemporaryDirectory() as folder, chdir(folder):
        for number, cell in enumerate(notebook["cells"]):
            if cell["cell_type"] == "code" and _can_run(cell):
                progress(number)
                cell["outputs"] = list(_outputs("".join(cell["source"]), scope))


def _can_run(cell: Cell) -> bool:
    needs = [tag.removeprefix("needs-") for tag in cell["metadata"].get("tags", ())]
    return all(find_spec(package) is not None for package in needs)


def _outputs(source: str, scope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    tree, value = ast.parse(source), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(StringIO()) as printed:
        exec(compile(tree, "cell", "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), scope)
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        yield {"output_type": "stream", "name": "stdout", "text": lines}
    if value is not None and not source.rstrip().endswith(";"):
        yield _display("text/plain", repr(value).splitlines(keepends=True))
    for picture in _figures():
        yield _display("image/png", base64.b64encode(picture).decode())


def _display(kind: str, content: Any) -> dict[str, Any]:
    return {"output_type": "display_data", "data": {kind: content}, "metadata": {}}


def _figures() -> Iterator[bytes]:
    """Return the open figures as PNG, and close them."""
    from matplotlib import pyplot as plt

    for number in plt.get_fignums():
        file = BytesIO()
        plt.figure(number).savefig(file, format="png", dpi=75)
        yield file.getvalue()
    plt.close("all")


def markdown(notebook: dict[str, Any], name: str) -> str:
    """Return a notebook as a page: text, code and stored outputs."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "image/png" in data:
                parts.append(f"![figure](data:image/png;base64,{data['image/png']})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    parts.append(f"[Download this notebook]({name})")
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the page of each notebook to the site."""
    from mkdocs.structure.files import File

    for path in sorted(FOLDER.glob("*.ipynb")):
        page = markdown(json.loads(path.read_text()), path.name)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
    return files


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        run(notebook, lambda number, name=path.name: print(f"{name}: cell {number}", flush=True))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
