"""dflash-serve with a fake core: scheduler, drafts, engine process and HTTP are real.

The model answers with the text between the last two SAY characters of the prompt, which ends with
MARK. With DFLASH_SCRIPT it answers by the JSON file of this name, a list of texts: with the one
behind as many as the prompt has results of tools, in the form of SCRIPTED; with the last one if the
request has no tools. As a script, this file is the server if --port is an argument, else the engine
process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fakes import END, FakeModel, FakeSequence, n_since
from vocabularies import byte_level, write

from dflash_gguf.native import Error
from dflash_gguf.serve import engine_client, worker
from dflash_gguf.serve.command import main as serve
from dflash_gguf.text.tokenizer import Tokenizer

SAY, MARK = "\x02", "\x01"
N_CTX = 1 << 17
FAILS = 0
"""Byte at which an answer fails."""
PAUSE = "\x03"
"""Character of a prompt that takes PAUSE_S seconds to compute."""
PAUSE_S = 2.5
SHOWN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.id }}={{ c.function.name }}:{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
TEMPLATE = "{{ tools | tojson }}" + SHOWN + MARK
"""Shows tools, calls and results. A family's marks may follow in a comment."""
TOOLS, RESULT = "[tools]", "<tool_response>"
SCRIPTED = (
    "{% if tools %}" + TOOLS + "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('inner system') }}{% endif %}"
    "{% if m.role == 'tool' %}" + RESULT + "{{ m.content }}</tool_response>\n{% else %}"
    "{{ m.role }}: {% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n"
    "{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}\n{% endif %}{% endfor %}" + MARK
)
"""Shows all parts of a conversation, and refuses system messages within it."""


def model_file(folder: Path) -> Path:
    """Writes a model's file, which has a vocabulary and no weights."""
    # Tokens of answers are bytes, as are those of a prompt that tells of them.
    changes = {"add_bos_token": False, "chat_template": TEMPLATE, "merges": ["\u0120 w"]}
    return write(folder / "echo.gguf", byte_level(**changes))


class Echo(FakeSequence):
    """A sequence that says what its prompt asks for."""

    def __init__(self) -> None:
        super().__init__(FakeModel(), b"", ord(MARK), N_CTX, block_size=8)
        self._file = os.environ.get("DFLASH_SCRIPT")
        self._answers: list[str] = []

    def append(self, tokens: Sequence[int]) -> None:
        time.sleep(PAUSE_S * (ord(PAUSE) in tokens))
        if self._file and ord(MARK) in tokens:  # a test may change the file between requests
            self._answers = json.loads(Path(self._file).read_text())
        super().append(tokens)

    def _script(self, prompt: Sequence[int]) -> Sequence[int]:
        if len(self._answers) == 1:
            return self._answers[0].encode()
        if self._answers:
            text = bytes(token for token in prompt if token < 256)
            n_results, n_last = text.count(RESULT.encode()), len(self._answers) - 1
            is_title = TOOLS.encode() not in text
            return self._answers[n_last if is_title else min(n_results, n_last)].encode()
        ends = [i for i, token in enumerate(prompt) if token == ord(SAY)][-2:]
        return prompt[ends[0] + 1 : ends[1]] if len(ends) == 2 else []

    def _next(self, tokens: Sequence[int]) -> tuple[int, int]:
        since = n_since(tokens, self.mark)
        script = self._script(tokens[: len(tokens) - since])
        said = script[since] if since < len(script) else END
        if said == FAILS:
            raise Error("the device is gone")
        return said, since


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
