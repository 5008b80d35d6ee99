"""Build a typer command from a function that takes a dataclass of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from boxcov.pipeline.options import OUTPUT, Option

AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON and nothing else.", rich_help_panel=OUTPUT)
]


def typer_command(function: Callable[..., None]) -> Callable[..., None]:
    """Return ``function`` with every dataclass parameter replaced by one option per field.

    Nested dataclasses are flattened. Other parameters stay as they are.

    >>> from boxcov.pipeline.options import DemoOptions
    >>> def demo(options: DemoOptions, quiet: bool = False) -> None: ...
    >>> list(inspect.signature(typer_command(demo)).parameters)
    ['out', 'quiet']
    """
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters
    flat = {}
    for name, parameter in parameters.items():
        for option in _flatten(hints[name]) if is_dataclass(hints[name]) else (parameter,):
            annotation = hints[name] if option is parameter else option.annotation
            flat[option.name] = option.replace(
                annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY
            )

    @wraps(function)
    def command(**values: Any) -> None:
        function(
            **{
                name: _build(hints[name], values) if is_dataclass(hints[name]) else values[name]
                for name in parameters
            }
        )

    command.__signature__ = inspect.Signature(list(flat.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: option.annotation for name, option in flat.items()}
    return command


def _flatten(options: Any) -> Iterator[inspect.Parameter]:
    """Yield one parameter per field of a dataclass, nested ones included."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        if is_dataclass(hints[field.name]):
            yield from _flatten(hints[field.name])
        else:
            yield _parameter(field, *get_args(hints[field.name]))


def _parameter(field: Field[Any], kind: Any, option: Option) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    if _is_variadic(kind):
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
        default = list(default) if isinstance(default, tuple) else default
    shown = {"help": option.help, "metavar": option.metavar, "rich_help_panel": option.panel}
    if option.positional:
        info = typer.Argument(**shown)  # type: ignore[arg-type]
    else:
        name = f"--{field.name.replace('_', '-')}"
        info = typer.Option(name, min=option.min, show_default=option.default or True, **shown)  # type: ignore[arg-type]
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )


def _build(options: Any, values: Mapping[str, Any]) -> Any:
    """Return the dataclass filled from the values of its flattened fields."""
    hints = get_type_hints(options)
    return options(
        **{
            name: _build(kind, values)
            if is_dataclass(kind)
            else tuple(values[name])
            if _is_variadic(kind)
            else values[name]
            for name, kind in hints.items()
        }
    )


def _is_variadic(kind: Any) -> bool:
    return get_origin(kind) is tuple
