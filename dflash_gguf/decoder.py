"""Decoder: a loaded target, with or without a drafter, that answers prompts."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # C module behind `signal`
import dataclasses
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from . import native
from ._validate import choice, integer, known_names
from .config import RETIRED_FIELDS, Constraint, DecodeConfig
from .engine.request import Request, RequestState, check_prompt
from .engine.scheduler import Scheduler
from .kv_cache import prefix_file
from .kv_cache.prefix_cache import PrefixCache
from .memory.plan import MAX_PREFIX_BYTES
from .native import MAX_VERIFY, Error, Progress
from .outputs import Result
from .sampling.noise import TokenLogprobs
from .speculative.runtime import CostFile, SpeculativeRuntime
from .stream import Stream
from .text.chat import ChatPrompt, Message, template_values
from .text.tokenizer import Tokenizer
from .text.tools.offer import tools_of
from .text.tools.parser import ToolFormat

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .constraints.compiler import CompiledConstraint, ConstraintCompiler
    from .options import DecodeOptions

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]

LISTS = ("draft_type", "stop", "stop_token_ids")
"""Settings whose value may be a list."""
ENDED = "this stream was ended by a later call: load with n_parallel above 1 to run several"
CLOSED = "the decoder was closed before this answer was finished"


class Decoder:
    """A loaded target that answers up to `n_parallel` prompts at once. Threads may share a decoder.

    Earlier prompts and answers stay in the prefix cache as long as memory allows (docs/memory.md):
    a prompt that begins like one of them is computed only from where the two diverge.

    Callbacks of a method must not use the decoder, which raises RuntimeError then. After `close`
    new requests raise Error.
    """

    def __init__(
        self,
        sequence: native.Sequence,
        tokenizer: Tokenizer | None,
        cost_file: CostFile | None = None,
        max_verify_rows: int = MAX_VERIFY,
        prefix_bytes: int = MAX_PREFIX_BYTES,
        recommended: Mapping[str, float] | None = None,
    ) -> None:
        """Use `load`. Without a tokenizer prompts are token ids, and answers have no text.

        cost_file: file of measured costs; None to keep none. max_verify_rows: most rows of a verify
        by default. prefix_bytes: bytes of main memory for the prefix cache. recommended: values of
        DecodeConfig's fields that the model's file recommends.
        """
        self.sequence = sequence
        self.engine = sequence.engine
        self.model = sequence.engine.model
        self.tokenizer = tokenizer
        self._speculative = SpeculativeRuntime(sequence, cost_file, max_verify_rows)
        self._lock = threading.RLock()
        self._is_running = self._is_closed = False
        self._prefix_cache = PrefixCache(self.engine, prefix_bytes)
        self._scheduler = Scheduler(sequence, self._prefix_cache, _PaddedVocabulary(tokenizer))
        self.recommended = dict(recommended or {})
        self._unfinished: RequestState | None = None  # unread stream, which the next request ends

    def __repr__(self) -> str:
        drafter = f" with {self.drafter}" if self.drafter else ""
        model = os.path.basename(self.model.path)
        return f"<Decoder {model}{drafter}, {self.n_ctx} tokens, {self.model.backend}>"

    @property
    def drafter(self) -> str | None:
        """Names of the drafters' files, joined by " + "; None without a drafter."""
        return " + ".join([os.path.basename(x.path) for x in self.engine.drafters]) or None

    @property
    def n_ctx(self) -> int:
        """Tokens the context holds: the prompts and answers of all running requests together."""
        return self.sequence.n_ctx

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the model; unfinished streams raise RuntimeError. Closing twice is harmless."""
        with self._turn():
            self._is_closed = True
            self._speculative.save(1)
            self._scheduler.close(RuntimeError(CLOSED))
            self.sequence.close()
            self.engine.close()
            self.model.close()
            if self.tokenizer is not None:
                self.tokenizer.close()

    def measure(self) -> None:
        """Measures the costs of rounds for up to 0.5 s if none are known. `load` calls this."""
        with self._turn(), self._idle_sequence():
            self._speculative.measure()

    def check(self, config: DecodeConfig) -> None:
        """Raises ValueError for draft settings that this decoder's proposers cannot serve."""
        with self._turn():
            self._speculative.controller(config)

    def generate(
        self,
        prompt: Prompt,
        config: DecodeConfig | None = None,
        *,
        cancelled: Callable[[], bool] | None = None,
        on_prefill: Progress | None = None,
        **settings: Unpack[DecodeOptions],
    ) -> Result:
        """Answers a prompt.

        prompt: text, to which the model's special tokens are added, or a list or array [n] of ids.
        config, settings: a DecodeConfig, and fields that replace its own. Without a config, fields
            that are not given have the values of `recommended`, else DecodeConfig's.
        cancelled: called before every round; True ends the answer with stop_reason "cancelled".
        on_prefill: called with (tokens done, tokens in all) before and during the computation of
            the uncached part of the prompt.
        Errors: ValueError for a bad setting, an empty prompt or one longer than the context; Error
            from the core; RuntimeError if a later call ended the answer. The decoder stays usable.
        """
        stream = self.begin(self.request(prompt, config, **settings), cancelled, on_prefill)
        try:
            for _ in stream:
                pass
        finally:
            stream.close()
        return stream.result()

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        config: DecodeConfig | None = None,
        *,
        cancelled: Callable[[], bool] | None = None,
        progress: Progress | None = None,
        on_result: Callable[[int, Result], None] | None = None,
        **settings: Any,
    ) -> list[Result]:
        """Answers prompts, `n_parallel` at once. Returns the results in the order of the prompts.

        settings: as for `generate`; a list has one value for each prompt (`seed=[1, 2, 3]`). In a
            list of texts or numbers, stop, stop_token_ids and draft_type are for all prompts.
        progress: called with (answers done, answers in all). on_result: called with the index of a
            prompt and its result as soon as the answer ends; answers end in any order.
        Errors: as for `generate`. A bad prompt or setting is raised before any answer begins; an
            error of one answer ends all the others.
        """
        if isinstance(prompts, (str, bytes)):
            raise ValueError(f"prompts is {prompts!r:.80}, must be a list of prompts")
        shared: dict[str, Any] = {
            name: tuple(x) if isinstance(x, Iterator) else x
            for name, x in settings.items()
            if not _is_by_prompt(name, x)
        }
        lists = {name: x for name, x in settings.items() if _is_by_prompt(name, x)}
        for name, values in lists.items():
            if len(values) != len(prompts):
                raise ValueError(f"{name} has {len(values)} values for {len(prompts)} prompts")
        requests: list[Request] = []
        for i, prompt in enumerate(prompts):
            own = {name: values[i] for name, values in lists.items()}
            try:
                requests.append(self.request(prompt, config, **shared | own))
                if lists:
                    self.check(requests[-1].config)
            except ValueError as error:
                raise ValueError(f"prompt {i + 1} of {len(prompts)}: {error}") from None
        results: list[Result | None] = [None] * len(requests)
        live: dict[int, RequestState] = {}
        logprobs: list[list[TokenLogprobs]] = [[] for _ in requests]
        n_begun = n_done = 0
        try:
            while n_done < len(requests):
                with self._turn(runs=True):
                    # Add only as many requests as can run: each batch examines the waiting ones.
                    while n_begun < len(requests) and len(live) < self.engine.n_parallel:
                        live[n_begun] = self._add(requests[n_begun], cancelled)
                        if n_begun == 0:
                            self._end_unfinished()
                        n_begun += 1
                    self._scheduler.step()
                for i, state in list(live.items()):
                    logprobs[i] += [chance for step in state.steps for chance in step.logprobs]
                    state.steps.clear()
                    if not state.is_finished:
                        continue
                    del live[i]
                    if state.error is not None:
                        raise state.error
                    found = self.result(state)
                    result = dataclasses.replace(found, logprobs=tuple(logprobs[i]))
                    results[i] = result
                    n_done += 1
                    if on_result is not None:
                        on_result(i, result)
                    if progress is not None:
                        progress(n_done, len(requests))
        finally:
            with self._turn():
                self._scheduler.abort_all(live.values())
        return [result for result in results if result is not None]

    def stream(
        self,
        prompt: Prompt,
        config: DecodeConfig | None = None,
        *,
        cancelled: Callable[[], bool] | None = None,
        on_prefill: Progress | None = None,
        **settings: Unpack[DecodeOptions],
    ) -> Stream:
        """Answers a prompt step by step; arguments and errors as for `generate`.

        Up to `n_parallel` streams run at once and later ones wait; if `n_parallel` is 1, a later
        call ends an unfinished stream. Streams may be iterated in any order, each by one thread at
        a time: the thread that waits for a step runs the batch for every request. A stream pauses
        while 256 of its tokens are unread. A stream without room in the context waits, or is
        preempted and resumed with the same text.
        """
        stream = self.begin(self.request(prompt, config, **settings), cancelled, on_prefill)
        if self.engine.n_parallel == 1:
            self._unfinished = stream.state
        return stream

    # ---- requests, for programs that call step() in a loop of their own

    def request(
        self,
        prompt: Prompt,
        config: DecodeConfig | None = None,
        *,
        scope: str = "",
        client: str = "",
        **settings: Unpack[DecodeOptions],
    ) -> Request:
        """Returns a validated request, see `generate`; ValueError for a bad prompt or setting.

        scope, client: see `Request`.
        """
        self._check_open()
        config = self._config(config, settings)
        tokens = tuple(self._tokens_of(prompt))
        check_prompt(tokens, self.n_ctx)
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(config, name):
                integer(f"a token of {name}", token, 0, self.model.n_vocab - 1)
        tools = prompt.tools if isinstance(prompt, ChatPrompt) else None
        if tools is not None:
            config, tools = self._need_tokenizer().with_calls(config, tools)
        constraint = self.compile_constraint(config, tools)
        if isinstance(prompt, ChatPrompt):
            return Request(
                tokens,
                config,
                prompt.reasoning,
                prompt.turn_boundaries,
                scope,
                client,
                tools,
                constraint,
            )
        return Request(tokens, config, scope=scope, client=client, constraint=constraint)

    def _config(self, config: DecodeConfig | None, settings: Mapping[str, Any]) -> DecodeConfig:
        known_names(settings, (*DecodeConfig.__slots__, *RETIRED_FIELDS), "setting of an answer")
        if config is not None and not isinstance(config, DecodeConfig):
            raise TypeError(f"config is {config!r:.80}, must be a DecodeConfig")
        if config is None:
            given: dict[str, Any] = {**self.recommended, **settings}
            return DecodeConfig(**given)
        return dataclasses.replace(config, **settings) if settings else config

    def compile_constraint(
        self, config: DecodeConfig, tools: ToolFormat | None = None
    ) -> CompiledConstraint | None:
        """Returns the compiled constraint of a config or of tools, None if answers are free.

        The latest constraints are kept. The first one of a decoder takes a second for a large
        vocabulary.
        Errors: ValueError for a constraint that is malformed or too large.
        """
        constraint = config.constraint
        if tools is not None and tools.grammar:
            constraint = Constraint("grammar", tools.grammar, True, "tools")
        if constraint is None:
            return None
        if self.tokenizer is None:
            raise ValueError(f"{constraint.field}: the model file has no tokenizer")
        return self._compiler.compile(constraint)

    @cached_property
    def _compiler(self) -> ConstraintCompiler:
        from .constraints.compiler import ConstraintCompiler  # loads llguidance

        return ConstraintCompiler(self._need_tokenizer(), self.model.n_vocab)

    def add_request(
        self,
        request: Request,
        *,
        cancelled: Callable[[], bool] | None = None,
        on_prefill: Progress | None = None,
    ) -> RequestState:
        """Adds a request that `step` will run; the callbacks are those of `generate`.

        The caller takes the answer from the list `steps` of the returned state, until the state
        `is_finished`; its `error` is then the exception that ended the request, or None.
        Errors: ValueError for draft settings that this decoder's proposers cannot serve.
        """
        with self._turn():
            return self._add(request, cancelled, on_prefill)

    def step(self) -> None:
        """Runs one batch for all requests. Errors of a single request go to its state instead."""
        with self._turn(runs=True):
            self._check_open()
            self._scheduler.step()

    def abort(self, state: RequestState) -> None:
        """Ends a waiting or running request; a finished one stays as it is."""
        with self._turn():
            self._scheduler.abort(state)

    def result(self, state: RequestState) -> Result:
        """Returns the result of a request so far, which is final once the request has finished."""
        of_drafters: Counter[str] = Counter()
        for drafter in self.engine.drafters:
            of_drafters.update(drafter.kernels)
        return dataclasses.replace(
            state.result(),
            model=os.path.basename(self.model.path),
            drafter=self.drafter,
            backend=self.model.backend,
            kernels=self.model.kernels,
            drafter_kernels=dict(of_drafters) if self.engine.drafters else None,
            threads=self.engine.n_threads,
        )

    def _add(
        self,
        request: Request,
        cancelled: Callable[[], bool] | None = None,
        on_prefill: Progress | None = None,
    ) -> RequestState:
        self._check_open()
        self._scheduler.abort_batch()  # reserving memory fails while a verify is pending
        config = request.config
        proposers, controller = self._speculative.controller(config)
        if controller is not None:
            is_needed = config.draft == "tree"
            self._speculative.make_room(controller.n_nodes + 1, is_needed=is_needed)
        self._speculative.save()
        return self._scheduler.add_request(request, proposers, controller, cancelled, on_prefill)

    def begin(
        self,
        request: Request,
        cancelled: Callable[[], bool] | None = None,
        on_prefill: Progress | None = None,
    ) -> Stream:
        """Begins the answer to a request as a stream, which no later call ends; see `stream`."""
        stream = Stream(self)
        # The request must end once its stream is unreachable, also if an interruption comes before
        # the caller has received the stream.
        reader = weakref.ref(stream)

        def is_cancelled() -> bool:
            return reader() is None or (cancelled is not None and cancelled())

        try:
            with self._turn():
                stream.state = self._add(request, is_cancelled, on_prefill)
                self._end_unfinished()
            return stream
        except BaseException:
            del stream
            raise

    def _read(self, state: RequestState) -> None:
        """Runs a batch, unless another thread has run one with a step for this request."""
        with self._turn(runs=True):
            if not state.steps and not state.is_finished:
                self._scheduler.step()

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        config: DecodeConfig | None = None,
        *,
        stream: Literal[True],
        template: str | os.PathLike[str] | None = None,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        cancelled: Callable[[], bool] | None = None,
        **settings: Unpack[DecodeOptions],
    ) -> Stream: ...

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        config: DecodeConfig | None = None,
        *,
        stream: Literal[False] = False,
        template: str | os.PathLike[str] | None = None,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        cancelled: Callable[[], bool] | None = None,
        **settings: Unpack[DecodeOptions],
    ) -> Result: ...

    def chat(
        self,
        messages: str | Sequence[Message],
        config: DecodeConfig | None = None,
        *,
        stream: bool = False,
        template: str | os.PathLike[str] | None = None,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        cancelled: Callable[[], bool] | None = None,
        **settings: Unpack[DecodeOptions],
    ) -> Result | Stream:
        """Answers a conversation; arguments and errors as for `chat_prompt` and `generate`.

        stream: True to return a `Stream`, which yields the answer step by step.
        tool_choice: "auto", "none", "required" for an answer of tool calls, or the name of the tool
            that the answer must call once. ValueError if calls in the form of the model's template
            cannot be required.
        """
        prompt, config = self.chat_turn(
            messages,
            config,
            settings,
            template=template,
            enable_thinking=enable_thinking,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
        )
        answer = self.stream if stream else self.generate
        return answer(prompt, config, cancelled=cancelled)

    def chat_turn(
        self,
        messages: str | Sequence[Message],
        config: DecodeConfig | None,
        settings: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        **given: Any,
    ) -> tuple[ChatPrompt, DecodeConfig]:
        """Returns the prompt of `chat`, and the settings of its answer with those of calls.

        given: further arguments of `chat_prompt`. Other arguments and errors as for `chat`.
        """
        config = self._config(config, settings)
        names = [one["function"]["name"] for one in tools_of(tools or ())]
        is_forced = tool_choice not in ("auto", "none")
        allowed: tuple[str, ...] | None = () if tool_choice == "none" else None
        if is_forced and tool_choice != "required":
            known = ("auto", "none", "required", *names)
            allowed, parallel_tool_calls = (choice("tool_choice", tool_choice, known),), False
        elif is_forced and not names:
            raise ValueError("tool_choice is 'required', but tools is empty: give tools")
        prompt = self.chat_prompt(
            messages,
            tools=tools,
            parallel_tool_calls=parallel_tool_calls,
            **given,
        )
        if prompt.tools is not None:
            prompt.tools = prompt.tools._replace(allowed=allowed)
            tokenizer = self._need_tokenizer()
            config, prompt.tools = tokenizer.with_calls(config, prompt.tools, is_required=is_forced)
        return prompt, config

    def chat_prompt(
        self,
        messages: str | Sequence[Message],
        *,
        template: str | os.PathLike[str] | None = None,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parallel_tool_calls: bool = True,
    ) -> ChatPrompt:
        """Applies a chat template to a conversation. Returns token ids up to the answer's start.

        The list carries the template's marks of reasoning and tool calls, by which `generate`
        separates them.
        messages: each with "role" and "content", a text or text parts; content may be None beside
        "tool_calls"; a text stands for one message of the user. template: None for the model's
        own, else a name, a file or the Jinja text.
        enable_thinking: passed to templates that know it. chat_template_kwargs: further variables
        for the template.
        tools: functions that the answer may call, each {"type": "function", "function": {"name",
        "description", "parameters"}}; the result has the calls as `tool_calls`, and runs nothing.
        parallel_tool_calls: False to end the answer after one call.
        Errors: ValueError without a tokenizer or template, for messages or tools of another form,
            or if the template refuses or drops a part of them.
        """
        tokenizer = self._need_tokenizer()
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        variables = template_values(chat_template_kwargs or {}, "chat_template_kwargs")
        wanted = variables.pop("enable_thinking", None)
        return tokenizer.chat(
            messages,
            template=None if template is None else os.fspath(template),
            enable_thinking=wanted if enable_thinking is None else enable_thinking,
            tools=tools,
            parallel_tool_calls=parallel_tool_calls,
            variables=variables,
        )

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Returns the logits after each token, float32 [n, n_vocab]; ValueError for bad ids."""
        ids = self._tokens_of(tokens)
        with self._turn(), self._idle_sequence() as sequence:
            self._scheduler.make_room(sequence.cells_needed(len(ids)), sequence)
            return sequence.logits(ids, native.interruptible)

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Returns the token ids of a text; arguments and errors as for `Tokenizer.tokenize`."""
        if not isinstance(text, str):
            raise TypeError(f"text is {text!r:.60}, must be a str")
        return self._need_tokenizer().tokenize(
            text, add_special=add_special, parse_special=parse_special
        )

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Returns the text of tokens. special: True to include the names of control tokens."""
        return self._need_tokenizer().detokenize(tokens, special=special)

    def reset(self) -> None:
        """Empties the prefix cache and the suffix index: the next prompt is computed in full."""
        with self._turn():
            self._end_unfinished()
            self._scheduler.forget()
            self._speculative.forget(self._scheduler.sequences)

    def save_prefix(self, path: str | os.PathLike[str], tokens: Prompt, *, scope: str = "") -> int:
        """Writes the K/V and states of a text to a file for `load_prefix`; computes missing ones.

        Returns the number of tokens. With recurrent layers or windows the file also has the cached
        snapshots of the text's beginnings; if the text is computed, the snapshots that a request
        for the text would take: before its last token, at turn boundaries.
        Errors: ValueError for bad tokens, Error from the core, OSError; no file is left then.
        """
        ids = self._tokens_of(tokens)
        check_prompt(ids, self.n_ctx)
        boundaries = tokens.turn_boundaries if isinstance(tokens, ChatPrompt) else ()
        with self._turn():
            if prefixes := self._prefix_cache.snapshots(ids, scope):
                prefix_file.save(prefixes, ids, self.engine, Path(path))
                return len(ids)
            with self._idle_sequence() as sequence:
                match = self._prefix_cache.match([*ids, 0], scope)
                begun = self._prefix_cache.start(sequence, match, (*boundaries, len(ids) - 1))
                left = sequence.cells_needed(len(ids) - begun.n_cached)
                self._scheduler.make_room(left, sequence)
                cached = self._prefix_cache.snapshots(ids[: begun.n_cached], scope)[1:]
                taken: list[native.Prefix] = []
                try:
                    ends = {*begun.snapshot_positions, len(ids)}
                    if begun.n_cached and not self.engine.partial_prefix_ok:
                        ends.add(begun.n_cached)
                    for end in sorted(ends):
                        if end > sequence.position:
                            missing = ids[sequence.position : end]
                            sequence.prefill(missing, native.interruptible).argmax()
                        taken.insert(0, sequence.snapshot())
                    prefix_file.save([*taken, *cached], ids, self.engine, Path(path))
                finally:
                    for prefix in taken:
                        prefix.close()
        return len(ids)

    def load_prefix(self, path: str | os.PathLike[str], *, scope: str = "") -> list[int]:
        """Loads a file of `save_prefix` into the prefix cache. Returns the file's token ids.

        scope: requests of the same scope may reuse the text, see `Request.scope`.
        Errors: ValueError for a file that is damaged, was made with another model, drafter, build
            or K/V type, or does not fit the context or `cache_ram`; OSError.
        """
        with self._turn():
            room = self._prefix_cache.make_host_room
            tokens, prefixes = prefix_file.load(self.engine, Path(path), room)
            for prefix in reversed(prefixes):
                self._prefix_cache.add(tokens[: prefix.n_tokens], prefix, scope)
        return tokens

    def forget_prefix(self, tokens: Prompt, *, scope: str = "") -> bool:
        """Drops cached prefixes of a text that no other text shares; False if there are none."""
        with self._turn():
            return self._prefix_cache.forget_text(self._tokens_of(tokens), scope)

    def _end_unfinished(self) -> None:
        if self._unfinished is not None:
            self._scheduler.abort(self._unfinished, RuntimeError(ENDED))
            self._unfinished = None

    @contextmanager
    def _idle_sequence(self) -> Iterator[native.Sequence]:
        """Yields an emptied sequence; a running request that holds the sequence is preempted."""
        self._check_open()
        self._scheduler.reclaim(self.sequence)
        try:
            yield self.sequence
        finally:
            self.sequence.reset()

    def forget_texts(self) -> None:
        """Empties the suffix index, which would draft a repeated prompt's whole earlier answer."""
        with self._turn():
            self._speculative.forget(self._scheduler.sequences)

    def forget(self) -> None:
        """Retired name of `forget_texts`, kept for one more release."""
        self.forget_texts()

    def _tokens_of(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenize(prompt)
        is_list = isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray))
        if not is_list or getattr(prompt, "ndim", 1) != 1:
            raise ValueError(f"the prompt is {prompt!r}, must be a text or a list of token ids")
        n_vocab = self.model.n_vocab
        tokens = [
            token if type(token) is int else integer("a token id", token, 0, n_vocab - 1)
            for token in (prompt.tolist() if isinstance(prompt, np.ndarray) else prompt)
        ]
        if tokens and not 0 <= min(tokens) <= max(tokens) < n_vocab:
            token = next(token for token in tokens if not 0 <= token < n_vocab)
            raise ValueError(f"token id {token} is outside the vocabulary of {n_vocab}")
        return tokens

    def _need_tokenizer(self) -> Tokenizer:
        self._check_open()
        if self.tokenizer is None:
            raise ValueError("the model file has no tokenizer: give the prompt as token ids")
        return self.tokenizer

    @contextmanager
    def _turn(self, *, runs: bool = False) -> Iterator[None]:
        """Locks the decoder for the calling thread; RuntimeError inside a callback.

        runs: True for a batch, whose callbacks must not use the decoder.
        """
        with self._lock, _Uninterrupted():
            self._check_turn()
            self._is_running = runs
            try:
                yield
            finally:
                self._is_running = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise Error("the decoder is closed")

    def _check_turn(self) -> None:
        if self._is_running:
            raise RuntimeError("the decoder is busy: a callback of its answer cannot use it")


