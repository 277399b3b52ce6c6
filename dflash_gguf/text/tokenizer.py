"""Tokenizer and chat templates of a target: llama.cpp's, on a vocabulary that was checked first."""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .._stack import run_with_stack
from .._validate import flag
from ..config import DecodeConfig
from ..convert.schema import Key
from .chat import (
    ChatPrompt,
    Message,
    check_tools_shown,
    conversation,
    last_asked,
    with_reasoning_names,
)
from .gguf_metadata import GgufMetadata
from .reasoning import Format, format_of
from .stream import n_common
from .template_process import TemplateProcess
from .tools.calls import FAMILIES_WITH_IDS, with_known_ids
from .tools.formats import family_of
from .tools.grammar_writer import json_rule, literal
from .tools.grammars import call_grammar, is_marked
from .tools.input_grammar import InputGrammar
from .tools.offer import described, shows_tools, strict_names, tool_format, tools_of, without_calls
from .tools.parser import ToolFormat
from .vocabulary import BYTE, CONTROL, GPT2, NORMAL, Vocabulary, read_vocabulary

_unopened: Exception | None = None
try:
    import llama_cpp
except (
    RuntimeError
) as error:  # llama.cpp lacks a library, such as CUDA's; loading a tokenizer raises the error
    _unopened = error

TOOL_USE = "tool_use"
"""Name of a file's template for conversations with tools."""
PIECE_BYTES = 256
LOG_LEVEL_ERROR = 4
MAX_TEXT_BYTES = (1 << 31) - (1 << 20)
PLAIN_RUN = 4096
"""Longest run of characters without a word boundary that is tokenized on the caller's stack."""
STACK_BYTES_PER_CHARACTER = 640
"""Bytes of stack for std::regex, by which llama.cpp splits text for many tokenizers: std::regex
recurses for each character of a word. Twice the 312 bytes measured with libstdc++ 12."""
MAX_RUN = 1 << 20
_EOG_MARKS = (b"<", b"[")
"""Every text that llama.cpp takes for an end-of-generation token has one of these characters."""

_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_load_lock = threading.Lock()
_log_errors: list[str] = []


@_LogCallback  # type: ignore[untyped-decorator]
def _keep_errors(level: int, text: bytes, _data: Any) -> None:
    """Drops log messages of llama.cpp, but keeps errors for the exception of a failed load."""
    if level == LOG_LEVEL_ERROR:
        _log_errors.append(text.decode("utf-8", "replace").strip())


@_LogCallback  # type: ignore[untyped-decorator]
def _print_errors(level: int, text: bytes, _data: Any) -> None:
    """Prints logged errors, as ggml reports a device's error only to the log before it aborts."""
    if level == LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode("utf-8", "replace"))


