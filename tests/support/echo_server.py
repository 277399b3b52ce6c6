"""dflash-serve with a fake core: scheduler, drafts, engine process and HTTP are real.

The model answers with the text between the last two SAY characters of the prompt, which ends with
MARK. As a script, this file is the server if --port is an argument, else the engine process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fakes import END, FakeModel, FakeSequence
from vocabularies import byte_level, write

from dflash_gguf.serve import engine_client, worker
from dflash_gguf.serve.command import main as serve
from dflash_gguf.text.tokenizer import Tokenizer

SAY, MARK = "\x02", "\x01"
N_CTX = 8192
SHOWN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.id }}={{ c.function.name }}:{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
TEMPLATE = "{{ tools | tojson }}" + SHOWN + MARK
"""Shows tools, calls and results. A family's marks may follow in a comment."""


def model_file(folder: Path) -> Path:
    """Writes a model's file, which has a vocabulary and no weights."""
    return write(folder / "echo.gguf", byte_level(add_bos_token=False, chat_template=TEMPLATE))


class Echo(FakeSequence):
    """A sequence that says what its prompt asks for."""

    def __init__(self) -> None:
        super().__init__(FakeModel(), b"", ord(MARK), N_CTX, block_size=8)

    def _next(self, tokens: Sequence[int]) -> tuple[int, int]:
        mark = max((i for i, token in enumerate(tokens) if token == self.mark), default=-1)
        ends = [i for i, token in enumerate(tokens[: mark + 1]) if token == ord(SAY)][-2:]
        script = tokens[ends[0] + 1 : ends[1]] if len(ends) == 2 else []
        since = len(tokens) - 1 - mark
        return (script[since] if since < len(script) else END), since


def open_decoder(request: Any, progress: object) -> tuple[worker.Decoder, list[str]]:  # noqa: ARG001
    tokenizer = Tokenizer.from_file(request.model)
    sequence: Any = Echo()
    return worker.Decoder(sequence, tokenizer), []


def main() -> int:
    """Runs the server, whose engine process is this script."""
    engine_client.module_command = lambda _: [sys.executable, __file__]
    return serve()


if __name__ == "__main__":
    if "--port" in sys.argv:
        sys.exit(main())
    worker.open_decoder, worker.check = open_decoder, lambda _: None
    os._exit(worker.main(int(sys.argv[1])))
