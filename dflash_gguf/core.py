"""The compiled core in Python terms: numpy in, numpy out. No other module sees a C pointer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._ffi import Error, call, create, ffi, ggml_library, lib, new, text
from .config import MODEL_N_CTX_CAP, LoadConfig
from .proof import proven_buffer_types

__all__ = [
    "Checkpoint",
    "Device",
    "Error",
    "Model",
    "Rows",
    "Session",
    "devices",
    "ggml_version",
    "load_backend",
    "probe_buffer_type",
    "quantize",
]

Progress = Callable[[int, int], None]
"""Called with the part done and the whole. It may raise, to cancel."""

_DEVICE_TYPES = ("cpu", "gpu", "other")


@dataclass(frozen=True, slots=True)
class Device:
    """A ggml device. Memory in bytes, as the backend reports it."""

    name: str
    description: str
    type: str
    free_bytes: int
    total_bytes: int


def ggml_version() -> str:
    """Version of the ggml in this process, for example "0.25.3"."""
    return text(lib().dfl_ggml_version())


def load_backend(path: str) -> None:
    """Loads a ggml backend module; its devices join `devices()`."""
    call("backend_load", str(path).encode())


def devices() -> list[Device]:
    """All devices of the registered ggml backends."""
    found = []
    info = new("dfl_device_info *")
    for index in range(lib().dfl_device_count()):
        call("device_get", index, info)
        found.append(
            Device(
                name=text(info.name),
                description=text(info.description),
                type=_DEVICE_TYPES[info.type],
                free_bytes=info.free_bytes,
                total_bytes=info.total_bytes,
            )
        )
    return found


def quantize(values: NDArray[np.float32], type_name: str, n_threads: int = 0) -> NDArray[np.uint8]:
    """Quantises rows with ggml's reference quantiser.

    Args:
        values: float32 [rows, cols], C-contiguous.
        type_name: ggml's name of the type: "q8_0", "q4_K", "f16", ...
        n_threads: rows are shared out over so many threads; 0: one per core.

    Returns:
        uint8 [rows, row_bytes].

    Raises:
        Error: unknown type, or cols is not a multiple of its block.
    """
    if values.ndim != 2 or values.dtype != np.float32 or not values.flags.c_contiguous:
        raise ValueError(
            f"values: need contiguous float32 [rows, cols], got {values.dtype} {list(values.shape)}"
        )
    rows, cols = values.shape
    size = new("uint64_t *")
    name = type_name.encode()
    call("quantize_row_size", name, cols, size)
    out = np.empty((rows, size[0]), dtype=np.uint8)
    if rows:
        src = ffi.from_buffer("float[]", values)
        dst = ffi.from_buffer("uint8_t[]", out, require_writable=True)
        call("quantize", name, src, rows, cols, dst, out.nbytes, n_threads)
    return out


def _extra_buffer_types() -> list[str]:
    names = new("char[]", 1024)
    call("extra_buffer_types", names, 1024)
    return [name for name in text(names).split(",") if name]


def probe_buffer_type(name: str) -> None:
    """Tries one of the CPU's extra weight buffer types.

    Kernels that cannot run here kill the process: for a child process only.

    Raises:
        Error: there is no such type, or its products are wrong.
    """
    call("probe_buffer_type", name.encode())


@contextmanager
def _callback(progress: Progress | None) -> Iterator[Any]:
    """`progress` as a C callback; what it raises comes out of the with block instead of Error."""
    if progress is None:
        yield ffi.NULL
        return
    raised: list[BaseException] = []

    def on_progress(_user: Any, done: int, total: int) -> int:
        try:
            progress(done, total)
        except BaseException as error:  # C must not see it; it is raised below
            raised.append(error)
            return 1
        return 0

    lib()
    try:
        yield ffi.callback("dfl_progress", on_progress)
    except Error:
        if raised:
            raise raised[0] from None
        raise
    if raised:  # raised at the very end, when there was nothing left to cancel
        raise raised[0]


class Model:
    """The weights of one GGUF file. Immutable; sessions in several threads may share it."""

    def __init__(
        self, path: str, config: LoadConfig | None = None, progress: Progress | None = None
    ) -> None:
        """Maps or copies the weights. progress: (bytes done, bytes in all).

        Raises:
            Error: the file is missing, damaged or not a target this build can run; out of memory.
        """
        self.config = config or LoadConfig()
        self.path = str(path)
        extra = _extra_buffer_types()
        proven = proven_buffer_types(extra, ggml_library())
        excluded = ",".join(name for name in extra if name not in proven).encode()
        layers = self.config.n_gpu_layers
        with _callback(progress) as callback:
            excluded_c = new("char[]", excluded)
            params = new(
                "dfl_model_params *",
                {
                    "n_gpu_layers": -1 if layers is None else layers,
                    "excluded_buffer_types": excluded_c,
                    "progress": callback,
                },
            )
            self._handle = create("model", "model_load", self.path.encode(), params)
        info = new("dfl_model_info *")
        call("model_get_info", self._handle, info)
        self.architecture = text(info.architecture)
        self.name = text(info.name)
        self.backend = text(info.device)
        self.n_vocab = int(info.n_vocab)
        self.n_embd = int(info.n_embd)
        self.n_layer = int(info.n_layer)
        self.n_recurrent = int(info.n_recurrent)
        self.n_ctx_train = int(info.n_ctx_train)
        self.mapped_bytes = int(info.mapped_bytes)
        self.copied_bytes = int(info.copied_bytes)

    @property
    def n_ctx(self) -> int:
        """Tokens a session of this model holds."""
        return self.config.n_ctx or min(self.n_ctx_train, MODEL_N_CTX_CAP)

    @property
    def handle(self) -> Any:
        """The C handle; raises Error once closed."""
        if self._handle is None:
            raise Error(f"{self.path}: the model is closed")
        return self._handle

    def close(self) -> None:
        """Gives up this reference; weights go when the last session of the model is closed too."""
        self._handle = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A prefix of a session's timeline that can be gone back to."""

    handle: Any
    position: int


