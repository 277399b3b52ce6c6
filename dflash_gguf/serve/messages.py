"""Messages between the HTTP process and an engine process: MessagePack after a 4-byte length."""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from ..config import CONSTRAINTS
from ..outputs import Result
from ..sampling.noise import TokenLogprobs
from ..text.reasoning import OutputPart, joined
from ..text.tools.parser import ToolFormat

MAX_FRAME = 1 << 30


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base class of all messages; the class name is the tag on the wire."""


class Load(Message, frozen=True):
    """First message to the engine: load a model. config: fields of the default DecodeConfig.

    waits: True to check the files and the memory plan first, and to load after a `Proceed`.
    """

    model: str
    drafters: list[str]
    n_parallel: int
    options: dict[str, Any]
    config: dict[str, Any]
    waits: bool = False


class Proceed(Message, frozen=True):
    """Message to the engine: loads the model that was checked."""


class AskedPrompt(Message, frozen=True):
    """Prompt of an `Ask`.

    reasoning: name of the format that marks thoughts, and True if the prompt has opened them; None
    without thoughts. turn_boundaries: positions where a later prompt may diverge. tools: the tools
    that the answer may call; None for none.
    """

    tokens: list[int]
    reasoning: tuple[str, bool] | None = None
    turn_boundaries: list[int] = []
    tools: ToolFormat | None = None


class Run(Message, frozen=True):
    """Answer that an `Ask` wants. prompt: index of the prompt in the `Ask`."""

    id: int
    prompt: int
    seed: int


class Ask(Message, frozen=True):
    """Message to the engine: generates the answers of a request, which share its settings.

    config: fields of a DecodeConfig, whose seed the runs replace. wants_stats: each Stepped has
    statistics. scope: requests of the same scope may reuse the texts. client: who asks, as clients
    take turns. slot: where the answers run if it is free, -1 for any slot.
    """

    runs: list[Run]
    prompts: list[AskedPrompt]
    config: dict[str, Any]
    wants_stats: bool = False
    scope: str = ""
    client: str = ""
    slot: int = -1

    @property
    def is_constrained(self) -> bool:
        """True if a constraint has to be compiled, of which the engine says Accepted or Failed."""
        tools = [one.tools for one in self.prompts if one.tools is not None]
        return any(one.grammar for one in tools) or any(
            self.config.get(name) is not None for name in CONSTRAINTS
        )


class Cancel(Message, frozen=True):
    """Message to the engine: cancels an answer, for which an Ended follows if none was sent."""

    id: int


class Throttle(Message, frozen=True):
    """Message to the engine: the client reads an answer slower than it is made, or no longer does.

    is_on: True to send nothing more of the answer, which then pauses; False to go on.
    """

    id: int
    is_on: bool


class SlotAction(Message, frozen=True):
    """Message to the engine: saves a slot's cached prefix to a file, restores or erases it.

    scope: the prefix is that of the last request with this scope in the slot.
    """

    id: int
    slot: int
    action: str
    path: str
    scope: str


class SlotDone(Message, frozen=True):
    """Reply to a SlotAction. n_tokens: length of the prefix, 0 if an erased slot held none."""

    id: int
    n_tokens: int
    n_bytes: int
    seconds: float


class Checked(Message, frozen=True):
    """Message from the engine, which waits for a `Proceed`: files and memory plan are sound."""


class Loading(Message, frozen=True):
    """Message from the engine while it loads: bytes loaded so far, and bytes in total."""

    done: int
    total: int


class Ready(Message, frozen=True):
    """Message from the engine: the model is loaded.

    drafter: names of the drafters' files, joined; None without a drafter. recommended: sampling
    settings that the model's file recommends. notes: warnings for the log.
    """

    model: str
    drafter: str | None
    backend: str
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_threads: int
    n_parallel: int
    recommended: dict[str, float]
    notes: list[str]


class Refused(Message, frozen=True):
    """Last message from the engine: the model cannot be loaded. sentence: the reason."""

    sentence: str


class ResultStats(Message, frozen=True):
    """Statistics of an answer so far; the fields have the meanings of those of Result."""

    n_prompt: int
    n_prefilled: int
    n_cached: int
    n_tokens: int
    n_decoded: int
    rounds: int
    n_passes: float
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
    candidates_by_proposer: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, result: Result) -> ResultStats:
        """Returns the statistics of a result."""
        return cls(*(getattr(result, name) for name in cls.__struct_fields__))


class Accepted(Message, frozen=True):
    """Message from the engine: the constraint of an answer is compiled."""

    id: int


class Started(Message, frozen=True):
    """Message from the engine: the prompt of a run is being computed in this slot."""

    id: int
    slot: int


class Prefilled(Message, frozen=True):
    """Message from the engine: `done` of `total` uncached prompt tokens are computed."""

    id: int
    done: int
    total: int


class Scored(Message, frozen=True):
    """Message from the engine: log-probabilities of further prompt tokens, from the second on."""

    id: int
    logprobs: list[TokenLogprobs]


class Stepped(Message, frozen=True):
    """Message from the engine: tokens and text that one round added to an answer; see Step."""

    id: int
    tokens: list[int]
    parts: list[OutputPart]
    logprobs: list[TokenLogprobs]
    stats: ResultStats | None

    @property
    def text(self) -> str:
        """Text that the round added to the answer, without reasoning."""
        return joined(self.parts, "text")


class Ended(Message, frozen=True):
    """Message from the engine: an answer has ended."""

    id: int
    stats: ResultStats


class Failed(Message, frozen=True):
    """Message from the engine: an answer or SlotAction failed. status: the HTTP status."""

    id: int
    status: int
    sentence: str


ToEngine = Load | Proceed | Ask | Cancel | Throttle | SlotAction
FromEngine = (
    Checked
    | Loading
    | Ready
    | Refused
    | Accepted
    | Started
    | Prefilled
    | Scored
    | Stepped
    | Ended
    | Failed
    | SlotDone
)

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: Message) -> bytes:
    """Returns a message with its length in front, as sent over the socket."""
    data = _encoder.encode(message)
    return len(data).to_bytes(4, "little") + data


def length(header: bytes) -> int:
    """Returns a message's length from its 4-byte header. Raises ValueError above MAX_FRAME."""
    n = int.from_bytes(header, "little")
    if n > MAX_FRAME:
        raise ValueError(
            f"the request or its answer takes {n} bytes between the server's processes, the limit "
            f"is {MAX_FRAME}: send fewer prompts, or ask for fewer log-probabilities"
        )
    return n


def from_engine(data: bytes) -> FromEngine:
    """Returns the decoded message of a frame from the engine."""
    message: FromEngine = _from_engine.decode(data)
    return message


class Channel:
    """The engine's end of the socket. One thread may read while another writes."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._file = end.makefile("rb")

    def read(self) -> ToEngine | None:
        """Waits for the next message; returns None if the HTTP process closed the socket."""
        try:
            header = self._file.read(4)
            n = length(header) if len(header) == 4 else 0
            data = self._file.read(n)
        except ConnectionError:  # the HTTP process closed its end with unread messages
            return None
        if len(header) < 4:
            return None
        return _to_engine.decode(data) if len(data) == n else None

    def write(self, *messages: Message) -> None:
        """Sends messages, waiting while the buffer is full. Raises OSError on a closed socket."""
        self._socket.sendall(b"".join(map(frame, messages)))
