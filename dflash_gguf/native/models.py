"""Model and Drafter: the weights of a target and of its drafter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._files import check_file
from ._ffi import Error, call, create, ggml_library, new, text
from .file_identity import file_identity, files_of, stamps
from .ggml import extra_buffer_types, load_backend, load_backend_of_environment
from .limits import MAX_VERIFY
from .load_config import DEFAULT_N_CTX, LoadConfig, c_options
from .progress import Progress, c_callback
from .proof import proven_buffer_types

DRY_RUNS = (None, "device", "cuda")
"""Kinds of dry runs: none; on the configured device; on a CUDA GPU that need not exist. A dry run
counts memory without allocating it, so that its model cannot run."""


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
    """Returns the bytes of weights by the kernels that multiply with them, most bytes first."""
    by_kernels = {}
    placement = new("dfl_placement *")
    for index in range(n):
        call(f"{kind}_get_placement", handle, index, placement)
        by_kernels[text(placement.kernels)] = int(placement.bytes)
    return dict(sorted(by_kernels.items(), key=lambda item: -item[1]))


def _load_file(kind: str, path: str, *args: Any) -> tuple[Any, str]:
    """Loads a model file. Returns its C handle and identity; Error if it was replaced meanwhile."""
    before = stamps(path)
    try:
        for part in files_of(path):
            check_file(part)
    except OSError:
        pass  # the load below reports an unreadable file
    except ValueError as error:
        raise Error(str(error)) from None
    handle = create(kind, f"{kind}_load", os.fsencode(path), *args)
    identity = file_identity(path)
    if stamps(path) != before:
        raise Error(f"{path}: was replaced while it was loaded, load it again")
    return handle, identity


class Model:
    """The weights of one GGUF file. Immutable; engines in several threads may share a model."""

    def __init__(
        self,
        path: str,
        config: LoadConfig | None = None,
        progress: Progress | None = None,
        dry_run: str | None = None,
    ) -> None:
        """Maps or copies the weights.

        progress: called with (bytes done, bytes in all); an exception that it raises ends the load.
        dry_run: one of DRY_RUNS. Error for a missing, damaged or unsupported file, or if memory is
        short.
        """
        self.config = config or LoadConfig()
        self.path = str(path)
        with _model_params(self.config, progress, dry_run) as params:
            self._handle, self.identity = _load_file("model", self.path, params)
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
        self.n_expert = int(info.n_expert)
        self.n_expert_used = int(info.n_expert_used)
        self.expert_bytes = int(info.expert_bytes)
        self.cpu_expert_bytes = int(info.cpu_expert_bytes)
        self.on_gpu = bool(info.on_gpu)
        self.has_drafter = bool(info.has_drafter)
        self.is_hypothetical = dry_run == "cuda" and self.on_gpu
        self.kernels = _placements("model", self._handle, info.n_placements)

    @property
    def device_bytes(self) -> int:
        """Bytes of weights in device memory."""
        return self.copied_bytes - self.cpu_split_bytes

    @property
    def n_ctx(self) -> int:
        """Context in tokens: that of the config, or its default."""
        return self.config.n_ctx or min(self.n_ctx_train, DEFAULT_N_CTX)

    @property
    def handle(self) -> Any:
        """The model's C handle; raises Error after `close`."""
        if self._handle is None:
            raise Error(f"{self.path}: the model is closed")
        return self._handle

    def close(self) -> None:
        """Closes the model; weights are freed once its engines are closed too."""
        self._handle = None


class Drafter:
    """The weights of a drafter, checked against its target. Immutable.

    kind: "dflash", "mtp" or "ngram". The last is an n-gram table: block_size 0, as no pass runs it.
    max_draft: maximum positions of a draft that a pass makes.
    """

    def __init__(
        self,
        path: str,
        target: Model,
        progress: Progress | None = None,
        config: LoadConfig | None = None,
    ) -> None:
        """Maps or copies the weights; Error as for Model, or if drafter and target do not match."""
        self.path = str(path)
        with _model_params(config or target.config, progress) as params:
            self.handle, self.identity = _load_file("drafter", self.path, target.handle, params)
        info = new("dfl_drafter_info *")
        call("drafter_get_info", self.handle, info)
        self.kind = text(info.kind)
        self.name = text(info.name)
        self.n_layer = int(info.n_layer)
        self.block_size = int(info.block_size)
        self.max_draft = max(min(self.block_size, MAX_VERIFY) - 1, 0)
        self.mask_token = int(info.mask_token)
        self.n_taps = int(info.n_taps)
        self.n_causal = int(info.n_causal)
        self.n_windowed = int(info.n_windowed)
        self.scale_is_open = bool(info.scale_is_open)
        self.embedding_scale = float(info.embedding_scale)
        self.sqrt_scale = float(info.sqrt_scale)
        self.mapped_bytes = int(info.mapped_bytes)
        self.copied_bytes = int(info.copied_bytes)
        self.cpu_split_bytes = int(info.cpu_split_bytes)
        self.kernels = _placements("drafter", self.handle, info.n_placements)