class Tokenizer:
    """The tokenizer and chat templates of one GGUF file. Threads may share a tokenizer."""

    def __init__(self, vocabulary: Vocabulary, name: str = "tokenizer") -> None:
        """Loads a checked vocabulary; ValueError if llama.cpp refuses it. name: for messages."""
        self._vocabulary = vocabulary
        self._pieces: dict[tuple[int, bool], bytes] = {}
        model = _load(vocabulary, name)
        self._free = weakref.finalize(self, llama_cpp.llama_model_free, model)
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self._templates = TemplateProcess()
        self.stop_tokens = self._stop_tokens()
        self.suppressed_tokens = vocabulary.suppressed

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Tokenizer | None:
        """Loads the tokenizer of a GGUF file, None if it has none; ValueError for a bad file."""
        with GgufMetadata(path) as file:
            vocabulary = read_vocabulary(file)
        return None if vocabulary is None else cls(vocabulary, os.fspath(path))

    def close(self) -> None:
        """Frees the tokenizer, which then raises ValueError; closing twice is harmless."""
        self._pieces.clear()
        self.end_templates()
        self._free()

    def end_templates(self) -> None:
        """Ends the process of the chat templates; `chat_text` fails if it waits for it."""
        self._templates.close()

    @property
    def n_tokens(self) -> int:
        return len(self._vocabulary.tokens)

    @cached_property
    def max_token_bytes(self) -> int:
        """Most bytes of a text that one token stands for; at least 1."""
        return max(map(len, self._vocabulary.tokens), default=1) or 1

    @property
    def templates(self) -> dict[str, str]:
        """The Jinja chat templates in the file by name; the default one is ""."""
        return self._vocabulary.templates

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Returns the token ids of a text.

        add_special: True to add the BOS and EOS tokens that the model asks for. parse_special: True
        to turn names of control tokens in the text into these tokens.
        Errors: ValueError for invalid Unicode, or text of more than MAX_TEXT_BYTES.
        """
        data = _encoded(text)
        if len(data) > MAX_TEXT_BYTES:
            raise ValueError(f"the text has {len(data)} bytes, the limit is {MAX_TEXT_BYTES}")
        vocab = self._open()

        def run() -> list[int]:
            size = len(data) + 16
            while True:
                out = (llama_cpp.llama_token * size)()
                n = llama_cpp.llama_tokenize(
                    vocab, data, len(data), out, size, add_special, parse_special
                )
                if n >= 0:
                    return list(out[:n])
                size = -n

        n_run = _longest_run(text)
        return run() if n_run <= PLAIN_RUN else _with_stack(run, n_run)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Returns the bytes a token adds to a text; none for a control token unless `special`.

        ValueError for an id outside the vocabulary.
        """
        known = self._pieces.get((token, special))
        if known is None:
            known = self._pieces[token, special] = self._new_piece(token, special)
        return known

    def _new_piece(self, token: int, special: bool) -> bytes:
        if not 0 <= token < self.n_tokens:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.n_tokens}")
        size = PIECE_BYTES
        while True:
            out = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(self._open(), token, out, size, 0, special)
            if n >= 0:
                return out.raw[:n]
            size = -n

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Returns the text of tokens, with U+FFFD for invalid bytes.

        A leading space is dropped if the tokenizer puts one before each text. special: True to
        include the names of control tokens. ValueError for an id outside the vocabulary.
        """
        pieces = [self.piece(int(token), special=special) for token in tokens]
        data = b"".join(pieces)
        prefixed = self._vocabulary.flags[Key.TOKENIZER_ADD_SPACE_PREFIX]
        if prefixed and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def special_text(self, key: str) -> str | None:
        """Returns the text of a special token by its metadata key, None if the model has none."""
        token = self._vocabulary.ids.get(key)
        return None if token is None else self._vocabulary.tokens[token].decode()

    def chat(
        self,
        messages: Sequence[Message],
        *,
        template: str | None = None,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parallel_tool_calls: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Returns the token ids of a conversation, and the form of reasoning and calls after it.

        Arguments and errors as for `chat_text`, but messages may have any form that `conversation`
        accepts, and tools any that `tools_of` accepts. parallel_tool_calls: False to end the answer
        after one call.
        """
        messages, offered = conversation(messages), tools_of(tools or ())
        text = self.chat_text(
            messages,
            template=template,
            enable_thinking=enable_thinking,
            tools=offered or None,
            variables=variables,
        )
        return self.chat_tokens(
            text,
            template=template,
            asked=last_asked(messages),
            tools=self.tool_format(
                offered,
                messages,
                template=template,
                is_parallel=parallel_tool_calls,
                strict=strict_names(tools or ()),
            ),
        )

    def tool_format(
        self,
        tools: Sequence[dict[str, Any]],
        messages: Sequence[Message],
        *,
        template: str | None = None,
        is_parallel: bool = True,
        strict: Sequence[str] = (),
        allowed: Sequence[str] | None = None,
        inputs: Mapping[str, InputGrammar] | None = None,
    ) -> ToolFormat | None:
        """Returns the form of calls in an answer to a conversation; None without tools.

        tools: as `tools_of` returns them. messages: as `conversation` returns them. strict,
        allowed, inputs: see `ToolFormat`.
        """
        if not tools:
            return None
        source = self.jinja(template, has_tools=True) or ""
        return tool_format(
            source,
            tools,
            messages,
            is_parallel=is_parallel,
            strict=strict,
            allowed=allowed,
            inputs=inputs,
        )

    def with_calls(
        self, config: DecodeConfig, tools: ToolFormat, *, is_required: bool = False
    ) -> tuple[DecodeConfig, ToolFormat]:
        """Returns the settings of an answer to a conversation, and its tools with their grammar.

        is_required: True if the answer must be a call; else it may be JSON by the schema in the
        settings instead. Calls of strict tools fit their schema.
        Errors: ValueError if a call is required beside a grammar or a regex, and if ignore_eos is
            set, as the grammar of calls decides where the answer ends.
        """
        free = config.constraint
        bound = {*tools.strict, *tools.inputs}
        if tools.grammar or not tools.names:
            return config, tools
        if is_required:
            if free is not None and free.kind != "json_schema":
                raise ValueError(
                    f"tool_choice asks for a call, but {free.field} leaves no room for calls: "
                    "leave one out"
                )
            grammar = self.call_grammar(tools)
        elif free is not None and free.kind == "json_schema":
            schema = json.loads(free.text)
            answer = json_rule(schema if isinstance(schema, dict) else {}, is_strict=free.is_strict)
            grammar = self.call_grammar(tools, answer)
        elif free is None and is_marked(tools) and not bound.isdisjoint(tools.names):
            grammar = self.call_grammar(tools, is_free=True)
        else:
            return config, tools
        if config.ignore_eos:
            raise ValueError(
                "ignore_eos is true, but calls of tools decide where the answer ends: leave one out"
            )
        bare = replace(config, response_format=None, json_schema=None, regex=None, grammar=None)
        return bare, tools._replace(grammar=grammar)

    def call_grammar(
        self,
        tools: ToolFormat,
        answer: str | None = None,
        *,
        is_free: bool = False,
    ) -> str:
        """Returns a grammar of answers that are calls of tools. See `call_grammar`."""

        def term(mark: str) -> str:
            tokens = self.tokenize(mark, add_special=False)
            is_control = len(tokens) == 1 and not self.piece(tokens[0])
            return f"<[{tokens[0]}]>" if is_control else literal(mark)

        return call_grammar(tools, answer=answer, is_free=is_free, mark=term)

    def chat_tokens(
        self,
        text: str,
        *,
        template: str | None = None,
        asked: str = "",
        tools: ToolFormat | None = None,
    ) -> ChatPrompt:
        """Tokenizes the text of `chat_text`, to which the caller may have appended more.

        asked: text of the last user turn. Turn boundaries are at its ends: clients may edit the
        turn, and templates may render the text after it differently later. tools: of `tool_format`.
        """
        bos = self.special_text(Key.TOKENIZER_BOS_ID)
        add_special = bos is None or not text.startswith(bos)
        at = text.rfind(asked) if asked else -1
        cut = self._cut(text, at)
        head = self.tokenize(text[:cut], add_special=add_special) if cut else []
        # The text before the cut is tokenized once, not once for each turn boundary: this halves
        # the time of a long prompt.
        rest, add_special = text[cut:], add_special and not cut
        tail = self.tokenize(rest, add_special=add_special)
        turn_boundaries: list[int] = []
        for end in (at, at + len(asked)) if at >= 0 else ():
            before = self.tokenize(rest[: end - cut], add_special=add_special)
            turn_boundaries.append(len(head) + n_common(before, tail))
        reasoning = self.chat_format(text, template=template, has_tools=tools is not None)
        return ChatPrompt(head + tail, reasoning, turn_boundaries, tools, asked)

    def _cut(self, text: str, end: int) -> int:
        """Returns the position of the last control token before `end`, 0 if there is none.

        The texts before and behind it have the same tokens as the whole text.
        """
        if end < 0 or self._vocabulary.flags.get(Key.TOKENIZER_ADD_EOS):
            return 0
        return max(0, 0, *(text.rfind(mark, 0, end) for mark in self._cut_marks))

    @cached_property
    def _cut_marks(self) -> list[str]:
        """Texts of control tokens that overlap with no end of another token that is no text."""
        types = self._vocabulary.types
        if types is None:
            return []
        special = [
            (self._vocabulary.tokens[i].decode("utf-8", "replace"), types[i])
            for i in np.flatnonzero((types != NORMAL) & (types != BYTE))
        ]
        inner = {character for text, _ in special for character in text[1:]}
        return [text for text, kind in special if kind == CONTROL and text[:1] not in inner | {""}]

    def chat_format(
        self, text: str, *, template: str | None = None, has_tools: bool = False
    ) -> Format | None:
        """Returns how answers to a text of `chat_text` mark reasoning; None if they do not."""
        return format_of(self.jinja(template, has_tools=has_tools) or "", text)

    def chat_text(
        self,
        messages: Sequence[Message],
        *,
        template: str | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt of a conversation as text.

        messages: as `conversation` returns them. template: None for the model's default; else the
        name of a template in the file or of one built into llama.cpp ("chatml", ...), a file with a
        Jinja template, or its text. add_generation_prompt: True to end the text where the answer
        begins, False after the last message. tools: as `tools_of` returns them; a template that
        shows no tools gets them as text of the system message, and calls and results that it drops
        or refuses as text too. Other arguments: as for
        `chat.render`.
        Errors: ValueError for an unknown template, or messages that the template refuses.
        """
        if enable_thinking is not None:
            flag("enable_thinking", enable_thinking)
        source = self.jinja(template, has_tools=bool(tools))
        if tools and not shows_tools(source or ""):
            family = tool_format(source or "", tools, messages, is_parallel=True).family
            messages, tools = described(messages, tools, family), None
        if (family := family_of(source or "")) in FAMILIES_WITH_IDS:
            messages = with_known_ids(messages, family)
        messages = with_reasoning_names(messages, source or "")
        specials = {
            name: text
            for name, key in (
                ("bos_token", Key.TOKENIZER_BOS_ID),
                ("eos_token", Key.TOKENIZER_EOS_ID),
                ("unk_token", Key.TOKENIZER_UNK_ID),
                ("pad_token", Key.TOKENIZER_PAD_ID),
            )
            if (text := self.special_text(key)) is not None
        }
        specials = {"bos_token": "", "eos_token": ""} | specials

        def text_of(messages: Sequence[Message]) -> str:
            if source is None:
                return _builtin(template or "", messages, add_generation_prompt)
            return self._templates.render(
                source,
                messages,
                special_tokens=specials,
                enable_thinking=enable_thinking,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                variables=variables,
            )

        try:
            text = text_of(messages)
            check_tools_shown(messages, text, text_of)
        except ValueError:
            plain = without_calls(messages)
            if plain == messages or shows_tools(source or ""):
                raise
            return text_of(plain)
        return text

    def jinja(self, choice: str | None, *, has_tools: bool = False) -> str | None:
        """Returns the Jinja text of a template argument; None for one built into llama.cpp.

        has_tools: True to prefer the file's template "tool_use" to a default one without tools.
        """
        if choice is None:
            if has_tools and TOOL_USE in self.templates:
                return self.templates[TOOL_USE]
            if not self.templates.get(""):
                raise ValueError(
                    "the model has no chat template: name one, for example chatml, with template= "
                    "or --chat-template"
                )
            return self.templates[""]
        return find_template(choice, self.templates)

    def _stop_tokens(self) -> frozenset[int]:
        """Returns llama.cpp's end-of-generation ids, but not 11, its guess for a missing EOS id."""
        tokens, types = self._vocabulary.tokens, self._vocabulary.types
        candidates = {t for t, text in enumerate(tokens) if any(m in text for m in _EOG_MARKS)}
        candidates |= set(self._vocabulary.ids.values())
        if types is not None:
            candidates |= set(np.flatnonzero(types != NORMAL).tolist())
        ends = llama_cpp.llama_vocab_eos, llama_cpp.llama_vocab_eot
        candidates |= {end(self._vocab) for end in ends}
        stop = {t for t in candidates if llama_cpp.llama_vocab_is_eog(self._vocab, t)}
        if self._vocabulary.model == GPT2 and Key.TOKENIZER_EOS_ID not in self._vocabulary.ids:
            stop -= {t for t in stop & {11} if not any(m in tokens[t] for m in _EOG_MARKS)}
        return frozenset(stop)

    def _open(self) -> Any:
        if not self._free.alive:
            raise ValueError("the tokenizer is closed")
        return self._vocab


def find_template(choice: str, own: Mapping[str, str]) -> str | None:
    """Returns the Jinja text of a template argument; None for a template built into llama.cpp.

    own: the templates of the model's file by name. ValueError if there is no such template.
    """
    if choice in own:
        return own[choice]
    if choice in _builtin_names():
        return None
    if "{%" in choice or "{{" in choice:
        return choice
    try:
        return Path(choice).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"the chat template {choice} is not valid UTF-8") from None
    except (OSError, ValueError) as error:
        names = ", ".join([*filter(None, own), *_builtin_names()])
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"the chat template {choice!r:.200} is no file that can be read ({why}) "
            f"and none of: {names}"
        ) from None


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half of a surrogate pair, not valid Unicode") from None


