"""Build a typer command from a function that takes a dataclass of options."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from signal import SIGTERM
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from boxcov.errors import did_you_mean
from boxcov.pipeline.options.option import INPUT, METHOD, OUTPUT, Help, Interval
from boxcov.pipeline.terminal import say

AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print JSON and nothing else.", metavar="", rich_help_panel=OUTPUT),
]


class PanelCommand(TyperCommand):
    """A command whose help shows its options in panels, without rich: 0.1 s less to import."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse wrong numbers and choices before typer imports pydantic (0.15 s) to parse."""
        given = self.make_parser(ctx).parse_args(args=list(args))[0]
        parsers = getattr(self.callback, "parsers", {})
        options: Any = self.get_params(ctx)
        for option in options:
            found, parse = given.get(option.name), parsers.get(option.name)
            for text in found if isinstance(found, (list, tuple)) else [found]:
                if parse is not None and isinstance(text, str):
                    try:
                        parse(text)
                    except typer.BadParameter as error:
                        error.ctx, error.param = ctx, option
                        raise
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_panels(formatter, ((p, p.get_help_record(ctx)) for p in self.get_params(ctx)))


class PanelGroup(TyperGroup):
    """All commands; the help shows them in panels."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for flag in self.get_params(ctx):
            flag.default = False  # typer imports pydantic (0.1 s) to check its own None
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands: Mapping[str, Any] = self.commands
        about = {name: (one.help or "").split("\n\n")[0] for name, one in commands.items()}
        _write_panels(formatter, ((one, (name, about[name])) for name, one in commands.items()))


def _write_panels(formatter: Any, rows: Iterable[tuple[Any, tuple[str, str] | None]]) -> None:
    """Write one section per panel of options or commands; a row is the name and the help text."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for one, row in rows:
        if row is not None:
            name = row[0].split(" <list")[0]  # typer adds the Python type to an argument's name
            panel = getattr(one, "rich_help_panel", None) or "Options"
            panels.setdefault(panel, []).append((name, row[1]))
    for panel, members in panels.items():
        with formatter.section(panel):
            formatter.write_dl(members)


def typer_command(function: Callable[..., None]) -> Callable[..., None]:
    """Return ``function`` with every dataclass parameter replaced by one option per field.

    Nested dataclasses are flattened. Other parameters stay as they are. The help text shows the
    options in the order of the panels: input, method, output.
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
        arguments = {name: _value(name, hints[name], values) for name in names}
        try:
            function(**arguments)
        except (KeyboardInterrupt, SystemExit) as stop:
            if isinstance(stop, KeyboardInterrupt) or stop.code == 128 + SIGTERM:
                can_resume = any(hasattr(options, "resume") for options in arguments.values())
                advice = "; the same command with --resume continues" if can_resume else ""
                say(f"boxcov: interrupted{advice}", sys.stderr)
            raise

    panels = ["", INPUT, METHOD, OUTPUT]
    parameters.sort(key=lambda p: panels.index(_panel(p)))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    infos = {p.name: getattr(p.annotation, "__metadata__", (None,))[0] for p in parameters}
    command.parsers = {n: getattr(info, "parser", None) for n, info in infos.items()}  # type: ignore[attr-defined]
    return command


def _panel(parameter: inspect.Parameter) -> str:
    """Return the panel of an option; functions of tests have none."""
    infos = getattr(parameter.annotation, "__metadata__", ())
    return next((info.rich_help_panel or "" for info in infos), "")


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
    metavar = shown.metavar or ("FILE" if is_path else _metavar(hint))
    parser = _parser(hint)
    if _choices(hint) and float in get_args(hint):
        hint = str  # typer knows no number or word
    if shown.is_argument:
        info = typer.Argument(help=shown.text, metavar=metavar, rich_help_panel=shown.panel)
    else:
        name = field.name.replace("_", "-")
        info = typer.Option(
            f"--{name}/--no-{name}" if hint == bool | None else f"--{name}",
            help=f"{shown.text} {_limits(shown.within)}".rstrip(),
            metavar=metavar,
            parser=parser,
            show_default=shown.default or True,
            rich_help_panel=shown.panel,
        )
    annotation = Annotated[hint, info]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _metavar(hint: Any) -> str:
    """Return the word for a value in the help text, or its choices."""
    kinds = (hint, *get_args(hint))
    words = {bool: "", int: "N", float: "NUMBER", str: "TEXT"}
    return next((word for kind, word in words.items() if kind in kinds), "|".join(_choices(hint)))


def _choices(hint: Any) -> list[str]:
    """Return the words that a ``Literal`` in a type accepts."""
    literals = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal]
    return [word for literal in literals for word in get_args(literal)]


def _limits(interval: Interval | None) -> str:
    """Return the sentence about the limits of a number, unless they go without saying."""
    text = "" if interval is None else str(interval)
    return f"{text.capitalize()}." if text not in ("", "at least 0", "at least 1") else ""


def _parser(hint: Any) -> Callable[[str], float | str] | None:
    """Return the parser of a number, a choice, or either; None for other types."""
    choices = _choices(hint)
    numbers: dict[Callable[[str], float], str] = {int: "an integer", float: "a number"}
    number = next((kind for kind in numbers if kind in (hint, *get_args(hint))), None)
    if number is None and not choices:
        return None
    allowed = [*choices, *([] if number is None else [numbers[number]])]

    def parse(text: str) -> float | str:
        if text in choices:
            return text
        with suppress(ValueError):
            if number is not None:
                return number(text)
        raise typer.BadParameter(
            f"{text!r} is not {' or '.join(allowed)}{did_you_mean(text, choices)}."
        )

    return parse


def _value(name: str, hint: Any, values: Mapping[str, Any]) -> Any:
    """Return the value of a parameter or field, for a dataclass from its flattened fields."""
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{name: _value(name, inner, values) for name, inner in hints.items()})  # type: ignore[operator]
    return tuple(values[name]) if get_origin(hint) is tuple else values[name]
