"""What a user holds: a loaded target that answers prompts."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import native
from ._validate import integer
from .config import DecodeConfig
from .engine.request import Request, RequestState, check_prompt
from .engine.scheduler import Scheduler
from .kv_cache import prefix_file
from .kv_cache.prefix_cache import PrefixCache
from .memory.plan import MAX_PREFIX_BYTES
from .native import MAX_VERIFY, Error, Progress
from .outputs import Result
from .speculative.runtime import CostFile, SpeculativeRuntime
from .stream import Stream
from .text.chat import ChatPrompt, Message
from .text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]

ENDED = "this stream was ended by a later call of the same decoder"
CLOSED = "the decoder was closed before this answer was whole"


class Decoder:
    """One target that answers prompts, `n_parallel` at once. Threads may share it.

    A callback of a running answer cannot use it: RuntimeError.

    What answers leave behind is kept between calls: a prompt that begins like an earlier one is
    computed only from where they part, as long as memory allows; docs/memory.md.
    """

    def __init__(
        self,
        sequence: native.Sequence,
        tokenizer: Tokenizer | None,
        cost_file: CostFile | None = None,
        max_verify_rows: int = MAX_VERIFY,
        prefix_bytes: int = MAX_PREFIX_BYTES,
    ) -> None:
        """Use `load`. Without a tokenizer prompts are token ids, and answers have no text.

        prefix_bytes: of main memory, that what is kept of earlier answers may take.
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
        self._unfinished: RequestState | None = None  # a stream that a later call may end

    @property
    def n_ctx(self) -> int:
        """Tokens the context holds: prompt and answer together."""
        return self.sequence.n_ctx

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees model, caches and tokenizer; closing twice is harmless.

        Whoever still reads an answer gets a RuntimeError in place of what is missing.
        """
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
        """Measures what rounds cost, if that is not known: a fifth of a second at most.

        `load` does.
        """
        with self._turn(), self._idle_sequence():
            self._speculative.measure()

    def check(self, config: DecodeConfig) -> None:
        """ValueError if no prompt can be answered so, as it needs a drafter that is not there."""
        with self._turn():
            self._speculative.controller(config)

    def generate(
        self,
        prompt: Prompt,
        config: DecodeConfig | None = None,
        *,
        cancelled: Callable[[], bool] | None = None,
        on_prefill: Progress | None = None,
        **settings: Any,
    ) -> Result:
        """Answers a prompt.

        prompt: text, which gets the special tokens the model asks for, or token ids as they are.
        config, settings: a DecodeConfig, and fields of it that are to differ.
        cancelled: asked before every round; True ends the answer.
        on_prefill: called with (tokens done, tokens in all) before and while what no cache holds
            of the prompt is computed.
        Errors: ValueError for a bad argument, an empty prompt or one longer than the context;
            Error from the core. The decoder can be used again after any of them.
        """
        stream = self._stream(self.request(prompt, config, **settings), cancelled, on_prefill)
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
        """Answers prompts, `n_parallel` at once; the results in their order.

        settings: as for `generate`; a list has a value for each prompt (`seed=[1, 2, 3]`).
        progress: called with (answers done, answers in all). on_result: with the number of a
            prompt, from 0 on, and its result, as soon as that is there; they end in any order.
        Errors: as for `generate`, for any of them; all others are ended then. Faults of prompts are
            raised before the first is answered.
        """
        shared = {
            name: tuple(x) if isinstance(x, Iterator) else x
            for name, x in settings.items()
            if not isinstance(x, list)
        }
        lists = {name: x for name, x in settings.items() if isinstance(x, list)}
        for name, values in lists.items():
            if len(values) != len(prompts):
                raise ValueError(f"{name}: {len(values)} values for {len(prompts)} prompts")
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
        n_begun = n_done = 0
        try:
            while n_done < len(requests):
                with self._batch():
                    # Add no more requests than run at once: each batch looks at all that wait.
                    while n_begun < len(requests) and len(live) < self.engine.n_parallel:
                        live[n_begun] = self._add(requests[n_begun], cancelled)
                        if n_begun == 0:
                            self._end_unfinished()
                        n_begun += 1
                    self._scheduler.step()
                for i, state in list(live.items()):
                    state.steps.clear()
                    if not state.is_finished:
                        continue
                    del live[i]
                    if state.error is not None:
                        raise state.error
                    result = results[i] = self.result(state)
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
        **settings: Any,
    ) -> Stream:
        """Answers a prompt step by step; see `generate`.

        As many as `n_parallel` are in the making at once, later ones wait; with one, a later call
        ends an unfinished stream. Streams may be iterated in any order, each by one thread at a
        time: the thread that waits for a step runs the batch for every request. An answer whose
        reader is 256 tokens behind pauses; one that finds no room in the context waits, or begins
        anew, and loses nothing.
        """
        stream = self._stream(self.request(prompt, config, **settings), cancelled, on_prefill)
        if self.engine.n_parallel == 1:
            self._unfinished = stream.state
        return stream

    # ---- requests, for programs with a loop of their own

    def request(
        self, prompt: Prompt, config: DecodeConfig | None = None, **settings: Any
    ) -> Request:
        """Returns a validated request, see `generate`; ValueError for a bad prompt or setting."""
        config = dataclasses.replace(config or DecodeConfig(), **settings)
        tokens = tuple(self._tokens_of(prompt))
        check_prompt(tokens, self.n_ctx)
        for token in config.logit_bias:
            integer("a token of logit_bias", token, 0, self.model.n_vocab - 1)
        if isinstance(prompt, ChatPrompt):
            return Request(tokens, config, prompt.reasoning, prompt.turn_boundaries)
        return Request(tokens, config)

    def add_request(
        self,
        request: Request,
        *,
        cancelled: Callable[[], bool] | None = None,
        on_prefill: Progress | None = None,
    ) -> RequestState:
        """Adds a request for `step` to run; see `generate` for the callbacks.

        Its steps appear in the state's `steps`, from which the caller takes them; once it
        `is_finished`, `error` says what went wrong for it, if anything did.
        """
        with self._turn():
            return self._add(request, cancelled, on_prefill)

    def step(self) -> None:
        """Runs one batch for all requests; Error from the core where it is no request's own."""
        with self._batch():
            self._check_open()
            self._scheduler.step()

    def abort(self, state: RequestState) -> None:
        """Ends a request, which may wait, run or have finished."""
        with self._turn():
            self._scheduler.abort(state)

    def result(self, state: RequestState) -> Result:
        """Returns the result of a request so far; final once it has finished."""
        drafter = self.engine.drafter
        return dataclasses.replace(
            state.result(),
            model=os.path.basename(self.model.path),
            drafter=None if drafter is None else os.path.basename(drafter.path),
            backend=self.model.backend,
            kernels=self.model.kernels,
            drafter_kernels=None if drafter is None else drafter.kernels,
            threads=self.engine.n_threads,
        )

    def _add(
        self,
        request: Request,
        cancelled: Callable[[], bool] | None = None,
        on_prefill: Progress | None = None,
    ) -> RequestState:
        self._check_open()
        self._scheduler.abort_batch()  # room for verifies is made where none waits for its commit
        config = request.config
        proposers, controller = self._speculative.controller(config)
        if controller is not None:
            is_needed = config.draft == "tree"
            self._speculative.make_room(controller.n_nodes + 1, is_needed=is_needed)
        self._speculative.save()
        return self._scheduler.add_request(request, proposers, controller, cancelled, on_prefill)

    def _stream(
        self,
        request: Request,
        cancelled: Callable[[], bool] | None,
        on_prefill: Progress | None,
    ) -> Stream:
        stream = Stream(self)
        # Ends the request when nobody can read the stream any more, also where an interruption
        # comes before its caller has it.
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
        """Runs a batch, unless another thread has meanwhile brought the request a step."""
        with self._batch():
            if not state.steps and not state.is_finished:
                self._scheduler.step()

    def chat(
        self,
        messages: Sequence[Message],
        config: DecodeConfig | None = None,
        *,
        template: str | None = None,
        enable_thinking: bool | None = None,
        **settings: Any,
    ) -> Result:
        """Answers a conversation; see `chat_prompt` and `generate`."""
        prompt = self.chat_prompt(messages, template=template, enable_thinking=enable_thinking)
        return self.generate(prompt, config, **settings)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        template: str | None = None,
        enable_thinking: bool | None = None,
    ) -> ChatPrompt:
        """Token ids of a conversation, up to where the answer begins.

        In answers to it thoughts are told apart, where its template marks them; as a plain list
        of ids it is a prompt like any other.

        messages: each with "role" and "content". template: None for the model's own, else the
        name of one, a file, or its text. enable_thinking: for templates that offer the choice.
        """
        tokenizer = self._need_tokenizer()
        return tokenizer.chat(messages, template=template, enable_thinking=enable_thinking)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after every token, float32 [n, n_vocab], by a plain pass over an empty cache."""
        ids = self._tokens_of(tokens)
        with self._turn(), self._idle_sequence() as sequence:
            self._scheduler.make_room(sequence.cells_needed(len(ids)), sequence)
            return sequence.logits(ids)

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text; see Tokenizer.tokenize."""
        return self._need_tokenizer().tokenize(
            text, add_special=add_special, parse_special=parse_special
        )

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of tokens; control tokens only if `special`."""
        return self._need_tokenizer().detokenize(tokens, special=special)

    def reset(self) -> None:
        """Forgets what was kept of earlier answers, so that the next prompt is computed whole."""
        with self._turn():
            self._end_unfinished()
            self._scheduler.forget()
            self._speculative.forget(self._scheduler.sequences)

    def save_prefix(self, path: str | os.PathLike[str], tokens: Prompt) -> int:
        """Writes what tokens leave behind to a file, computing what is not known; how many.

        A prompt that begins with them is computed from there on, once the file is loaded. With
        recurrent layers the prompt must go on after them: to have a prompt itself computed at its
        last token only, save all but that one.
        Errors: ValueError for bad tokens, Error from the core, OSError; no file is left then.
        """
        ids = self._tokens_of(tokens)
        check_prompt(ids, self.n_ctx)
        with self._turn():
            prefix = self._prefix_cache.find(ids)
            if prefix is not None:
                prefix_file.save(prefix, ids, self.engine, Path(path))
                return len(ids)
            with self._idle_sequence() as sequence:
                begun = self._prefix_cache.start(sequence, self._prefix_cache.match([*ids, 0]))
                if begun.n_cached < len(ids):
                    left = ids[begun.n_cached :]
                    self._scheduler.make_room(sequence.cells_needed(len(left)), sequence)
                    sequence.prefill(left).argmax()
                prefix = sequence.snapshot()
                try:
                    prefix_file.save(prefix, ids, self.engine, Path(path))
                finally:
                    prefix.close()
        return len(ids)

    def load_prefix(self, path: str | os.PathLike[str]) -> list[int]:
        """Keeps what a file of `save_prefix` holds for the answers to come; its tokens.

        Errors: ValueError for a file that is damaged, was made with another model, drafter, build
            or other types of K/V, or has no room in the context or in `cache_ram`; OSError.
        """
        with self._turn():
            room = self._prefix_cache.make_host_room
            tokens, prefix = prefix_file.load(self.engine, Path(path), room)
            self._prefix_cache.add(tokens, prefix)
        return tokens

    def forget_prefix(self, tokens: Prompt) -> bool:
        """Forgets what is kept of a text and of no other; whether there was something."""
        with self._turn():
            return self._prefix_cache.forget_text(self._tokens_of(tokens))

    def _end_unfinished(self) -> None:
        """With room for one answer alone a later call ends a stream."""
        if self._unfinished is not None:
            self._scheduler.abort(self._unfinished, RuntimeError(ENDED))
            self._unfinished = None

    @contextmanager
    def _idle_sequence(self) -> Iterator[native.Sequence]:
        """An empty sequence that no answer uses."""
        self._check_open()
        self._scheduler.reclaim(self.sequence)
        try:
            yield self.sequence
        finally:
            self.sequence.reset()

    def forget_texts(self) -> None:
        """Empties the suffix index, but not the caches.

        Comparisons need it: the index would propose the second of two equal answers whole.
        """
        with self._turn():
            self._speculative.forget(self._scheduler.sequences)

    def forget(self) -> None:
        """Empties the suffix index: the retired name of `forget_texts`, for one more release."""
        self.forget_texts()

    def _tokens_of(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenize(prompt)
        if not isinstance(prompt, Iterable) or getattr(prompt, "ndim", 1) != 1:
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
        if self.tokenizer is None:
            raise ValueError("the model file has no tokenizer, give token ids")
        return self.tokenizer

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Lets threads take turns; a callback comes in the middle of one."""
        with self._lock, _Uninterrupted():
            self._check_turn()
            yield

    def _check_open(self) -> None:
        if self._is_closed:
            raise Error("the decoder is closed")

    def _check_turn(self) -> None:
        if self._is_running:
            raise RuntimeError("the decoder is busy: a callback of its answer cannot use it")

    @contextmanager
    def _batch(self) -> Iterator[None]:
        """A turn in which callbacks come. Others may take theirs after every batch."""
        with self._turn():
            self._is_running = True
            try:
                yield
            finally:
                self._is_running = False