class _Uninterrupted:
    """Delays Ctrl-C until the state of requests is consistent.

    A signal handler may raise between any two bytecodes, so that a change would stay half done.
    Python runs handlers on the main thread alone; on others this does nothing. `_signal` replaces
    `signal`, whose conversions to enums would cost a small model several per cent of its rounds.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._came: tuple[Any, ...] | None = None

    def __enter__(self) -> _Uninterrupted:
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_signal.SIGINT)
            if callable(handler):  # other handlers (SIG_IGN, SIG_DFL, C) of SIGINT are kept
                self._handler = handler
                _signal.signal(_signal.SIGINT, self._come)
        return self

    def _come(self, *args: Any) -> None:
        self._came = args

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        handler = _signal.signal(_signal.SIGINT, self._handler)
        if handler != self._come:  # keep a SIGINT handler that a callback of the user has set
            _signal.signal(_signal.SIGINT, handler)
        if self._came is not None:
            self._handler(*self._came)


class _PaddedVocabulary:
    """A tokenizer for models with padded vocabularies: ids beyond the tokenizer's have no text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.stop_tokens = tokenizer.stop_tokens if tokenizer else frozenset[int]()
        self.suppressed_tokens = tokenizer.suppressed_tokens if tokenizer else frozenset[int]()

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Returns the bytes a token adds to the text; none for a padding id."""
        if self._tokenizer is None or token >= self._tokenizer.n_tokens:
            return b""
        return self._tokenizer.piece(token, special=special)


def _is_by_prompt(name: str, value: object) -> bool:
    """True for a list with a value for each prompt: a list of lists for settings that are lists."""
    if not isinstance(value, list):
        return False
    return name not in LISTS or any(isinstance(one, (list, tuple)) for one in value)
