"""Engine process: runs a decoder for all requests until the HTTP process closes the socket."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from .._entry import show_warning
from .._files import message_of
from ..cli.command import draft_length_notes, training_context
from ..cli.model_arguments import load_config, on_present_devices
from ..cli.plan import fitted
from ..config import DecodeConfig, LoadConfig
from ..decoder import Decoder
from ..engine.request import RequestState
from ..loading import load
from ..memory.plan import Planner, check_fits
from ..native import Error, Progress, devices
from ..text.chat import ChatPrompt
from ..text.reasoning import Format
from .messages import (
    Accepted,
    Ask,
    Cancel,
    Channel,
    Checked,
    Ended,
    Failed,
    Load,
    Loading,
    Message,
    Prefilled,
    Ready,
    Refused,
    ResultStats,
    Run,
    Scored,
    SlotAction,
    SlotDone,
    Started,
    Stepped,
    Throttle,
    ToEngine,
)

if TYPE_CHECKING:  # llguidance is loaded with the first constraint
    from ..constraints.compiler import CompiledConstraint

LOADING_S = 0.5
"""Minimum seconds between two messages about the progress of loading."""
MIN_CTX = 256
"""Context in tokens that a model must have room for if its length is chosen by what fits."""
TIDY_S = 1.0
"""Minimum seconds between two calls of malloc_trim."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class Messages(Protocol):
    """Interface of `Channel`, which tests implement without a socket."""

    def read(self) -> ToEngine | None:
        """Waits for the next message; returns None if the channel is closed."""

    def write(self, *messages: Message) -> None:
        """Sends messages to the HTTP process."""


class Job:
    """Answer that an `Ask` wants, and the state of the answer's request in the decoder.

    config: the settings that the answers of the message share.
    """

    def __init__(self, ask: Ask, run: Run, config: DecodeConfig) -> None:
        self.ask = ask
        self.run = run
        self.prompt = ask.prompts[run.prompt]
        self.config = config
        self.is_cancelled = self.is_throttled = False
        self.n_scored = 0
        self.constraint: CompiledConstraint | None = None
        """Constraint of the answer, compiled but for an error; None if the answer is free."""
        self.error: Exception | None = None
        """Reason why the constraint of the answer cannot be compiled."""
        self.state: RequestState | None = None
        self.slot = -1

    @property
    def is_running(self) -> bool:
        """True while the request has a sequence of the decoder."""
        return self.state is not None and self.state.sequence is not None

    @property
    def can_run(self) -> bool:
        """False for an answer that waits for its reader, in the server or in the decoder."""
        state = self.state
        is_held = self.is_throttled and not self.is_cancelled
        return not is_held or state is None or not (state.is_finished or state.is_throttled)


