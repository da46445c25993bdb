"""Prints a script that completes commands and options in a shell (`fusion completion bash`).

Input: the parser of all commands; output: a script that holds their names, options and choices, so that a key press
starts no Python.  Other words are names of files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import fusion.cli

_BASH_HEAD = """\
_fusion() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" choices="" files=""
    case "$COMP_CWORD ${COMP_WORDS[1]} $before" in
"""
_BASH_TAIL = """\
    esac
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
    case "$word" in -*) files="" ;; esac
    if [ -n "$files" ]; then COMPREPLY+=($(compgen -f -- "$word")); fi
}
complete -o filenames -F _fusion fusion
"""
_ZSH_HEAD = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


@dataclass(frozen=True, slots=True)
class Command:
    """Holds the words that may follow a command.

    Attributes:
        options: all options, with the choices of each; none for an option that takes a file, a number or nothing.
        words: the choices of its positional arguments.
    """

    help: str
    options: Mapping[str, tuple[str, ...]]
    words: tuple[str, ...]


def completion(arguments: argparse.Namespace) -> int:
    """Print the script of a shell."""
    commands = dict(_commands(fusion.cli.parser()))
    scripts = {"bash": _bash, "zsh": lambda known: _ZSH_HEAD + _bash(known), "fish": _fish}
    print(scripts[arguments.shell](commands), end="")
    return 0


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Command]]:
    (choices,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    texts = {each.dest: each.help or "" for each in choices._choices_actions}
    for name, command in choices.choices.items():
        options: dict[str, tuple[str, ...]] = {}
        words: list[str] = []
        for action in command._actions:
            if action.option_strings:
                options.update((option, tuple(action.choices or ())) for option in action.option_strings)
            else:
                words += action.choices or ()
        yield name, Command(texts[name], options, tuple(words))


def _bash(commands: Mapping[str, Command]) -> str:
    lines = [f'        1\\ *) choices="{" ".join(commands)} --help --version" ;;']
    for name, command in commands.items():
        chosen = {option: choices for option, choices in command.options.items() if choices}
        lines += [
            f'        *\\ {name}\\ {option}) choices="{" ".join(choices)}" ;;' for option, choices in chosen.items()
        ]
        lines.append(f'        *\\ {name}\\ *) choices="{" ".join((*command.options, *command.words))}"; files=yes ;;')
    return "".join([_BASH_HEAD, *(f"{line}\n" for line in lines), _BASH_TAIL])


def _fish(commands: Mapping[str, Command]) -> str:
    lines: list[str] = []
    for name, command in commands.items():
        text = command.help.replace("'", "\\'")
        lines.append(f"complete -c fusion -n __fish_use_subcommand -f -a {name} -d '{text}'")
        within = f"complete -c fusion -n '__fish_seen_subcommand_from {name}'"
        for option, choices in command.options.items():
            kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            lines.append(f"{within} {kind}" + (f" -x -a '{' '.join(choices)}'" if choices else ""))
        if command.words:
            lines.append(f"{within} -f -a '{' '.join(command.words)}'")
    return "".join(f"{line}\n" for line in lines)
