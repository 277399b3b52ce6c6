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
from .proposer import Draft

__all__ = [
    "Checkpoint",
    "Device",
    "Drafter",
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

MAX_VERIFY = 256
"""Rows a verify may be given room for, as in dflash.h."""

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


@contextmanager
def _model_params(config: LoadConfig, progress: Progress | None) -> Iterator[Any]:
    extra = _extra_buffer_types()
    proven = proven_buffer_types(extra, ggml_library())
    excluded = new("char[]", ",".join(name for name in extra if name not in proven).encode())
    layers = config.n_gpu_layers
    with _callback(progress) as callback:
        yield new(
            "dfl_model_params *",
            {
                "n_gpu_layers": -1 if layers is None else layers,
                "n_threads": config.n_threads or 0,
                "repack": config.repack,
                "excluded_buffer_types": excluded,
                "progress": callback,
            },
        )


def _placements(kind: str, handle: Any, n: int) -> dict[str, int]:
    """Bytes of weights by the kernels that multiply with them, the most first."""
    found = {}
    placement = new("dfl_placement *")
    for index in range(n):
        call(f"{kind}_get_placement", handle, index, placement)
        found[text(placement.kernels)] = int(placement.bytes)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


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
        with _model_params(self.config, progress) as params:
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
        self.kernels = _placements("model", self._handle, info.n_placements)

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


class Drafter:
    """The weights of a DFlash drafter, checked against its target. Immutable."""

    def __init__(self, path: str, target: Model, progress: Progress | None = None) -> None:
        """Maps or copies the weights to where the target's are. progress: (bytes done, in all).

        Raises:
            Error: as Model; also a drafter that does not fit the target, naming what differs.
        """
        self.path = str(path)
        with _model_params(target.config, progress) as params:
            self.handle = create(
                "drafter", "drafter_load", self.path.encode(), target.handle, params
            )
        info = new("dfl_drafter_info *")
        call("drafter_get_info", self.handle, info)
        self.name = text(info.name)
        self.n_layer = int(info.n_layer)
        self.block_size = int(info.block_size)
        self.mask_token = int(info.mask_token)
        self.n_taps = int(info.n_taps)
        self.kernels = _placements("drafter", self.handle, info.n_placements)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A prefix of a session's timeline that can be gone back to."""

    handle: Any
    position: int


class Rows:
    """The logits of one pass, a row for each token asked for; gone with the next call that runs."""

    def __init__(self, session: Session, n_rows: int = 1) -> None:
        self._session = session
        self._pass = session.n_passes
        self._n_rows = n_rows

    def __len__(self) -> int:
        return self._n_rows

    def _checked(self, index: int) -> tuple[Any, int]:
        if not -self._n_rows <= index < self._n_rows:
            raise ValueError(f"row {index}: the pass has {self._n_rows}")
        if self._pass != self._session.n_passes:
            raise Error("these rows are gone: the session has run another pass")
        return self._session.handle, index % self._n_rows

    def argmax(self, index: int = -1) -> int:
        """Token with the largest logit of a row, the lowest id on ties; no row is copied."""
        token = new("int32_t *")
        call("session_argmax", *self._checked(index), token)
        return int(token[0])

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """A copy of a row, float32 [n_vocab]."""
        row = np.empty(self._session.model.n_vocab, dtype=np.float32)
        call("session_logits", *self._checked(index), ffi.from_buffer("float[]", row))
        return row


def _nodes(values: Sequence[int], what: str) -> NDArray[np.int32]:
    """Node numbers as C wants them; which of them make sense is for the core to say."""
    nodes = np.asarray(values)
    if nodes.ndim != 1 or (nodes.size and nodes.dtype.kind not in "iu"):
        raise ValueError(f"{what}: need a list of integers, got {nodes.dtype} {list(nodes.shape)}")
    limits = np.iinfo(np.int32)
    return np.ascontiguousarray(np.clip(nodes, limits.min, limits.max), dtype=np.int32)


class Session:
    """One timeline of a model with its caches and cursor. Not for two threads at once."""

    def __init__(
        self,
        model: Model,
        n_ctx: int | None = None,
        drafter: Drafter | None = None,
        draft_window: int = 4096,
    ) -> None:
        """Allocates the caches and the compute buffer.

        draft_window: target positions the drafter sees.

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
                "drafter": ffi.NULL if drafter is None else drafter.handle,
                "draft_window": draft_window,
            },
        )
        self.model = model
        self.drafter = drafter
        self.max_draft = 0 if drafter is None else min(drafter.block_size, MAX_VERIFY) - 1
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

    def _ids(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"tokens: need a list of integers, got {ids.dtype} {list(ids.shape)}")
        if ids.size and (ids.min() < 0 or ids.max() >= self.model.n_vocab):
            bad = next(int(x) for x in ids if not 0 <= x < self.model.n_vocab)
            raise Error(f"token id {bad} is outside the vocabulary of {self.model.n_vocab}")
        return np.ascontiguousarray(ids, dtype=np.int32)

    def _run(
        self, tokens: Sequence[int], progress: Progress | None, out: NDArray[np.float32] | None
    ) -> None:
        ids = self._ids(tokens)
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

    def draft(self, last_token: int, n_draft: int, k: int = 1) -> Draft:
        """What the drafter proposes after `last_token`, which is chosen but not appended.

        Raises:
            Error: no drafter, n_draft outside 1 to block_size - 1, or no room in the context.
        """
        (last,) = self._ids([last_token])
        tokens = np.empty((max(0, n_draft), max(0, k)), dtype=np.int32)
        logits = np.empty(tokens.shape, dtype=np.float32)
        log_sum_exp = np.empty(len(tokens), dtype=np.float32)
        self.n_passes += 1
        call(
            "session_draft",
            self.handle,
            last,
            n_draft,
            k,
            ffi.from_buffer("int32_t[]", tokens),
            ffi.from_buffer("float[]", logits),
            ffi.from_buffer("float[]", log_sum_exp),
        )
        return Draft(tokens, logits, log_sum_exp)

    @property
    def max_verify(self) -> int:
        """Rows of one verify at most; `reserve_verify` makes room for more."""
        return int(self.info().verify_rows)

    def reserve_verify(self, n: int) -> None:
        """Makes room for verifies of up to n rows, 1 to 256; never less than there is.

        Raises:
            Error: n is out of range, a verify waits for its commit, or memory is short.
        """
        self.n_passes += 1
        call("session_reserve_verify", self.handle, n)

    def verify(self, tokens: Sequence[int]) -> Rows:
        """Runs tokens after the timeline in one pass without appending them.

        Every row can be read until `commit`, which must follow.
        """
        ids = self._ids(tokens)
        self.n_passes += 1
        call("session_verify", self.handle, ffi.from_buffer("int32_t[]", ids), ids.size)
        return Rows(self, ids.size)

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
        """Runs the nodes of a tree after the timeline in one pass without appending them.

        tokens: node 0 is the root, which is chosen but not appended.
        parents: -1 for the root, else a node before; a node sees its ancestors and the timeline.

        Every node's row can be read until `commit_path`, which must follow.

        Raises:
            Error: parents that make no tree, or more nodes than there is room for.
        """
        ids = self._ids(tokens)
        if len(parents) != ids.size:
            raise ValueError(f"{ids.size} tokens and {len(parents)} parents do not make a tree")
        above = _nodes(parents, "parents")
        self.n_passes += 1
        call(
            "session_verify_tree",
            self.handle,
            ffi.from_buffer("int32_t[]", ids),
            ffi.from_buffer("int32_t[]", above),
            ids.size,
        )
        return Rows(self, ids.size)

    def commit(self, n: int) -> None:
        """Appends the first n tokens of the last verify; the rest leaves no trace."""
        self.n_passes += 1
        call("session_commit", self.handle, n)

    def commit_path(self, nodes: Sequence[int]) -> None:
        """Appends a path of the last verify, root first; the rest leaves no trace.

        Raises:
            Error: the nodes are not a path down from the root.
        """
        path = _nodes(nodes, "nodes")
        self.n_passes += 1
        call("session_commit_path", self.handle, ffi.from_buffer("int32_t[]", path), path.size)

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
