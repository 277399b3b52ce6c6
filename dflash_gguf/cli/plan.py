"""dflash-run --plan and --fit: prints the memory plan, and chooses settings that fit."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from ..config import AUTO_TREE_BUDGET, TREE_BUDGET, DecodeConfig, LoadConfig
from ..memory.fit import Fit, FitConstraints, fit, fit_part, max_verify_rows, with_context
from ..memory.plan import Planner, gib
from ..native import MAX_LAYERS, Error


def show_plan(args: argparse.Namespace, load: LoadConfig, decode: DecodeConfig) -> int:
    """Prints the plan of the given settings or, with --fit, fitted ones. Returns 1 if too large."""
    if args.fit:
        plan = _fit(args, load, decode)[1].plan
    else:
        planner = Planner(args.model, args.model_draft, load, args.vram)
        n_rows = verify_rows(planner.block_size, decode)
        load = with_context(planner.plan, load, planner.model.n_ctx_train)
        if decode.draft == "auto":  # "auto" verifies fewer rows if memory is short
            n_rows = max_verify_rows(planner.plan, load, n_rows)
        plan = planner.plan(load, n_rows)
    print(plan.to_json() if args.json else plan.table())
    return 1 if plan.missing_bytes else 0


def fitted(args: argparse.Namespace, load: LoadConfig, decode: DecodeConfig) -> LoadConfig:
    """Returns settings that fit the device, and explains them on stderr; Error if none fit."""
    planner, best = _fit(args, load, decode)
    if planner.model.is_hypothetical:
        raise ValueError(
            "--vram limits a GPU, and there is none; to plan for another machine add --plan"
        )
    return replace(
        load,
        n_gpu_layers=planner.config.n_gpu_layers,
        n_cpu_moe=planner.config.n_cpu_moe,
        n_ctx=best.config.n_ctx,
        cache_type_k=best.config.cache_type_k,
        cache_type_v=best.config.cache_type_v,
        n_ubatch=best.config.n_ubatch,
        draft_window=best.config.draft_window,
    )


def verify_rows(block_size: int, decode: DecodeConfig) -> int:
    """Returns the most rows of a verify with a drafter of this block size; 0 without drafting."""
    if not block_size or decode.draft == "none":
        return 0
    if decode.draft == "chain":
        return min(block_size, (decode.draft_max or block_size) + 1)
    usual = TREE_BUDGET if decode.draft == "tree" else AUTO_TREE_BUDGET
    return (decode.tree_budget or usual) + 1


def _fit(args: argparse.Namespace, load: LoadConfig, decode: DecodeConfig) -> tuple[Planner, Fit]:
    """Finds settings that fit on the GPU or, without -ngl, on GPU and CPU; prints the choice."""

    def planner_of(layers: int | None, without_experts: int) -> Planner:
        place = replace(load, n_gpu_layers=layers, n_cpu_moe=without_experts)
        return Planner(args.model, args.model_draft, place, args.vram)

    first = planner_of(load.n_gpu_layers, load.n_cpu_moe)
    constraints = FitConstraints(
        n_ctx_train=first.model.n_ctx_train,
        n_ctx=first.config.n_ctx,
        cache_types=(args.cache_type_k, args.cache_type_v),
        n_ubatch=args.n_ubatch,
        draft_window=args.draft_window,
        n_rows=verify_rows(first.block_size, decode),
    )
    planner, best = first, fit(first.plan, constraints)
    left = ""
    if best is None and first.model.on_gpu and load.n_gpu_layers is None:
        left = f"{_too_large(first)}"
        experts = load.n_cpu_moe == 0 and (
            planner_of(None, MAX_LAYERS).model.device_bytes < first.model.device_bytes
        )
        part = fit_part(
            lambda layers, without: planner_of(layers, without or load.n_cpu_moe).plan,
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
            best = fit(planner.plan, constraints)
    if best is None:
        raise Error(f"--fit: {_too_large(planner)}")
    print(f"--fit on {best.plan.device}: {left}{best.reason}", file=sys.stderr)
    return planner, best


def _too_large(planner: Planner) -> str:
    smallest = planner.plan(replace(planner.config, n_ctx=256, n_ubatch=128, draft_window=256))
    return (
        f"weights and the shortest context need {gib(smallest.needed_bytes)}, "
        f"{smallest.device} has {gib(smallest.free_bytes)}"
    )
