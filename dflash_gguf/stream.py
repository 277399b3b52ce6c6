"""Stream: the answer to one prompt, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from .engine.request import RequestState
from .outputs import Result, Step
from .sampling.noise import TokenLogprobs


class DecoderLike(Protocol):
    """The methods of a decoder that a stream calls."""

    def _read(self, state: RequestState) -> None: ...
    def abort(self, state: RequestState) -> None:
        """Ends a request."""

    def result(self, state: RequestState) -> Result:
        """Returns the result of a request so far."""


class Stream:
    """An unfinished answer: iterate for its steps; raises the error that ends the request."""

    state: RequestState

    def __init__(self, decoder: DecoderLike) -> None:
        """Use `Decoder.stream`."""
        self._decoder = decoder
        self._has_raised = False
        self._logprobs: list[TokenLogprobs] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        state = self.state
        while not state.steps:
            if state.error is not None and not self._has_raised:
                self._has_raised = True
                raise state.error
            if state.is_finished or self._has_raised:
                raise StopIteration
            self._decoder._read(state)
        step = state.steps[0]
        self._logprobs += step.logprobs
        del state.steps[0]  # a signal after steps.pop(0) could lose the step
        return step

    def close(self) -> None:
        """Ends the answer with the tokens it has so far."""
        self._decoder.abort(self.state)

    def result(self) -> Result:
        """Returns the result so far, which is final once the iteration has ended.

        It has the log-probabilities of the steps that were read.
        """
        return replace(self._decoder.result(self.state), logprobs=tuple(self._logprobs))
