"""Weights: a target's and its drafter's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._ffi import Error, call, create, ggml_library, new, text
from .ggml import extra_buffer_types, load_backend, load_backend_of_environment
from .load_config import DEFAULT_N_CTX, LoadConfig, c_options
from .progress import Progress, c_callback
from .proof import proven_buffer_types

DRY_RUNS = (None, "device", "cuda")
"""What a model is loaded for: to run, or to be measured where it would run, or on a CUDA GPU
that is not there. What is measured has no memory to run in."""


@contextmanager
def _model_params(
    config: LoadConfig, progress: Progress | None, dry_run: str | None = None
) -> Iterator[Any]:
    load_backend_of_environment()
    if config.backend_module is not None:
        load_backend(config.backend_module)
    extra = extra_buffer_types()
    proven = proven_buffer_types(extra, ggml_library())
    excluded = new("char[]", ",".join(name for name in extra if name not in proven).encode())
    options = c_options("dfl_model_params", config)
    with c_callback(progress) as callback:
        yield new(
            "dfl_model_params *",
            {
                **options,
                "excluded_buffer_types": excluded,
                "progress": callback,
                "dry_run": DRY_RUNS.index(dry_run),
            },
        )


def _placements(kind: str, handle: Any, n: int) -> dict[str, int]:
    """Bytes of weights by the kernels that multiply with them, the most first."""
    by_kernels = {}
    placement = new("dfl_placement *")
    for index in range(n):
        call(f"{kind}_get_placement", handle, index, placement)
        by_kernels[text(placement.kernels)] = int(placement.bytes)
    return dict(sorted(by_kernels.items(), key=lambda item: -item[1]))


class Model:
    """The weights of one GGUF file. Immutable; engines in several threads may share it."""

    def __init__(
        self,
        path: str,
        config: LoadConfig | None = None,
        progress: Progress | None = None,
        dry_run: str | None = None,
    ) -> None:
        """Maps or copies the weights. progress: (bytes done, bytes in all). dry_run: of DRY_RUNS.

        Raises:
            Error: the file is missing, damaged or not a target this build can run; out of memory.
        """
        self.config = config or LoadConfig()
        self.path = str(path)
        with _model_params(self.config, progress, dry_run) as params:
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
        self.cpu_split_bytes = int(info.cpu_split_bytes)
        self.embedding_bytes = int(info.embedding_bytes)
        self.on_gpu = bool(info.on_gpu)
        self.is_hypothetical = dry_run == "cuda" and self.on_gpu
        self.kernels = _placements("model", self._handle, info.n_placements)

    @property
    def device_bytes(self) -> int:
        """Weights in buffers of the device; the CPU beside it has the rest."""
        return self.copied_bytes - self.cpu_split_bytes

    @property
    def n_ctx(self) -> int:
        """Tokens a sequence of this model may hold unless told otherwise."""
        return self.config.n_ctx or min(self.n_ctx_train, DEFAULT_N_CTX)

    @property
    def handle(self) -> Any:
        """The C handle; raises Error once closed."""
        if self._handle is None:
            raise Error(f"{self.path}: the model is closed")
        return self._handle

    def close(self) -> None:
        """Gives up this reference; weights go when the last engine of the model is closed too."""
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
        self.mapped_bytes = int(info.mapped_bytes)
        self.copied_bytes = int(info.copied_bytes)
        self.kernels = _placements("drafter", self.handle, info.n_placements)
