"""Generate the reference page of the command line from the commands themselves.

MkDocs runs this file as a hook while it builds the site; ``python tools/command_line.py`` prints
the page.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

PAGE = "reference/command-line.md"
INTRODUCTION = """# Command line

This page is generated from the commands. `boxcov COMMAND -h` shows the same text.
`boxcov --version` prints the version. To complete commands and options with the tab key, add
`eval "$(_BOXCOV_COMPLETE=bash_source boxcov)"` to `~/.bashrc` (`zsh_source` to `~/.zshrc`;
`_BOXCOV_COMPLETE=fish_source boxcov | source` for fish).

A command that would replace its `--out` says so and stops; `--force` replaces it. `--json` prints
one JSON value on stdout and nothing else; progress and warnings go to stderr.

The exit code is 0 for success, 1 for an error that says what to do, 2 for a wrong option, 130
after Ctrl-C and 143 after SIGTERM.
"""


def page() -> str:
    """Return the reference page: every command with its options, defaults and an example."""
    from boxcov.cli.app import build_app

    sections = [_section(name, command) for name, command in build_app().commands.items()]
    return "\n".join([INTRODUCTION, *sections])


def _section(name: str, command: Any) -> str:
    lines = [f"## {name}", "", inspect.cleandoc(command.help), ""]
    examples = [text.removeprefix("Example: ") for text in (command.epilog or "").split("\n\n")]
    lines += ["```sh", *examples, "```", ""]
    lines += ["|option|default|meaning|", "|---|---|---|"]
    lines += [_option(one) for one in command.params if one.param_type_name == "option"]
    return "\n".join([*lines, ""])


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    choices = (option.metavar or "").split("|")
    if len(choices) > 1:
        names += " " + " or ".join(f"`{choice}`" for choice in choices)
    default = "required" if option.required else _default(option)
    return f"|{names}|{default}|{_plain(option.help)}|"


def _default(option: Any) -> str:
    """Return the default as ``-h`` shows it: in words if the option has them, else its value."""
    if isinstance(option.show_default, str):
        return _plain(option.show_default)
    values = option.default if option.multiple else (option.default,)
    shown = [f"`{value}`" for value in values if isinstance(value, (str, int, float, Path))]
    return "" if option.is_flag else ", ".join(shown)


def _plain(text: str | None) -> str:
    return inspect.cleandoc(text or "").replace("|", "\\|").replace("\n", " ")


def on_files(files: Any, config: Any) -> Any:
    """Add the generated page to the site (a MkDocs hook)."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))
    return files


if __name__ == "__main__":
    print(page())
