"""Settings of each model from the INI file of --models-preset, in llama-server's form.

A section is a model, its keys are flags without dashes, or their environment variables; `[*]` holds
for all models. A flag on the command line overrides both.
"""

from __future__ import annotations

import argparse
import configparser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .arguments import ENVIRONMENT, flag_words, is_on, listed, parser

ALL = "*"
PATHS = ("model", "model-draft")
LOAD, STOP_TIMEOUT = "load-on-startup", "stop-timeout"
"""Keys of llama-server's presets that are no flags; stop-timeout has no effect here."""
SERVER_GROUPS = ("options", "models", "HTTP")
"""Groups of flags that hold for the whole server."""


@dataclass(frozen=True)
class Preset:
    """A section of a presets file. words: flags of the section and of [*], except model files."""

    words: tuple[str, ...] = ()
    model: Path | None = None
    drafters: tuple[Path, ...] = ()
    loads_on_startup: bool = False


def read_presets(path: str) -> dict[str, Preset]:
    """Returns presets by model name; ALL, that of [*], is always there. ValueError if malformed."""
    ini = configparser.RawConfigParser(
        default_section=ALL, delimiters=("=",), inline_comment_prefixes=(";", "#")
    )
    ini.optionxform = str  # type: ignore[assignment, method-assign]
    try:
        lines = Path(path).read_text("utf-8").splitlines()
        ini.read_string("\n".join(["[ ]", *(line.strip() for line in lines)]))
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not valid UTF-8") from None
    except configparser.Error as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    ini.remove_section(" ")  # drops keys before the first section, such as version
    sections: dict[str, dict[str, str]] = {ALL: dict(ini.defaults())}
    sections |= {name: dict(ini.items(name)) for name in ini.sections()}
    return {name: _preset(path, name, values) for name, values in sections.items()}


def _preset(path: str, section: str, values: dict[str, str]) -> Preset:
    p = parser(raises=True)
    words: list[str] = []
    paths: dict[str, str] = {}
    loads = False
    for key, value in values.items():
        place = f"{path}: [{section}] {key}"
        try:
            if key in (LOAD, STOP_TIMEOUT):
                loads = is_on(value, "it") if key == LOAD else loads
                continue
            action, flag = _action(p, key)
            if flag.strip("-") in PATHS:
                paths[flag.strip("-")] = value
                continue
            given = flag_words(action, flag, value, "it")
            p.parse_args(given)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        words += given
    model = Path(paths["model"]) if "model" in paths else None
    drafters = tuple(Path(file) for file in listed(paths.get("model-draft")))
    return Preset(tuple(words), model, drafters, loads)


def _action(p: argparse.ArgumentParser, key: str) -> tuple[argparse.Action, str]:
    """Returns a preset key's argparse action and longest flag. ValueError for an unknown key."""
    names = (ENVIRONMENT.get(key), f"--{key}", f"-{key}")
    for group in p._action_groups:
        for action in group._group_actions:
            flag = next((name for name in names if name in action.option_strings), None)
            if flag is None:
                continue
            longest = next((x for x in action.option_strings if x.startswith("--")), flag)
            if group.title in SERVER_GROUPS and longest.strip("-") not in PATHS:
                raise ValueError("is for the whole server, give it on the command line")
            is_off = flag.startswith("--no-") and action.nargs == 0
            return action, flag if is_off else longest
    raise ValueError("is no flag of dflash-serve")


def arguments_of(preset: Preset, command_line: Sequence[str]) -> argparse.Namespace:
    """Returns the flags of a model: its preset, overridden by the command line."""
    return parser(raises=True).parse_args([*preset.words, *command_line])
