"""What the HTTP process and an engine process tell each other, over a socket.

A frame is its length, four bytes, little-endian, and one message in MessagePack.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from ..outputs import Result
from ..sampling.noise import TokenLogprobs
from ..text.reasoning import OutputPart, joined

MAX_FRAME = 1 << 30


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; the class's name tells them apart on the wire."""


class Load(Message, frozen=True):
    """To the engine, first of all: what to load.

    options: flags of dflash-serve by their names. config: fields of the DecodeConfig that holds
    where requests do not say.
    """

    model: str
    drafter: str | None
    n_parallel: int
    options: dict[str, Any]
    config: dict[str, Any]


class Run(Message, frozen=True):
    """To the engine: answer a prompt.

    config: fields of a DecodeConfig. reasoning: name of the format of thoughts and whether they
    have begun. wants_account: with every step. turns: see ChatPrompt.
    """

    id: int
    tokens: list[int]
    config: dict[str, Any]
    reasoning: tuple[str, bool] | None
    wants_stats: bool
    turn_boundaries: list[int] = []


class Cancel(Message, frozen=True):
    """To the engine: end an answer. `Ended` follows, unless it ended by itself."""

    id: int


class SlotAction(Message, frozen=True):
    """To the engine: save what a slot's last text left behind to a file, restore or erase it."""

    id: int
    slot: int
    action: str
    path: str


class SlotDone(Message, frozen=True):
    """From the engine: it is done. n_tokens: 0 where there was nothing."""

    id: int
    n_tokens: int
    n_bytes: int
    seconds: float


class Loading(Message, frozen=True):
    """From the engine: bytes loaded so far, and in all."""

    done: int
    total: int


class Ready(Message, frozen=True):
    """From the engine: the model is loaded. notes: lines for the log."""

    model: str
    drafter: str | None
    backend: str
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_threads: int
    n_parallel: int
    notes: list[str]


class Refused(Message, frozen=True):
    """From the engine, which ends: why the model cannot be loaded."""

    sentence: str


class ResultStats(Message, frozen=True):
    """What an answer took so far; see Result."""

    n_prompt: int
    n_prefilled: int
    n_tokens: int
    n_decoded: int
    rounds: int
    prefill_s: float
    decode_s: float
    stop_reason: str
    stop_text: str | None
    seed: int
    draft: str
    n_drafted: int
    n_accepted: int
    seconds_by_phase: dict[str, float]
    rounds_by_draft: dict[str, int] | None

    @classmethod
    def of(cls, result: Result) -> ResultStats:
        """The account of a result."""
        return cls(*(getattr(result, name) for name in cls.__struct_fields__))


class Started(Message, frozen=True):
    """From the engine: a prompt is being computed, in this place of n_parallel."""

    id: int
    slot: int


class Prefilled(Message, frozen=True):
    """From the engine: tokens of a prompt computed, of those that no cache held."""

    id: int
    done: int
    total: int


class Stepped(Message, frozen=True):
    """From the engine: what one round added; see Step."""

    id: int
    tokens: list[int]
    parts: list[OutputPart]
    logprobs: list[TokenLogprobs]
    stats: ResultStats | None

    @property
    def text(self) -> str:
        """The new text of the answer, without reasoning."""
        return joined(self.parts, "text")

    @property
    def reasoning(self) -> str:
        """The new reasoning."""
        return joined(self.parts, "reasoning")


class Ended(Message, frozen=True):
    """From the engine: an answer is over."""

    id: int
    stats: ResultStats


class Failed(Message, frozen=True):
    """From the engine: an answer cannot be, or cannot go on. status: of HTTP."""

    id: int
    status: int
    sentence: str


ToEngine = Load | Run | Cancel | SlotAction
FromEngine = Loading | Ready | Refused | Started | Prefilled | Stepped | Ended | Failed | SlotDone

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: Message) -> bytes:
    """A message as it goes over the wire."""
    data = _encoder.encode(message)
    return len(data).to_bytes(4, "little") + data


def length(header: bytes) -> int:
    """Bytes of the message behind a frame's first four. ValueError for what is no frame."""
    n = int.from_bytes(header, "little")
    if n > MAX_FRAME:
        raise ValueError(f"a frame of {n} bytes, the limit is {MAX_FRAME}")
    return n


def from_engine(data: bytes) -> FromEngine:
    """The message of a frame that an engine sent."""
    message: FromEngine = _from_engine.decode(data)
    return message


class Channel:
    """The engine's end of the socket. One thread may read while another writes."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._file = end.makefile("rb")

    def read(self) -> ToEngine | None:
        """Waits for a message; None once the other side has gone."""
        header = self._file.read(4)
        if len(header) < 4:
            return None
        n = length(header)
        data = self._file.read(n)
        return _to_engine.decode(data) if len(data) == n else None

    def write(self, *messages: Message) -> None:
        """Sends messages, waiting while the other side is behind. OSError if it has gone."""
        self._socket.sendall(b"".join(map(frame, messages)))