class _Uninterrupted:
    """Holds Ctrl-C back while the state of answers changes; then it comes.

    Whatever handles the signal could raise between any two steps of Python, also where half of a
    change is done. Only on the main thread, where Python handles it, and if Python does.

    Each turn sets the handler twice. The enums that `signal` makes of numbers would take 9 us
    more of a round, of which a small model does ten thousand a second.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._came: tuple[Any, ...] | None = None

    def __enter__(self) -> _Uninterrupted:
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_signal.SIGINT)
            if callable(handler):  # not SIG_IGN, SIG_DFL, or one that is not Python's
                self._handler = handler
                _signal.signal(_signal.SIGINT, self._come)
        return self

    def _come(self, *args: Any) -> None:
        self._came = args

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        handler = _signal.signal(_signal.SIGINT, self._handler)
        if handler != self._come:  # a callback has set it
            _signal.signal(_signal.SIGINT, handler)
        if self._came is not None:
            self._handler(*self._came)


class _PaddedVocabulary:
    """A tokenizer as the decode loop sees it: rows of the model beyond its tokens have no text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.stop_tokens = tokenizer.stop_tokens if tokenizer else frozenset[int]()
        self.suppressed_tokens = tokenizer.suppressed_tokens if tokenizer else frozenset[int]()

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text."""
        if self._tokenizer is None or token >= self._tokenizer.n_tokens:
            return b""
        return self._tokenizer.piece(token)
