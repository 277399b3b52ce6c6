"""Memory plans of files that are not loaded, and settings that fit a device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ._validate import number
from .config import AUTO_TREE_BUDGET, TREE_BUDGET, DecodeConfig, LoadConfig
from .loading import config_of, given_files
from .memory import fit as fitting
from .memory.fit import Fit, FitConstraints, fit_part, max_verify_rows, with_context
from .memory.plan import Plan, Planner, gib
from .native import DEFAULTS, MAX_LAYERS, OPTIONS, Error

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import LoadOptions

GIB = 1 << 30


def plan(
    path: str | os.PathLike[str],
    *,
    drafter: str | os.PathLike[str] | None = None,
    config: LoadConfig | None = None,
    decode: DecodeConfig | None = None,
    vram_gib: float | None = None,
    **options: Unpack[LoadOptions],
) -> Plan:
    """Returns what a target would take of the memory, from the headers of its files.

    drafter, config, options: as for `load`. decode: settings of answers, from which the rows of a
    verify follow. vram_gib: GiB of a GPU to plan for, whether or not the machine has one.
    Errors: ValueError for a bad option; OSError; Error for a file that cannot be loaded.
    """
    path, drafter = given_files(path, drafter)
    config = config_of(config, options)
    return plan_of_files(path, drafter, config, decode or DecodeConfig(), _vram(vram_gib))


def fit(
    path: str | os.PathLike[str],
    *,
    drafter: str | os.PathLike[str] | None = None,
    config: LoadConfig | None = None,
    decode: DecodeConfig | None = None,
    vram_gib: float | None = None,
    **options: Unpack[LoadOptions],
) -> Fit:
    """Returns settings that fit, for `load(path, config=fit(path).config)`, their plan and why.

    Options that are given, also by a config, stay as they are, but a context that does not fit is
    cut; the context, the types of K and V, n_ubatch, draft_window, and layers and experts on the
    CPU are chosen. Other arguments and errors
    as for `plan`; Error if nothing fits.
    """
    path, drafter = given_files(path, drafter)
    config = config_of(config, options)
    values = ((name, getattr(config, name)) for name in OPTIONS)
    given = {name: value for name, value in values if value != DEFAULTS[name]}
    decode = decode or DecodeConfig()
    return fit_files(path, drafter, config, given | options, decode, _vram(vram_gib))


def _vram(gib: float | None) -> int | None:
    return None if gib is None else int(number("vram_gib", gib, 2.0**-10, 1e6) * GIB)


def plan_of_files(
    path: str | os.PathLike[str],
    drafter: str | os.PathLike[str] | None,
    config: LoadConfig,
    decode: DecodeConfig,
    vram: int | None,
) -> Plan:
    """Returns the plan of a config, see `plan`. vram: bytes of the GPU to plan for."""
    planner = Planner(path, drafter, config, vram)
    n_rows = verify_rows(planner.block_size, decode)
    config = with_context(planner.plan, config, planner.model.n_ctx_train)
    if decode.draft == "auto":  # "auto" verifies fewer rows if memory is short
        n_rows = max_verify_rows(planner.plan, config, n_rows)
    return planner.plan(config, n_rows)


def fit_files(
    path: str | os.PathLike[str],
    drafter: str | os.PathLike[str] | None,
    config: LoadConfig,
    fixed: Mapping[str, Any],
    decode: DecodeConfig,
    vram: int | None,
) -> Fit:
    """Chooses settings, see `fit`, on the GPU or, without n_gpu_layers, on GPU and CPU.

    fixed: options that the user gave; None counts as not given. vram: bytes of the GPU.
    """

    def planner_of(layers: int | None, without_experts: int) -> Planner:
        place = replace(config, n_gpu_layers=layers, n_cpu_moe=without_experts)
        return Planner(path, drafter, place, vram)

    first = planner_of(config.n_gpu_layers, config.n_cpu_moe)
    constraints = FitConstraints(
        n_ctx_train=first.model.n_ctx_train,
        n_ctx=config.n_ctx,
        cache_types=(fixed.get("cache_type_k"), fixed.get("cache_type_v")),
        n_ubatch=fixed.get("n_ubatch"),
        draft_window=fixed.get("draft_window"),
        n_rows=verify_rows(first.block_size, decode),
    )
    planner, best = first, fitting.fit(first.plan, constraints)
    left = ""
    if best is None and first.model.on_gpu and config.n_gpu_layers is None:
        left = _too_large(first)
        experts = config.n_cpu_moe == 0 and (
            planner_of(None, MAX_LAYERS).model.device_bytes < first.model.device_bytes
        )
        part = fit_part(
            lambda layers, without: planner_of(layers, without or config.n_cpu_moe).plan,
            constraints,
            first.model.n_layer,
            experts,
        )
        if part is not None:
            left += "; "
            planner, best = planner_of(part.n_gpu_layers, part.n_cpu_moe), part.fit
        else:
            left += ", so all stays on the CPU; "
            planner = planner_of(0, 0)
            best = fitting.fit(planner.plan, constraints)
    if best is None:
        raise Error(_too_large(planner))
    chosen = replace(
        config,
        n_gpu_layers=planner.config.n_gpu_layers,
        n_cpu_moe=planner.config.n_cpu_moe,
        n_ctx=best.config.n_ctx,
        cache_type_k=best.config.cache_type_k,
        cache_type_v=best.config.cache_type_v,
        n_ubatch=best.config.n_ubatch,
        draft_window=best.config.draft_window,
    )
    return replace(best, config=chosen, reason=f"{left}{best.reason}")


def verify_rows(block_size: int, decode: DecodeConfig) -> int:
    """Returns the most rows of a verify with a drafter of this block size; 0 without drafting."""
    if not block_size or decode.draft == "none":
        return 0
    if decode.draft == "chain":
        return min(block_size, (decode.draft_max or block_size) + 1)
    usual = TREE_BUDGET if decode.draft == "tree" else AUTO_TREE_BUDGET
    return (decode.tree_budget or usual) + 1


def _too_large(planner: Planner) -> str:
    smallest = planner.plan(replace(planner.config, n_ctx=256, n_ubatch=128, draft_window=256))
    return (
        f"weights and the shortest context need {gib(smallest.needed_bytes)}, "
        f"{smallest.device} has {gib(smallest.free_bytes)}"
    )
