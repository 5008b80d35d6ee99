"""Generate the reference page of the command line from the commands themselves.

MkDocs runs this file as a hook while it builds the site; ``python tools/command_line.py`` prints
the page.
"""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any, Literal, get_args, get_origin

PAGE = "reference/command-line.md"
INTRODUCTION = """# Command line

This page is generated from the commands. `boxcov COMMAND -h` shows the same text, and
`boxcov --install-completion` teaches your shell (bash, zsh, fish, PowerShell) to complete commands
and options with the tab key. `boxcov --version` prints the version.

A command that would replace its `--out` says so and stops; `--force` replaces it. `--json` prints
one JSON value on stdout and nothing else; progress and warnings go to stderr.

The exit code is 0 for success, 1 for an error that says what to do, 2 for a wrong option, 130
after Ctrl-C and 143 after SIGTERM.
"""


def page() -> str:
    """Return the reference page: every command with its options, defaults and an example."""
    import typer

    from boxcov.cli.app import build_app

    group: Any = typer.main.get_command(build_app())
    sections = [_section(name, command) for name, command in group.commands.items()]
    return "\n".join([INTRODUCTION, *sections])


def _section(name: str, command: Any) -> str:
    lines = [f"## {name}", "", _plain(command.help), ""]
    examples = [text.removeprefix("Example: ") for text in (command.epilog or "").split("\n\n")]
    lines += ["```sh", *examples, "```", ""]
    lines += ["|option|default|meaning|", "|---|---|---|"]
    lines += [_option(parameter) for parameter in command.params if parameter.name != "help"]
    return "\n".join([*lines, ""])


def _option(parameter: Any) -> str:
    is_option = parameter.opts[0].startswith("-")
    names = parameter.opts if is_option else [parameter.metavar or parameter.name.upper()]
    shown = ", ".join(f"`{name}`" for name in names)
    choices = _choices(parameter.type_descriptor.annotation)
    if choices:
        shown += " " + " or ".join(f"`{choice}`" for choice in choices)
    value = getattr(parameter.default, "value", parameter.default)
    default = "" if value is None or value is False else f"`{value}`"
    return f"|{shown}|{'required' if parameter.required else default}|{_plain(parameter.help)}|"


def _choices(annotation: Any) -> list[str]:
    """Return the values of an enumeration or of a Literal."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [choice.value for choice in annotation]
    return [str(value) for value in get_args(annotation) if get_origin(annotation) is Literal]


def _plain(text: str | None) -> str:
    return inspect.cleandoc(text or "").replace("|", "\\|").replace("\n", " ")


def on_files(files: Any, config: Any) -> Any:
    """Add the generated page to the site (a MkDocs hook)."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))
    return files


if __name__ == "__main__":
    print(page())