class Rows:
    """The logits after the last token of one pass; valid until the session's next pass."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pass = session.n_passes

    def _valid_handle(self, index: int) -> Any:
        if index not in (-1, 0):
            raise ValueError(f"row {index}: the pass has one row")
        if self._pass != self._session.n_passes:
            raise Error("these rows are gone: the session has run another pass")
        return self._session.handle

    def argmax(self, index: int = -1) -> int:
        """Token with the largest logit, the lowest id on ties; no row is copied."""
        token = new("int32_t *")
        call("session_argmax", self._valid_handle(index), token)
        return int(token[0])

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """A copy of the row, float32 [n_vocab]."""
        row = np.empty(self._session.model.n_vocab, dtype=np.float32)
        call("session_logits", self._valid_handle(index), ffi.from_buffer("float[]", row))
        return row


class Session:
    """One timeline of a model with its caches and cursor. Not for two threads at once."""

    def __init__(self, model: Model, n_ctx: int | None = None) -> None:
        """Allocates the caches and the compute buffer.

        Raises:
            Error: out of memory, or the cache types do not work on the model's device.
        """
        config = model.config
        type_k, type_v = (
            new("char[]", x.encode()) for x in (config.cache_type_k, config.cache_type_v)
        )
        params = new(
            "dfl_session_params *",
            {
                "n_ctx": model.n_ctx if n_ctx is None else n_ctx,
                "n_ubatch": config.n_ubatch,
                "n_threads": config.n_threads or 0,
                "cache_type_k": type_k,
                "cache_type_v": type_v,
            },
        )
        self.model = model
        self.n_passes = 0
        self._handle = create("session", "session_create", model.handle, params)
        self.n_ctx = int(self.info().n_ctx)
        self.n_threads = int(self.info().n_threads)

    @property
    def handle(self) -> Any:
        """The C handle; raises Error once closed."""
        if self._handle is None:
            raise Error("the session is closed")
        return self._handle

    def close(self) -> None:
        """Frees the caches."""
        self._handle = None

    def info(self) -> Any:
        """The session's `dfl_session_info`: position, threads, bytes of each buffer."""
        info = new("dfl_session_info *")
        call("session_get_info", self.handle, info)
        return info

    @property
    def position(self) -> int:
        """Tokens the caches hold."""
        return int(self.info().position)

    def _run(
        self, tokens: Sequence[int], progress: Progress | None, out: NDArray[np.float32] | None
    ) -> None:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"tokens: need a list of integers, got {ids.dtype} {list(ids.shape)}")
        if ids.size and (ids.min() < 0 or ids.max() >= self.model.n_vocab):
            bad = next(int(x) for x in ids if not 0 <= x < self.model.n_vocab)
            raise Error(f"token id {bad} is outside the vocabulary of {self.model.n_vocab}")
        ids = np.ascontiguousarray(ids, dtype=np.int32)
        logits = ffi.NULL if out is None else ffi.from_buffer("float[]", out, True)
        self.n_passes += 1
        with _callback(progress) as callback:
            call(
                "session_prefill",
                self.handle,
                ffi.from_buffer("int32_t[]", ids),
                ids.size,
                logits,
                callback,
                ffi.NULL,
            )

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> Rows:
        """Appends tokens in micro-batches and returns the row of the last one.

        Raises:
            Error: a token id outside the vocabulary, more tokens than the context has room for.
            What progress raises; the timeline then ends after the last finished micro-batch.
        """
        self._run(tokens, progress, None)
        return Rows(self)

    def decode(self, token: int) -> Rows:
        """Appends one token and returns its row."""
        self._run([token], None, None)
        return Rows(self)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends tokens and returns every one's logits, float32 [n, n_vocab]."""
        out = np.empty((len(tokens), self.model.n_vocab), dtype=np.float32)
        self._run(tokens, None, out)
        return out

    def take(self) -> Checkpoint:
        """A checkpoint of the present position."""
        handle = create("checkpoint", "checkpoint_take", self.handle)
        return Checkpoint(handle, int(lib().dfl_checkpoint_position(handle)))

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether the timeline still begins with the checkpoint's tokens."""
        return bool(lib().dfl_checkpoint_is_valid(self.handle, checkpoint.handle))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes back to a checkpoint, however often.

        Raises:
            Error: the timeline no longer begins with its tokens.
        """
        self.n_passes += 1
        call("checkpoint_restore", self.handle, checkpoint.handle)

    def truncate(self, position: int) -> None:
        """Forgets the tokens from a position on.

        Raises:
            Error: on a model with recurrent layers, unless position is 0 or the present one.
        """
        self.n_passes += 1
        call("session_truncate", self.handle, position)

    def reset(self) -> None:
        """Goes back to position 0."""
        self.n_passes += 1
        call("session_reset", self.handle)
