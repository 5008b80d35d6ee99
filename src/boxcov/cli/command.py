"""Build a typer command from a function that takes a dataclass of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from boxcov.pipeline.options.common import OUTPUT, Help

AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON and nothing else.", rich_help_panel=OUTPUT)
]


def typer_command(function: Callable[..., None]) -> Callable[..., None]:
    """Return ``function`` with every dataclass parameter replaced by one option per field.

    Nested dataclasses are flattened. Other parameters stay as they are.

    >>> from boxcov.pipeline.options import DemoCommand
    >>> def demo(options: DemoCommand, quiet: bool = False) -> None: ...
    >>> list(inspect.signature(typer_command(demo)).parameters)
    ['out', 'quiet']
    """
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint):
            parameters += _flatten(hint)
        else:
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(annotation=hint, kind=keyword))

    @wraps(function)
    def command(**values: Any) -> None:
        names = inspect.signature(function).parameters
        function(**{name: _value(name, hints[name], values) for name in names})

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _flatten(options: Any) -> Iterator[inspect.Parameter]:
    """Yield one parameter per field of a dataclass, nested ones included."""
    hints = get_type_hints(options)
    for field in fields(options):
        if is_dataclass(hints[field.name]):
            yield from _flatten(hints[field.name])
        else:
            yield _parameter(field, hints[field.name])


def _parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
    shown: Help = field.metadata["help"]
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    if get_origin(hint) is tuple:
        hint = list[get_args(hint)[0]]  # type: ignore[misc]
        default = list(default) if isinstance(default, tuple) else default
    is_path = Path in (hint, *get_args(hint))
    metavar = shown.metavar or ("FILE" if is_path else None)
    parser = _parser(hint)
    if parser is not None:
        hint = str
    if shown.positional:
        info = typer.Argument(help=shown.text, metavar=metavar)
    else:
        name = field.name.replace("_", "-")
        info = typer.Option(
            f"--{name}/--no-{name}" if hint == bool | None else f"--{name}",
            help=shown.text,
            metavar=metavar,
            min=shown.min,
            parser=parser,
            show_default=shown.default or True,
            rich_help_panel=shown.panel,
        )
    annotation = Annotated[hint, info]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _parser(hint: Any) -> Callable[[str], float | str] | None:
    """Return the parser of ``float | Literal[...]``, a type that typer does not know."""
    if float not in get_args(hint):
        return None
    words = [word for inner in get_args(hint) for word in get_args(inner)]
    return (lambda text: text if text in words else float(text)) if words else None


def _value(name: str, hint: Any, values: Mapping[str, Any]) -> Any:
    """Return the value of a parameter or field, for a dataclass from its flattened fields."""
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{name: _value(name, inner, values) for name, inner in hints.items()})  # type: ignore[operator]
    return tuple(values[name]) if get_origin(hint) is tuple else values[name]
