"""One place writes files, one prints, one checks numbers: nothing in src/ goes past them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import boxcov
from boxcov.predict.predictor import Predictor

SOURCE = Path(boxcov.__file__).parent
# calls that write a file, and those modules that may make them, with the reason
WRITES = ("write_text", "write_bytes", "savefig", "save_file", "tofile", "savez", "to_csv")
WRITERS = {
    "_files/output_file.py": "the place itself",
    "data/loader.py": "items of worker processes, in a temporary folder",
}
PRINTERS = {"pipeline/terminal.py": "the place itself"}
JSON = {
    "_files/output_file.py": "the place itself",
    "_torch/distributed.py": "between processes, not to a file",
    "data/nuscenes/results.py": "the format has NaN for unknown velocities",
    "report/page.py": "allow_nan=False, in a script element",
}


@cache
def modules() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(SOURCE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    }


def name_of(call: ast.Call) -> str:
    """The dotted name of what is called."""
    return ast.unparse(call.func)


def calls(tree: ast.AST, inside: bool = False) -> Iterator[tuple[ast.Call, bool]]:
    """Every call, and whether it is in a ``with atomic_write(...)``."""
    for node in ast.iter_child_nodes(tree):
        within = inside
        if isinstance(node, ast.With):
            opened = [i.context_expr for i in node.items if isinstance(i.context_expr, ast.Call)]
            within |= any(name_of(call) == "atomic_write" for call in opened)
        if isinstance(node, ast.Call):
            yield node, within
        yield from calls(node, within)


def opens_for_writing(call: ast.Call) -> bool:
    name, words = name_of(call), [*call.args, *(k.value for k in call.keywords)]
    modes = [w.value for w in words if isinstance(w, ast.Constant) and isinstance(w.value, str)]
    is_open = name.split(".")[-1] == "open" and name != "os.open"
    return is_open and any(
        set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes
    )


def search(is_past: Callable[[ast.Call, bool], bool], allowed: Iterable[str]) -> list[str]:
    """Where a call in a module that is not allowed to goes past the one place."""
    return [
        f"{module}, line {call.lineno}: {name_of(call)}"
        for module, tree in modules().items()
        if module not in allowed
        for call, is_atomic in calls(tree)
        if is_past(call, is_atomic)
    ]


def test_files_are_written_in_one_place() -> None:
    def writes(call: ast.Call, is_atomic: bool) -> bool:
        *owner, last = name_of(call).split(".")
        whole = ("torch.save", "os.replace", "os.rename", "shutil.move")
        is_write = (owner and last in WRITES) or name_of(call) in whole or opens_for_writing(call)
        return not is_atomic and bool(is_write)

    assert not search(writes, WRITERS)


def test_texts_are_printed_in_one_place() -> None:
    names = ("print", "click.echo", "Console", "sys.stdout.write", "sys.stderr.write")
    assert not search(lambda call, _: name_of(call) in names, PRINTERS)


def test_json_is_written_in_one_place() -> None:
    assert not search(lambda call, _: name_of(call) in ("json.dumps", "json.dump"), JSON)


def test_every_exporter_is_tested_with_wrong_numbers() -> None:
    """A new exporter belongs into tests/export/test_numbers_that_leave.py."""
    tested = (Path(__file__).parent / "export/test_numbers_that_leave.py").read_text()
    derived = {  # each calls one that is tested
        *("ros.detection2d_array", "tables.to_pandas", "tables.write_parquet"),
    }
    missing = []
    modules = sorted(path.stem for path in (SOURCE / "export").glob("[a-z]*.py"))
    for name in modules:
        module = import_module(f"boxcov.export.{name}")
        for function, value in inspect.getmembers(module, inspect.isfunction):
            takes = "Detections" in str(inspect.signature(value).parameters.values())
            is_own = value.__module__ == module.__name__ and not function.startswith("_")
            full = f"{name}.{function}"
            if takes and is_own and f"{full}(" not in tested and full not in derived:
                missing.append(full)
    assert not missing


def test_every_predictor_is_checked() -> None:
    """No method replaces the call that checks weights and results."""
    for module in ("exact", "mcglm", "glm", "mci", "nms_spread"):
        import_module(f"boxcov.predict.{module}")
    found, rest = [], [Predictor]
    while rest:
        found.append(rest.pop())
        rest += found[-1].__subclasses__()
    own = {"__call__", "_run", "check", "check_weights", "with_signals"}
    replaced = {kind.__name__: own & set(vars(kind)) for kind in found if kind is not Predictor}
    assert len(replaced) >= 5
    assert not any(names for name, names in replaced.items() if name[0] != "_")


def test_the_search_finds_what_it_should() -> None:
    lines = ("open('x', 'wb')", "open('x.w')", "with atomic_write(p) as t: t.write_text('')")
    first, second, _, inside = calls(ast.parse("\n".join(lines)))
    assert opens_for_writing(first[0])
    assert not opens_for_writing(second[0])
    assert (name_of(inside[0]), inside[1]) == ("t.write_text", True)
