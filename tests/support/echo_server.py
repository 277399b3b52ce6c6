"""dflash-serve with a fake core: scheduler, drafts, engine process and HTTP are real.

The model answers with the text between the last two SAY characters of the prompt, which ends with
MARK. With DFLASH_SCRIPT it answers by the JSON file of this name, a list: with the entry behind as
many as the prompt has results of tools, in the form of SCRIPTED; with the last one if the request
has no tools. An entry is a text, or a list of texts for the first request, the second and so on;
the last one serves all later requests. As a script, this file is the server if --port is an
argument, else the engine process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
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
N_CTX = int(os.environ.get("DFLASH_N_CTX", 1 << 17))
FAILS, DIES = 0, 4
"""Bytes at which an answer fails, and at which the engine process ends."""
PAUSE = "\x03"
"""Character of a prompt that takes PAUSE_S seconds to compute."""
PAUSE_S = 2.5
LOAD_S, PREFILL_S = (float(os.environ.get(f"DFLASH_{x}_S", "0")) for x in ("LOAD", "PREFILL"))
"""Seconds that loading takes, and the first prompt with tools."""
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
        self._answers: list[Any] = []
        self._asked: Counter[str] = Counter()
        if self._file and Path(f"{self._file}.asked").exists():  # of an engine process before
            self._asked.update(Path(f"{self._file}.asked").read_text().split())

    def append(self, tokens: Sequence[int]) -> None:
        time.sleep(PAUSE_S * (ord(PAUSE) in tokens))
        super().append(tokens)
        if self._file and ord(MARK) in tokens:  # a test may change the file between requests
            self._answers = json.loads(Path(self._file).read_text())
            place = str(self._place(self.tokens))
            self._asked[place] += 1
            with open(f"{self._file}.asked", "a") as file:
                file.write(f"{place}\n")
            time.sleep(PREFILL_S * (place == "0" and self._asked[place] == 1))

    def _place(self, prompt: Sequence[int]) -> int:
        """Returns the index of the script's entry for a prompt; -1: the last one, without tools."""
        text = bytes(token for token in prompt if token < 256)
        if TOOLS.encode() not in text:
            return -1
        return min(text.count(RESULT.encode()), len(self._answers) - 1)

    def _script(self, prompt: Sequence[int]) -> Sequence[int]:
        if self._answers:
            place = self._place(prompt)
            answer = self._answers[place]
            texts = [answer] if isinstance(answer, str) else answer
            return texts[min(self._asked[str(place)], len(texts)) - 1].encode()
        ends = [i for i, token in enumerate(prompt) if token == ord(SAY)][-2:]
        return prompt[ends[0] + 1 : ends[1]] if len(ends) == 2 else []

    def _next(self, tokens: Sequence[int]) -> tuple[int, int]:
        since = n_since(tokens, self.mark)
        script = self._script(tokens[: len(tokens) - since])
        said = script[since] if since < len(script) else END
        if said == FAILS:
            raise Error("the device is gone")
        if said == DIES:
            os._exit(1)
        return said, since


def open_decoder(request: Any, progress: object) -> tuple[worker.Decoder, list[str]]:  # noqa: ARG001
    time.sleep(LOAD_S)
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
