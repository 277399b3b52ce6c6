"""Memory plans of files that are not loaded, and settings that fit a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ._files import AnyPath, AnyPaths
from ._validate import number
from .config import AUTO_TREE_BUDGET, TREE_BUDGET, DecodeConfig, LoadConfig
from .loading import config_of, given_files
from .memory import fit as fitting
from .memory.fit import PART_CONTEXT, Fit, FitConstraints, fit_part, max_verify_rows, with_context
from .memory.plan import Plan, Planner, gib
from .memory.speed import rounded
from .native import DEFAULTS, OPTIONS, Error

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import LoadOptions

GIB = 1 << 30


def plan(
    path: AnyPath,
    *,
    drafter: AnyPaths = None,
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
    path, drafters = given_files(path, drafter)
    config = config_of(config, options)
    return plan_of_files(path, drafters, config, decode or DecodeConfig(), _vram(vram_gib))


def fit(
    path: AnyPath,
    *,
    drafter: AnyPaths = None,
    config: LoadConfig | None = None,
    decode: DecodeConfig | None = None,
    vram_gib: float | None = None,
    **options: Unpack[LoadOptions],
) -> Fit:
    """Returns settings that fit, for `load(path, config=fit(path).config)`, their plan and why.

    Options that are given, also by a config, stay as they are, but a context that does not fit is
    cut; the context, the types of K and V, n_ubatch, draft_window, and layers, experts and drafter
    on the CPU are chosen. Other arguments and errors as for `plan`; Error if nothing fits.
    """
    path, drafters = given_files(path, drafter)
    config = config_of(config, options)
    values = ((name, getattr(config, name)) for name in OPTIONS)
    given = {name: value for name, value in values if value != DEFAULTS[name]}
    decode = decode or DecodeConfig()
    return fit_files(path, drafters, config, given | options, decode, _vram(vram_gib))


def _vram(gib: float | None) -> int | None:
    return None if gib is None else int(number("vram_gib", gib, 2.0**-10, 1e6) * GIB)


def plan_of_files(
    path: AnyPath,
    drafters: AnyPaths,
    config: LoadConfig,
    decode: DecodeConfig,
    vram: int | None,
) -> Plan:
    """Returns the plan of a config, see `plan`. vram: bytes of the GPU to plan for."""
    planner = Planner(path, drafters, config, vram)
    n_rows = verify_rows(planner.block_size, decode)
    config = with_context(planner.plan, config, planner.model.n_ctx_train)
    if decode.draft == "auto":  # "auto" verifies fewer rows if memory is short
        n_rows = max_verify_rows(planner.plan, config, n_rows)
    return planner.plan(config, n_rows)


def fit_files(
    path: AnyPath,
    drafters: AnyPaths,
    config: LoadConfig,
    fixed: Mapping[str, Any],
    decode: DecodeConfig,
    vram: int | None,
) -> Fit:
    """Chooses settings, see `fit`, on the GPU or, without n_gpu_layers, on GPU and CPU.

    fixed: options that the user gave; None counts as not given. vram: bytes of the GPU. If the GPU
    is too small for all, the drafter is placed where the speed is predicted to be highest.
    """
    search = _Search(path, drafters, config, fixed, decode, vram)
    placed = search.whole(GPU)
    left = ""
    if placed.fit is None and placed.planner.model.on_gpu and config.n_gpu_layers is None:
        left = _too_large(placed.planner)
        found = {place: search.best(place) for place in search.places(placed.planner)}
        placed = max(found.values(), key=lambda x: x.tokens_per_s)
        if placed.fit is not None:
            left += f"; {_speeds(found)}"
        else:
            left += ", so all stays on the CPU; "
            placed = search.whole(GPU, layers=0)
    planner, best = placed.planner, placed.fit
    if best is None:
        raise Error(_too_large(planner))
    chosen = replace(
        config,
        n_gpu_layers=planner.config.n_gpu_layers,
        n_cpu_moe=planner.config.n_cpu_moe,
        draft_gpu_layers=planner.config.draft_gpu_layers,
        mtp=planner.config.mtp,
        n_ctx=best.config.n_ctx,
        cache_type_k=best.config.cache_type_k,
        cache_type_v=best.config.cache_type_v,
        n_ubatch=best.config.n_ubatch,
        draft_window=best.config.draft_window,
    )
    uses_drafter = not drafters or planner.block_size > 0
    return replace(best, config=chosen, reason=f"{left}{best.reason}", uses_drafter=uses_drafter)


GPU, CPU, NONE = "the drafter on the GPU", "the drafter on the CPU", "no drafter"


@dataclass(frozen=True, slots=True)
class _Placed:
    """A placement of the weights, and the best settings that fit; None if none do."""

    planner: Planner
    fit: Fit | None

    @property
    def tokens_per_s(self) -> float:
        """Predicted speed; 0 if none can be predicted, less if no settings fit."""
        return -1.0 if self.fit is None else self.fit.plan.tokens_per_s or 0.0


@dataclass(frozen=True, slots=True)
class _Search:
    """A search for settings that fit, with the arguments of `fit_files`."""

    path: AnyPath
    drafters: AnyPaths
    config: LoadConfig
    fixed: Mapping[str, Any]
    decode: DecodeConfig
    vram: int | None

    def places(self, planner: Planner) -> list[str]:
        """Returns the places of the drafter to compare.

        At equal speed the first is taken: with more layers on the GPU, prompts take less time.
        """
        if not planner.block_size or self.decode.draft == "none":
            return [GPU]
        places = [GPU]
        if self.config.draft_gpu_layers is None:
            places.insert(0, CPU)
        if self.decode.draft == "auto" and self.decode.draft_type is None:
            places.append(NONE)
        return places

    def planner(self, place: str, layers: int | None, without_experts: int) -> Planner:
        """Returns a planner for a place of the drafter and the target's layers on the GPU."""
        config = replace(self.config, n_gpu_layers=layers, n_cpu_moe=without_experts)
        if place == CPU:
            config = replace(config, draft_gpu_layers=0)
        drafters = self.drafters
        if place == NONE:
            drafters, config = None, replace(config, mtp=False)
        return Planner(self.path, drafters, config, self.vram)

    def constraints(self, planner: Planner) -> FitConstraints:
        """Returns the settings that the user fixed."""
        return FitConstraints(
            n_ctx_train=planner.model.n_ctx_train,
            n_ctx=self.config.n_ctx,
            cache_types=(self.fixed.get("cache_type_k"), self.fixed.get("cache_type_v")),
            n_ubatch=self.fixed.get("n_ubatch"),
            draft_window=self.fixed.get("draft_window"),
            n_rows=verify_rows(planner.block_size, self.decode),
        )

    def whole(self, place: str, layers: int | None = None) -> _Placed:
        """Finds settings with all layers on the GPU, or as many as are given."""
        layers = self.config.n_gpu_layers if layers is None else layers
        planner = self.planner(place, layers, self.config.n_cpu_moe)
        return _Placed(planner, fitting.fit(planner.plan, self.constraints(planner)))

    def best(self, place: str) -> _Placed:
        """Finds settings with all layers on the GPU if a useful context fits, else with a part."""
        if place != GPU:
            whole = self.whole(place)
            n_ctx = self.config.n_ctx or min(whole.planner.model.n_ctx_train, PART_CONTEXT)
            if whole.fit is not None and (whole.fit.config.n_ctx or 0) >= n_ctx:
                return whole
        first = self.planner(place, None, self.config.n_cpu_moe)
        experts = self.config.n_cpu_moe == 0 and first.model.n_expert > 0
        part = fit_part(
            lambda layers, without: (
                self.planner(place, layers, without or self.config.n_cpu_moe).plan
            ),
            self.constraints(first),
            first.model.n_layer,
            experts,
        )
        if part is None:
            return _Placed(first, None)
        planner = self.planner(place, part.n_gpu_layers, part.n_cpu_moe)
        return _Placed(planner, part.fit)


def _speeds(placed: Mapping[str, _Placed]) -> str:
    """Returns the predicted speeds of placements, fastest first; "" if there is no choice."""
    speeds = {place: x.tokens_per_s for place, x in placed.items() if x.tokens_per_s > 0}
    ranked = sorted(speeds, key=lambda place: -speeds[place])
    told = [f"{place}: about {rounded(speeds[place])} tokens/s" for place in ranked]
    return ", ".join(told) + "; " if len(told) > 1 else ""


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
