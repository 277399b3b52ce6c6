"""dflash-serve with a script in place of the engine process: all but the tokens is real.

Run as a program, takes the flags of dflash-serve. The script is the JSON file that DFLASH_SCRIPT
names: a list of answers as the model would write them. The answer to a request is the one behind as
many as the conversation has tool results; without tools in the request, it is a title.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from scripted import STOP, Bytes

from dflash_gguf.config import DecodeConfig
from dflash_gguf.engine.output_processor import OutputProcessor
from dflash_gguf.serve import command
from dflash_gguf.serve.engine_client import EngineClient
from dflash_gguf.serve.messages import (
    Ask,
    Cancel,
    Ended,
    Message,
    Prefilled,
    Ready,
    ResultStats,
    Run,
    Started,
    Stepped,
)
from dflash_gguf.text.reasoning import Format
from dflash_gguf.text.tokenizer import Tokenizer

N_CTX = 1 << 17
N_BYTES = 5
"""Bytes of the script that come in one round."""
RESULT = "<tool_response>"
"""Mark in TEMPLATE before each tool result."""
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('inner system') }}{% endif %}"
    "{% if m.role == 'tool' %}" + RESULT + "{{ m.content }}</tool_response>\n{% else %}"
    "{{ m.role }}: {% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n"
    "{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class ScriptedEngine(EngineClient):
    """An engine client without a process, which answers by the script."""

    def start(self, prepare: Callable[[], Awaitable[None]], *, waits: bool = False) -> None:  # noqa: ARG002
        self._answers: list[str] = json.loads(Path(os.environ["DFLASH_SCRIPT"]).read_text())
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._tokenizer = Tokenizer.from_file(self.load.model)
        self.state, self._prepare = "loading", prepare
        self._task = asyncio.create_task(self._open())

    async def _open(self) -> None:
        assert self._prepare is not None
        await self._prepare()
        await self._take(Ready("script", None, "script", N_CTX, N_CTX, 1 << 20, 1, 4, []))
        await asyncio.Event().wait()

    def send(self, message: Message) -> None:
        if isinstance(message, Ask):
            for run in message.runs:
                self._tasks[run.id] = asyncio.create_task(self._answer(message, run))
        elif isinstance(message, Cancel) and message.id in self._tasks:
            self._tasks[message.id].cancel()

    async def _answer(self, ask: Ask, run: Run) -> None:
        prompt, n_prompt = ask.prompts[run.prompt], len(ask.prompts[run.prompt].tokens)
        config = DecodeConfig(**{**ask.config, "seed": run.seed})
        reasoning = None if prompt.reasoning is None else Format(*prompt.reasoning)
        output = OutputProcessor(Bytes(), config, N_CTX - n_prompt, reasoning, prompt.tools)

        def stats() -> ResultStats:
            n = len(output.tokens)
            reason = output.stop_reason or "cancelled"
            counts = (n_prompt, n_prompt, 0, n, max(n - 1, 0), n, float(n), 0.1, 0.1)
            drafts = ("none", 0, 0, {}, None)
            return ResultStats(*counts, reason, output.stop_text, run.seed, *drafts)

        try:
            await self._take(Started(run.id, 0))
            await self._take(Prefilled(run.id, 0, n_prompt))
            await self._take(Prefilled(run.id, n_prompt, n_prompt))
            script = [*self._script(prompt.tokens, has_tools=prompt.tools is not None), STOP]
            for at in range(0, len(script), N_BYTES):
                for token in script[at : at + N_BYTES]:
                    if output.push(token):
                        break
                tokens, parts = output.take_new()
                await self._take(Stepped(run.id, list(tokens), list(parts), [], None))
                await asyncio.sleep(0)
                if output.stop_reason is not None:
                    break
        except asyncio.CancelledError:
            pass
        await self._take(Ended(run.id, stats()))

    def _script(self, prompt: list[int], *, has_tools: bool) -> bytes:
        if not has_tools:
            return b"A title"
        assert self._tokenizer is not None
        n_results = self._tokenizer.detokenize(prompt, special=True).count(RESULT)
        return self._answers[min(n_results, len(self._answers) - 1)].encode()


def main(flags: list[str]) -> int:
    command.EngineClient = ScriptedEngine  # type: ignore[misc]
    return command.main(["-m", "python-tiny", "--chat-template", TEMPLATE, *flags])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