def _longest_run(text: str) -> int:
    """Returns an upper bound of the characters in a pre-token: a word and white space beside it."""
    if len(text) <= PLAIN_RUN:
        return len(text)
    return 2 * max(match.end() - match.start() for match in re.finditer(r"\S+|\s+", text))


def _with_stack(run: Callable[[], list[int]], n_run: int) -> list[int]:
    """Tokenizes by `run` in a thread with stack for a recursion over n_run characters."""
    if n_run > 2 * MAX_RUN:
        raise ValueError(
            f"the text holds {n_run // 2} characters without a word boundary, "
            f"the limit is {MAX_RUN}"
        )
    try:
        return run_with_stack(run, (1 << 20) + STACK_BYTES_PER_CHARACTER * n_run)
    except MemoryError:
        raise ValueError(
            f"no memory to tokenize {n_run // 2} characters without a word boundary"
        ) from None


def _check_opened() -> None:
    if _unopened is not None:
        raise ValueError(f"llama-cpp-python cannot be used: {_unopened}") from _unopened


def _load(vocabulary: Vocabulary, name: str) -> Any:
    _check_opened()
    with _load_lock:
        _log_errors.clear()
        llama_cpp.llama_log_set(_keep_errors, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        try:
            with _file_of(vocabulary.to_gguf()) as path:
                model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        finally:
            llama_cpp.llama_log_set(_print_errors, ctypes.c_void_p(0))
        if not model:
            reason = "; ".join(_log_errors) or "no reason given"
            raise ValueError(f"{name}: llama.cpp refuses the vocabulary: {reason}")
        return model


@contextmanager
def _file_of(data: bytes) -> Iterator[str]:
    """Yields the path of a file with `data`; on Linux in memory, as no folder may be writable."""
    try:
        descriptor, path = os.memfd_create("dflash-vocabulary"), None
    except (AttributeError, OSError):  # only Linux has memfd_create, and sandboxes refuse it
        try:
            descriptor, path = tempfile.mkstemp(prefix="dflash-", suffix=".gguf")
        except OSError as error:
            raise OSError(f"{error.strerror}: name a writable folder with TMPDIR") from None
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            yield path or f"/proc/self/fd/{descriptor}"
    finally:
        if path is not None:
            os.unlink(path)


def _builtin_names() -> list[str]:
    _check_opened()
    n = llama_cpp.llama_chat_builtin_templates(None, 0)
    names = (ctypes.c_char_p * n)()
    llama_cpp.llama_chat_builtin_templates(names, n)
    return [name.decode() for name in names if name]


def _builtin(name: str, messages: Sequence[Message], add_generation_prompt: bool) -> str:
    chat = (llama_cpp.llama_chat_message * len(messages))()
    for entry, message in zip(chat, messages, strict=True):
        entry.role, entry.content = (_encoded(message[key]) for key in ("role", "content"))
        if "\0" in message["role"] + message["content"]:
            raise ValueError(
                f"a message holds a NUL character, where the chat template {name!r} would end it"
            )
    apply: Callable[..., int] = llama_cpp.llama_chat_apply_template
    size = apply(name.encode(), chat, len(messages), add_generation_prompt, None, 0)
    if size < 0:
        raise ValueError(f"the chat template {name!r} does not take these messages")
    out = ctypes.create_string_buffer(size)
    apply(name.encode(), chat, len(messages), add_generation_prompt, out, size)
    return out.raw[:size].decode("utf-8", "replace")
