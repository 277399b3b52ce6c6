"""dflash-run -i: a conversation on the terminal, and its commands."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence

from .._files import message_of
from ..outputs import Result
from .arguments import decoded

Turn = dict[str, str]
HELP = """\
/clear           forget all messages but the system prompt
/system [TEXT]   replace the system prompt and begin a new chat; without TEXT: no system prompt
/regenerate      answer the last message again
/save FILE       write the messages to FILE as JSON, as the server takes them
/help            print this
/exit            end (also Ctrl-D); Ctrl-C ends an answer"""


class Chat:
    """The messages of a conversation, and the commands that change them."""

    def __init__(
        self,
        system: Sequence[Turn],
        prompt_of: Callable[[Sequence[Turn]], list[int]],
        answer: Callable[[list[int]], Result],
    ) -> None:
        """system: the system prompt as a turn, or no turn. prompt_of: ValueError if unfit."""
        self._messages = self._system = list(system)
        self._prompt_of = prompt_of
        self._answer = answer
        self._commands: dict[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/system": self._replace_system,
            "/regenerate": self._regenerate,
            "/regen": self._regenerate,
            "/save": self._save,
            "/help": lambda _: print(HELP, file=sys.stderr),
        }

    def run(self) -> None:
        """Answers messages and runs commands until the input ends; an unfit one changes nothing."""
        while True:
            try:
                text = _ask()
            except (EOFError, KeyboardInterrupt):
                return
            command, _, rest = text.partition(" ")
            if command in ("/exit", "/quit", "/bye"):
                return
            try:
                if command in self._commands:
                    self._commands[command](rest.strip())
                elif re.fullmatch("/[a-z]+", command):
                    raise ValueError(f"{command} is no command")
                elif text:
                    content = decoded(os.fsencode(text), "the message")
                    self._say([*self._messages, {"role": "user", "content": content}])
            except (ValueError, OSError) as error:
                hint = "/clear begins a new chat, /help lists commands"
                print(f"error: {message_of(error)}; {hint}", file=sys.stderr)

    def _say(self, messages: list[Turn]) -> None:
        result = self._answer(self._prompt_of(messages))
        self._messages = [*messages, {"role": "assistant", "content": result.text}]

    def _clear(self, _: str) -> None:
        self._messages = self._system

    def _replace_system(self, text: str) -> None:
        content = decoded(os.fsencode(text), "the system prompt")
        self._messages = self._system = [{"role": "system", "content": content}] if text else []

    def _regenerate(self, _: str) -> None:
        if self._messages[-1:] == self._system[-1:]:
            raise ValueError("/regenerate: there is no answer yet")
        self._say(self._messages[:-1])

    def _save(self, path: str) -> None:
        if not path:
            raise ValueError("/save needs the name of a file")
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"messages": self._messages}, file, ensure_ascii=False, indent=1)
            file.write("\n")
        print(f"{path}: {len(self._messages)} messages", file=sys.stderr)


def _ask() -> str:
    """Reads a line from stdin; in a terminal, after a "> " on stderr."""
    if sys.stdin.isatty() and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() then edits lines and recalls earlier ones

        print("> ", end="", file=sys.stderr, flush=True)
    return input()