class Worker:
    """Runs the decoder for the messages that arrive over a channel."""

    def __init__(self, decoder: Decoder, channel: Messages, n_parallel: int) -> None:
        self._decoder = decoder
        self._channel = channel
        self._changed = threading.Condition()
        self._jobs: dict[int, Job] = {}
        self._new: deque[Job | SlotAction] = deque()
        self._uncompiled: dict[str, deque[list[Job]]] = {}
        """Answers whose constraints wait for the compiler, by client; the first client is next."""
        self._live: list[Job] = []
        self._slots = range(n_parallel)
        # Tokens of the last prompt and answer in each slot of the server, for each `Ask.scope`.
        self._texts: dict[tuple[int, str], list[int]] = {}
        self._is_over = False
        self._unsaid: list[Message] = []
        self._tidied = 0.0

    def run(self) -> None:
        """Runs rounds until the HTTP process closes the channel."""
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._compile, daemon=True).start()
        while self._wait():
            while self._new:
                message = self._new.popleft()
                if isinstance(message, Job):
                    self._add(message)
                else:
                    self._act(message)
            try:
                self._decoder.step()
            except Exception as error:  # an error of the round fails all its requests
                for job in list(self._live):
                    self._fail(job, error)
            for job in self._live:
                if job.state is not None and not job.state.is_finished and not job.is_running:
                    job.slot = -1  # the request waits, and another may have taken the slot
            for job in self._live:
                if job.is_running:
                    self._take_slot(job)
            for job in list(self._live):
                self._advance(job)
            self._flush()

    def _listen(self) -> None:
        """Reads messages in a thread of its own, so that a cancellation is seen during a round."""
        while (message := self._channel.read()) is not None:
            with self._changed:
                if isinstance(message, Ask):
                    config = DecodeConfig(**{**message.config, "seed": message.runs[0].seed})
                    jobs = [Job(message, run, config) for run in message.runs]
                    self._jobs |= {job.run.id: job for job in jobs}
                    if message.is_constrained:
                        self._uncompiled.setdefault(message.client, deque()).append(jobs)
                    else:
                        self._new += jobs
                elif isinstance(message, SlotAction):
                    self._new.append(message)
                elif isinstance(message, Cancel) and message.id in self._jobs:
                    self._jobs[message.id].is_cancelled = True
                elif isinstance(message, Throttle) and message.id in self._jobs:
                    self._jobs[message.id].is_throttled = message.is_on
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            for job in self._jobs.values():
                job.is_cancelled = True
            self._changed.notify_all()

    def _compile(self) -> None:
        """Compiles constraints in a thread of its own, beside rounds; clients take turns."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._uncompiled)
                if self._is_over:
                    return
                client = next(iter(self._uncompiled))
                waiting = self._uncompiled.pop(client)
                jobs = waiting.popleft()
            self._compile_for(jobs)
            with self._changed:
                waiting += self._uncompiled.pop(client, ())
                if waiting:
                    self._uncompiled[client] = waiting  # behind the other clients
                self._new += jobs
                self._changed.notify_all()

    def _compile_for(self, jobs: list[Job]) -> None:
        constraint, why = None, None
        try:
            if all(job.is_cancelled for job in jobs):
                raise ValueError("the client left before the constraint was compiled")
            constraint = self._decoder.compile_constraint(jobs[0].config, jobs[0].prompt.tools)
        except Exception as error:
            why = error
        for job in jobs:
            job.constraint, job.error = constraint, why

    def _say(self, message: Message) -> None:
        """Queues a message; `_flush` sends all of them, so that the HTTP process wakes up once."""
        self._unsaid.append(message)

    def _flush(self) -> None:
        messages, self._unsaid = self._unsaid, []
        if messages:
            with contextlib.suppress(OSError):  # the reading thread notices a closed socket
                self._channel.write(*messages)

    def _wait(self) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or self._new or any(job.can_run for job in self._live)
            )
            return not self._is_over

    def _act(self, action: SlotAction) -> None:
        try:
            self._say(self._done(action))
        except (Error, ValueError, MemoryError, OSError) as error:
            self._say(Failed(action.id, 400, f"slots: {message_of(error)}"))
        self._flush()

    def _done(self, action: SlotAction) -> SlotDone:
        """Saves, restores or erases a cached prefix. Raises Error, ValueError or OSError."""
        began = time.monotonic()
        if any(job.slot == action.slot for job in self._live):
            raise ValueError(f"slot {action.slot} is in use: ask again when its answer has ended")
        key, scope = (action.slot, action.scope), action.scope
        tokens, path, n_bytes = self._texts.get(key, []), action.path, 0
        if action.action == "restore":
            tokens = self._decoder.load_prefix(path, scope=scope)
            self._texts[key] = tokens
        elif action.action == "erase":
            self._texts.pop(key, None)
            if tokens:
                self._decoder.forget_prefix(tokens, scope=scope)
        elif not tokens:
            raise ValueError(
                f"slot {action.slot} has answered nothing yet: there is no prefix to save"
            )
        else:
            self._decoder.save_prefix(path, tokens, scope=scope)
        if path:
            n_bytes = os.path.getsize(path)
        return SlotDone(action.id, len(tokens), n_bytes, time.monotonic() - began)

    def _add(self, job: Job) -> None:
        prompt = job.prompt
        self._live.append(job)
        if job.error is not None:
            self._fail(job, job.error)
            return
        if job.constraint is not None:
            self._say(Accepted(job.run.id))
            self._flush()
        reasoning = None if prompt.reasoning is None else Format(*prompt.reasoning)
        try:
            job.state = self._decoder.add_request(
                self._decoder.request(
                    ChatPrompt(prompt.tokens, reasoning, prompt.turn_boundaries, prompt.tools),
                    job.config
                    if job.config.seed == job.run.seed
                    else replace(job.config, seed=job.run.seed),
                    scope=job.ask.scope,
                    client=job.ask.client,
                ),
                cancelled=lambda: job.is_cancelled,
                on_prefill=lambda done, total: self._prefilled(job, done, total),
            )
        except Exception as error:
            self._fail(job, error)

    def _prefilled(self, job: Job, done: int, total: int) -> None:
        self._take_slot(job)
        self._say(Prefilled(job.run.id, done, total))
        self._flush()

    def _take_slot(self, job: Job) -> None:
        """Gives a running answer a slot: at its start, and when it runs again after others."""
        if job.slot < 0:
            used = {x.slot for x in self._live if x.is_running}
            free = [slot for slot in self._slots if slot not in used]
            job.slot = job.ask.slot if job.ask.slot in free else free[0]
            for other in self._live:  # a request may lose its place and get another in one step
                if other is not job and other.slot == job.slot:
                    other.slot = -1
            self._say(Started(job.run.id, job.slot))

    def _advance(self, job: Job) -> None:
        state, run = job.state, job.run
        assert state is not None
        if job.is_throttled and not job.is_cancelled:
            return  # unread steps throttle the request in the decoder
        if scored := state.prompt_logprobs[job.n_scored :]:
            job.n_scored += len(scored)
            self._say(Scored(run.id, scored))
        steps, state.steps = state.steps, []
        for step in steps:
            stats = ResultStats.of(self._decoder.result(state)) if job.ask.wants_stats else None
            tokens, parts, logprobs = list(step.tokens), list(step.parts), list(step.logprobs)
            self._say(Stepped(run.id, tokens, parts, logprobs, stats))
        if not state.is_finished:
            return
        if state.error is not None:
            self._fail(job, state.error)
            return
        if job.slot >= 0:
            self._texts[job.slot, job.ask.scope] = state.history[:-1]
        self._remove(job)
        self._say(Ended(run.id, ResultStats.of(self._decoder.result(state))))
        self._tidy()

    def _tidy(self) -> None:
        """Returns free heap memory to the system, as glibc keeps that of dropped prefixes.

        A fixed MALLOC_MMAP_THRESHOLD_ would do so too, but slows sampling from long logit rows
        tenfold, because it maps the arrays of each row anew.
        """
        if _trim is not None and time.monotonic() - self._tidied > TIDY_S:
            _trim(0)
            self._tidied = time.monotonic()

    def _remove(self, job: Job) -> None:
        with self._changed:
            self._live.remove(job)
            del self._jobs[job.run.id]

    def _fail(self, job: Job, error: BaseException) -> None:
        if job.state is not None:
            self._decoder.abort(job.state)
        if not isinstance(error, (Error, ValueError, MemoryError)):
            traceback.print_exception(error)
        self._remove(job)
        status = 400 if isinstance(error, ValueError) else 500
        self._say(Failed(job.run.id, status, str(error) or type(error).__name__))


def open_decoder(request: Load, progress: Progress) -> tuple[Decoder, list[str]]:
    """Loads the decoder of a Load message; returns it with warnings for the log."""
    args, settings = _settings(request)
    if args.fit:
        settings = fitted(args, settings, DecodeConfig(draft=args.draft))
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=UserWarning)
        decoder = load(request.model, drafter=args.model_draft, config=settings, progress=progress)
    notes = [str(warning.message) for warning in caught]
    decode = DecodeConfig(**request.config)
    notes += draft_length_notes(decoder, decode)
    gc.freeze()  # later garbage collections skip the objects of the loaded model
    try:
        decoder.check(decode)
    except ValueError:
        decoder.close()
        raise
    if lacking := decoder.engine.cpu_operations:
        notes.append(f"{decoder.model.backend} lacks {', '.join(lacking)}: the CPU computes that")
    return decoder, notes


def check(request: Load) -> None:
    """Raises ValueError, OSError or Error for a model that could not be loaded even alone.

    Other models may fill the memory now, so the plan is compared with all memory.
    """
    args, settings = _settings(request)
    planner = Planner(request.model, request.drafters, settings, args.vram)
    least = settings if settings.n_ctx and not args.fit else replace(settings, n_ctx=MIN_CTX)
    plan = planner.plan(least)
    total = {device.name: device.total_bytes for device in devices()}
    host = None if plan.host_free_bytes is None else total["CPU"]
    check_fits(
        replace(plan, free_bytes=total.get(plan.device, plan.free_bytes), host_free_bytes=host)
    )


def _settings(request: Load) -> tuple[argparse.Namespace, LoadConfig]:
    args = argparse.Namespace(**request.options)
    args.model, args.model_draft = request.model, request.drafters
    n_ctx_train = training_context(request.model) if args.n_ctx == 0 else None
    return args, on_present_devices(load_config(args, n_ctx_train), args)


def ready(decoder: Decoder, n_parallel: int, notes: list[str]) -> Ready:
    """Returns the message that describes a loaded decoder to the HTTP process."""
    return Ready(
        model=os.path.basename(decoder.model.path),
        drafter=decoder.drafter,
        backend=decoder.model.backend,
        n_ctx=decoder.n_ctx,
        n_ctx_train=decoder.model.n_ctx_train,
        n_vocab=decoder.model.n_vocab,
        n_threads=decoder.engine.n_threads,
        n_parallel=n_parallel,
        recommended=decoder.recommended,
        notes=notes,
    )


def main(descriptor: int) -> int:
    """Runs the engine on an inherited socket until it is closed; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # ignored: the HTTP process ends this one
        signal.signal(number, signal.SIG_IGN)
    warnings.showwarning = show_warning  # type: ignore[assignment]
    channel = Channel(socket.socket(fileno=descriptor))
    request = channel.read()
    if not isinstance(request, Load):
        return 1
    told = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told > LOADING_S:
            told = time.monotonic()
            channel.write(Loading(done, total))

    try:
        if request.waits:
            check(request)
            channel.write(Checked())
            if channel.read() is None:
                return 0
        decoder, notes = open_decoder(request, progress)
    except (Error, ValueError, OSError, MemoryError) as error:
        channel.write(Refused(message_of(error)))
        return 1
    with decoder:
        channel.write(ready(decoder, request.n_parallel, notes))
        Worker(decoder, channel, request.n_parallel).run()
    return 0


if __name__ == "__main__":
    try:
        code = main(int(sys.argv[1]))
    except OSError:
        code = 1
    os._exit(code)  # do not wait for the thread that reads the socket
