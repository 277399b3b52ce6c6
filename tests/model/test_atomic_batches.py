"""Exceptions at any call into the core, and signals at any time, change no answer."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from device import DEVICE
from pairs import make_pair, open_decoder, random_tokens

from dflash_gguf.decoder import Decoder
from dflash_gguf.engine import request
from dflash_gguf.native import Error, _ffi
from dflash_gguf.stream import Stream

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="batch-invariant on the CPU only")

DRAFTS = ("none", "chain", "tree", "auto")
CREATES = ("dfl_sequence_create", "dfl_sequence_snapshot", "dfl_prefix_create")
"""Functions that return a handle: their injected errors come before the call, or it would leak."""


class InjectedError(BaseException):
    """Raised at a call into the core."""


class FaultyCore:
    """Raises at a random share of the calls into the core, before or after the call."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seed: int, error: type[BaseException]
    ) -> None:
        self.share, self.n_raised, self._error = 0.0, Counter[str](), error
        self._random = random.Random(seed)
        self._function = _ffi._function
        monkeypatch.setattr(_ffi, "_function", self._faulty)

    def _faulty(self, name: str) -> Callable[..., Any]:
        function = self._function(name)

        def called(*args: Any) -> Any:
            chance = self._random.random()
            if chance < self.share / 2:
                self._fail(name)
            found = function(*args)
            if chance > 1 - self.share / 2 and name not in CREATES:
                self._fail(name)
            return found

        return called

    def _fail(self, name: str) -> None:
        self.n_raised[name] += 1
        raise self._error(name)


class Use:
    """Random use of a decoder; its answers are compared with those of a decoder used alone."""

    def __init__(self, many: Decoder, alone: Decoder, seed: int) -> None:
        self.many, self.alone = many, alone
        self.random = random.Random(seed)
        self.live: list[tuple[Stream, dict[str, Any], list[int]]] = []
        self.expected: dict[str, tuple[int, ...]] = {}
        self.n_answers = self.n_failed = 0
        self.loses_no_step = True
        """False if a signal may interrupt the test between two reads, so that a step is lost."""

    def answer(self, asked: dict[str, Any]) -> tuple[int, ...]:
        key = repr(asked)
        if key not in self.expected:
            self.expected[key] = self.alone.generate(**asked, draft="none").tokens
        return self.expected[key]

    def asks(self) -> dict[str, Any]:
        below = self.random.randrange
        prompt = random_tokens(1 + below(40), seed=below(12))
        settings: dict[str, Any] = {"temperature": 0.8 * below(2), "seed": below(5)}
        settings |= {"repeat_penalty": 1.3} if below(4) == 0 else {}
        return {"prompt": prompt, "max_tokens": 1 + below(50), "ignore_eos": True, **settings}

    def act(self) -> None:
        """Takes one random action. Raises any injected error, and may then be called again."""
        below = self.random.randrange
        way = below(40)
        if len(self.live) < 7 and below(3) == 0:
            asked = self.asks()
            self.answer(asked)
            stream = self.many.stream(**asked, draft=DRAFTS[below(4)])
            self.live.append((stream, asked, []))
        elif way == 0:
            asks = [self.asks() for _ in range(4)]
            lists = {name: [x.get(name, 1.0) for x in asks] for name in ("max_tokens", "seed")}
            prompts = [x["prompt"] for x in asks]
            found = self.many.generate_batch(prompts, **lists, draft="auto", ignore_eos=True)
            for prompt, max_tokens, seed, result in zip(
                prompts, lists["max_tokens"], lists["seed"], found, strict=True
            ):
                own = {"prompt": prompt, "max_tokens": max_tokens, "seed": seed}
                assert result.tokens == self.answer({**own, "ignore_eos": True})
        elif way == 1:
            self.many.logits(random_tokens(9))
        elif way == 2 and self.live:
            del self.live[below(len(self.live))]
        elif way == 3 and self.live:
            self.live[0][0].close()
        elif self.live:
            self.read(*self.live[below(len(self.live))])

    def read(self, stream: Stream, asked: dict[str, Any], drawn: list[int]) -> None:
        try:
            step = next(stream, None)
        except Error as error:
            if error is not stream.state.error:
                raise
            step = None
            self.n_failed += 1
        drawn += step.tokens if step is not None else ()
        if step is None:
            self.live = [x for x in self.live if x[0] is not stream]
            expected = self.answer(asked)
            result = stream.result()
            assert result.tokens == expected[: len(result.tokens)]
            assert len(result.tokens) == len(expected) or result.stop_reason == "cancelled"
            assert result.tokens == tuple(drawn) or not self.loses_no_step
            self.n_answers += 1


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def use(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], Use]]:
    pair = make_pair(tmp_path_factory.mktemp("pair"), request.param)
    with open_decoder(pair, 1, n_ctx=128) as alone:
        # Six sequences need more than 256 cells, so that requests are preempted.
        yield lambda seed: Use(open_decoder(pair, 6, n_ctx=128), alone, seed)


@pytest.mark.parametrize("error", [InjectedError, Error])
@pytest.mark.parametrize("n_errors", [400, pytest.param(5000, marks=pytest.mark.full)])
def test_exceptions_at_any_call_change_no_answer(
    use: Callable[[int], Use],
    monkeypatch: pytest.MonkeyPatch,
    n_errors: int,
    error: type[BaseException],
) -> None:
    monkeypatch.setattr(request, "MAX_UNREAD_TOKENS", 24)
    used = use(n_errors)
    core = FaultyCore(monkeypatch, n_errors, error)
    while sum(core.n_raised.values()) < n_errors:
        core.share = 0.004
        with contextlib.suppress(error):
            used.act()
        core.share = 0.0
    while used.live:
        used.read(*used.live[0])
    assert used.n_answers > n_errors / 20
    assert (used.n_failed > 0) == (error is Error)
    assert len(core.n_raised) > 8, core.n_raised
    gc.collect()  # the traceback of an error may keep a stream that was dropped
    used.many.step()
    used.many.reset()
    assert not used.many._scheduler.running
    assert used.many.engine.n_free_cells == 256
    used.many.close()


class StopError(Exception):
    """Raised by a program's own signal handler."""


def stop(*_: object) -> None:
    raise StopError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("n_signals", [60, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("handler", "error"), [(signal.default_int_handler, KeyboardInterrupt), (stop, StopError)]
)
def test_signals_at_any_time_change_no_answer(
    use: Callable[[int], Use], handler: Any, error: type[BaseException], n_signals: int
) -> None:
    """Real signals, nothing patched; a signal in a finalizer reaches sys.unraisablehook only."""
    used = use(n_signals)
    used.loses_no_step = False
    started = time.perf_counter()
    for _ in range(200):
        used.act()
    mean_s = (time.perf_counter() - started) / 200
    n_came = 0
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    handled = signal.signal(signal.SIGINT, handler)
    try:
        while n_came < n_signals:
            try:
                signal.setitimer(signal.ITIMER_REAL, used.random.uniform(1e-5, 4 * mean_s))
                used.act()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except error:
                n_came += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        assert signal.signal(signal.SIGINT, handled) is handler
    while used.live:
        used.read(*used.live[0])
    assert used.n_answers > 5
    used.many.close()
