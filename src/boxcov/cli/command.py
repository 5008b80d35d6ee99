"""Build a click command from a function that takes a dataclass of options, and print its output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import partial
from inspect import getdoc
from pathlib import Path
from signal import SIGINT, SIGTERM
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from boxcov.errors import did_you_mean
from boxcov.pipeline.options.option import INPUT, METHOD, OUTPUT, Help, Interval
from boxcov.pipeline.terminal import say, say_json, say_table

Function = Callable[[Any], "Output | None"]
PANELS = (INPUT, METHOD, OUTPUT)


@dataclass(frozen=True)
class Output:
    """What a command prints at its end."""

    value: Any  # with --json
    parts: Sequence[Any]  # without: texts, and tables of ``terminal.new_table``
    failure: str = ""  # a line on stderr, for an exit code of 1

    def show(self, as_json: bool) -> None:
        if as_json:
            say_json(self.value)
        else:
            for part in self.parts:
                say(part) if isinstance(part, str) else say_table(part)
        if self.failure:
            say(f"boxcov: {self.failure}", sys.stderr)
            sys.exit(1)


class PanelCommand(click.Command):
    """A command whose help shows its options in panels."""

    panel = ""  # of the command itself
    panels: Mapping[str, str] = {}  # by the name of an option

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        rows = (
            (self.panels.get(str(one.name), "Options"), one.get_help_record(ctx)) for one in options
        )
        _write_panels(formatter, rows)


class PanelGroup(click.Group):
    """All commands; the help shows them in panels."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands: Mapping[str, Any] = self.commands
        about = {name: (one.help or "").split("\n\n")[0] for name, one in commands.items()}
        _write_panels(formatter, ((one.panel, (k, about[k])) for k, one in commands.items()))


def _write_panels(
    formatter: click.HelpFormatter, rows: Iterable[tuple[str, tuple[str, str] | None]]
) -> None:
    """Write one section per panel of options or commands; a row is the name and the help text."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for panel, row in rows:
        if row is not None:
            panels.setdefault(panel, []).append(row)
    for panel, members in panels.items():
        with formatter.section(panel):
            formatter.write_dl(members)


def build_command(function: Function, panel: str, examples: Sequence[str]) -> PanelCommand:
    """Return ``function``, which takes a dataclass, as a command with one option per field of it.

    Nested dataclasses are flattened. A function that returns an Output has the option --json, too.
    The help text shows the options in the order of the panels: input, method, output.
    """
    hints, name = get_type_hints(function), function.__name__
    found = sorted(_flatten(hints["options"]), key=lambda one: PANELS.index(one[0].panel))
    params = [parameter for _, parameter in found]
    panels = {str(parameter.name): shown.panel for shown, parameter in found}
    if hints["return"] is not NoneType:
        about = "Print JSON and nothing else."
        params.append(click.Option(["--json", "as_json"], is_flag=True, help=about))
        panels["as_json"] = OUTPUT
    # a line break inside a paragraph would stay where it is in the source
    texts = [part.replace("\n", " ") for part in (getdoc(function) or "").split("\n\n")]
    texts += [f"{one.metavar}: {shown.text}" for shown, one in found if shown.is_argument]
    command = PanelCommand(
        name,
        callback=partial(run, function, hints["options"]),
        params=params,
        help="\n\n".join(texts),
        epilog="\n\n".join(f"Example: boxcov {name} {words}" for words in examples),
    )
    command.panel, command.panels = panel, panels
    return command


def run(function: Function, kind: Any, as_json: bool = False, **values: Any) -> None:
    """Call ``function`` with options of this kind, and print its output."""
    options = _build_options(kind, values)
    try:
        output = function(options)
    except (KeyboardInterrupt, SystemExit) as stop:
        code = stop.code if isinstance(stop, SystemExit) else 128 + SIGINT
        if isinstance(stop, KeyboardInterrupt) or code == 128 + SIGTERM:
            can_resume = hasattr(options, "resume")
            advice = "; the same command with --resume continues" if can_resume else ""
            say(f"boxcov: interrupted{advice}", sys.stderr)
        sys.exit(code)
    if output is not None:
        output.show(as_json)


def _flatten(options: Any) -> Iterator[tuple[Help, click.Parameter]]:
    """Yield help and parameter of each field of a dataclass, nested ones included."""
    hints = get_type_hints(options)
    for field in fields(options):
        if is_dataclass(hints[field.name]):
            yield from _flatten(hints[field.name])
        else:
            yield field.metadata["help"], _parameter(field, hints[field.name])


def _parameter(field: Field[Any], hint: Any) -> click.Parameter:
    shown: Help = field.metadata["help"]
    is_many = get_origin(hint) is tuple
    kinds = {hint, *get_args(hint)}
    is_path = Path in kinds
    common: dict[str, Any] = {
        "metavar": shown.metavar or ("FILE" if is_path else _metavar(hint)),
        "type": click.Path(path_type=Path) if is_path else _parser(hint),
        "required": field.default is MISSING,
    }
    if shown.is_argument:
        return click.Argument([field.name], nargs=-1 if is_many else 1, **common)
    name = f"--{field.name.replace('_', '-')}"
    if field.default is not MISSING:  # click takes a default of None for a value
        common["default"] = field.default
    return click.Option(
        [f"{name}/--no-{name[2:]}" if {bool, NoneType} <= kinds else name, field.name],
        help=f"{shown.text} {_limits(shown.within)}".rstrip(),
        is_flag=True if bool in kinds else None,  # False would let a required option have no value
        multiple=is_many,
        show_default=shown.default or True,
        **common,
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
    """Return the sentence about the limits of a number, unless it is only 0 or 1 at least."""
    text = "" if interval is None else str(interval)
    return f"{text.capitalize()}." if text not in ("", "at least 0", "at least 1") else ""


def _parser(hint: Any) -> Callable[[Any], Any] | None:
    """Return the parser of a number, a choice, or either; None for other types."""
    choices = _choices(hint)
    numbers: dict[Callable[[str], float], str] = {int: "an integer", float: "a number"}
    number = next((kind for kind in numbers if kind in (hint, *get_args(hint))), None)
    if number is None and not choices:
        return None
    allowed = [*choices, *([] if number is None else [numbers[number]])]

    def parse(given: Any) -> Any:
        if given in choices or not isinstance(given, str):  # a default is parsed already
            return given
        with suppress(ValueError):
            if number is not None:
                return number(given)
        raise click.BadParameter(
            f"{given!r} is not {' or '.join(allowed)}{did_you_mean(given, choices)}."
        )

    return parse


def _build_options(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return the options of this kind, a dataclass, from values by name; nested ones as well."""
    hints = get_type_hints(kind)
    return kind(
        **{
            name: _build_options(hint, values) if is_dataclass(hint) else values[name]
            for name, hint in hints.items()
        }
    )
