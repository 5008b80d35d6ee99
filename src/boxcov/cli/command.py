"""Build a typer command from a function that takes a dataclass of options, and print its output."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from signal import SIGTERM
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from boxcov.errors import did_you_mean
from boxcov.pipeline.options.option import INPUT, METHOD, OUTPUT, Help, Interval
from boxcov.pipeline.terminal import say, say_json, say_table

if TYPE_CHECKING:
    from rich.table import Table

Command = Callable[[Any], "Output | None"]
JSON = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON and nothing else.", metavar="", rich_help_panel=OUTPUT
        ),
    ],
)


@dataclass(frozen=True)
class Output:
    """What a command prints at its end."""

    value: Any  # with --json
    parts: Sequence[str | Table]  # without
    failure: str = ""  # a line on stderr, for an exit code of 1

    def show(self, as_json: bool) -> None:
        if as_json:
            say_json(self.value)
        else:
            for part in self.parts:
                say(part) if isinstance(part, str) else say_table(part)
        if self.failure:
            say(f"boxcov: {self.failure}", sys.stderr)
            raise typer.Exit(1)


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


def typer_command(function: Command) -> Callable[..., None]:
    """Return ``function``, which takes a dataclass, with one option per field of it.

    Nested dataclasses are flattened. A function that returns an Output has the option --json, too.
    The help text shows the options in the order of the panels: input, method, output.
    """
    hints = get_type_hints(function)
    kind = hints["options"]
    parameters = [*_flatten(kind), *([] if hints["return"] is NoneType else [JSON])]

    @wraps(function)
    def command(as_json: bool = False, **values: Any) -> None:
        options = _value("options", kind, values)
        try:
            output = function(options)
        except (KeyboardInterrupt, SystemExit) as stop:
            if isinstance(stop, KeyboardInterrupt) or stop.code == 128 + SIGTERM:
                can_resume = hasattr(options, "resume")
                advice = "; the same command with --resume continues" if can_resume else ""
                say(f"boxcov: interrupted{advice}", sys.stderr)
            raise
        if output is not None:
            output.show(as_json)

    panels = [INPUT, METHOD, OUTPUT]
    parameters.sort(key=lambda p: panels.index(_info(p).rich_help_panel))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.parsers = {p.name: _info(p).parser for p in parameters}  # type: ignore[attr-defined]
    return command


def _info(parameter: inspect.Parameter) -> Any:
    """Return the ``typer.Option`` or ``typer.Argument`` of a parameter."""
    return parameter.annotation.__metadata__[0]


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
