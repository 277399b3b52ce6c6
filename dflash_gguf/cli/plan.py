"""dflash-run --plan and --fit: prints the memory plan, and chooses settings that fit."""

from __future__ import annotations

import argparse
import sys

from ..config import DecodeConfig, LoadConfig
from ..memory.fit import Fit
from ..memory.plan import has_gpu
from ..native import Error
from ..planning import fit_files, plan_of_files


def show_plan(args: argparse.Namespace, load: LoadConfig, decode: DecodeConfig) -> int:
    """Prints the plan of the given settings or, with --fit, fitted ones. Returns 1 if too large."""
    if args.fit:
        plan = _fit(args, load, decode).plan
    else:
        plan = plan_of_files(args.model, args.model_draft, load, decode, args.vram)
    print(plan.to_json() if args.json else plan.table())
    return 1 if plan.missing_bytes else 0


def fitted(args: argparse.Namespace, load: LoadConfig, decode: DecodeConfig) -> LoadConfig:
    """Returns settings that fit the device, and explains them on stderr; Error if none fit.

    Removes the drafter from the arguments if the model is predicted to be faster without it.
    """
    if args.vram is not None and not has_gpu(load):
        raise ValueError(
            "--vram limits a GPU, and there is none; to plan for another machine add --plan"
        )
    best = _fit(args, load, decode)
    if not best.uses_drafter:
        args.model_draft = None
    return best.config


def _fit(args: argparse.Namespace, load: LoadConfig, decode: DecodeConfig) -> Fit:
    """Finds settings that fit, and prints the choice."""
    try:
        best = fit_files(args.model, args.model_draft, load, vars(args), decode, args.vram)
    except Error as error:
        raise Error(f"--fit: {error}") from None
    print(f"--fit on {best.plan.device}: {best.reason}", file=sys.stderr)
    return best
