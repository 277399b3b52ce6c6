"""How a model is loaded. An option is declared here, and nowhere else.

From the fields of LoadConfig it reaches the Python API, the command line (cli/model_arguments.py)
and the params of the C ABI, which has it under the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .._validate import choice, flag, integer, text
from ._ffi import ffi, fields_of, new
from .limits import MAX_PARALLEL, MAX_THREADS

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Names of K/V cache types, as llama.cpp spells them. Which pairs run is the device's matter."""

MAX_N_CTX = 1 << 30
MAX_LAYERS = 1 << 16
MAX_UBATCH = 1 << 16
MAX_CACHE_RAM = 1 << 30
DEFAULT_N_CTX = 32768
"""Default context in tokens, if a model was trained for more."""


@dataclass(frozen=True, slots=True)
class Option:
    """What an option of loading is and takes.

    about: one phrase. values: whole numbers, the names to choose from, str, or bool.
    flags: on the command line, as llama.cpp has them.
    none: what None stands for; "" where it is no value. none_words: how the command line says it.
    none_in_c: how the C ABI says it, for numbers; a name that is None is NULL there.
    note: for the command line only. metavar: its name of the value.
    shorthands: further flags, each for one value, and what they say in the help ("": nothing).
    """

    about: str
    values: range | tuple[str, ...] | type
    flags: tuple[str, ...]
    none: str = ""
    none_words: tuple[str, ...] = ()
    none_in_c: int = 0
    note: str = ""
    metavar: str = "N"
    shorthands: tuple[tuple[tuple[str, ...], object, str], ...] = ()

    def checked(self, name: str, value: object) -> object:
        """The value as it is kept. ValueError for one that is not taken."""
        if value is None and self.none:
            return None
        if isinstance(self.values, range):
            return integer(name, value, self.values.start, self.values.stop - 1)
        if isinstance(self.values, tuple):
            return choice(name, value, self.values)
        return flag(name, value) if self.values is bool else text(name, value)

    def in_c(self, value: Any) -> Any:
        """A checked value for a params struct; C text must outlive it."""
        if isinstance(value, str):
            return new("char[]", value.encode())
        if value is None:
            return ffi.NULL if self.values is str else self.none_in_c
        return int(value)


def _option(default: object, about: str, values: Any, *flags: str, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(about, values, flags, **more)})


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a model is placed in memory. Every value is checked; ValueError names what is wrong."""

    n_ctx: int | None = _option(
        None,
        "tokens the context holds",
        range(1, MAX_N_CTX + 1),
        "-c",
        "--ctx-size",
        none=f"all the model was trained for, at most {DEFAULT_N_CTX} and what fits",
        note="0: all the model was trained for",
    )
    cache_type_k: str = _option("f16", "type of the K cache", CACHE_TYPES, "-ctk", "--cache-type-k")
    cache_type_v: str = _option("f16", "type of the V cache", CACHE_TYPES, "-ctv", "--cache-type-v")
    n_threads: int | None = _option(
        None,
        "CPU threads",
        range(1, MAX_THREADS + 1),
        "-t",
        "--threads",
        none="one for each fast core, within a container's quota",
        none_words=("-1",),
    )
    device: str | None = _option(
        None,
        "name of the device for the layers that are not on the CPU",
        str,
        "-dev",
        "--device",
        none="the first GPU",
        metavar="NAME",
    )
    n_gpu_layers: int | None = _option(
        None,
        "layers on that device, the last ones, the head included",
        range(0, MAX_LAYERS + 1),
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        none="all",
        none_words=("auto", "all"),
        none_in_c=-1,
    )
    n_cpu_moe: int = _option(
        0,
        "first layers whose experts stay on the CPU",
        range(0, MAX_LAYERS + 1),
        "-ncmoe",
        "--n-cpu-moe",
        shorthands=((("-cmoe", "--cpu-moe"), MAX_LAYERS, "experts of all layers stay on the CPU"),),
    )
    backend_module: str | None = _option(
        None,
        "file of a ggml backend (libggml-cuda.so) to load first",
        str,
        "--backend-module",
        none="that of GGML_BACKEND_PATH, if set",
        metavar="FILE",
    )
    n_parallel: int = _option(
        1,
        "answers in the making at once, which share the context",
        range(1, MAX_PARALLEL + 1),
        "-np",
        "--parallel",
    )
    n_ubatch: int = _option(
        512, "prompt tokens computed at once", range(1, MAX_UBATCH + 1), "-ub", "--ubatch-size"
    )
    cache_ram: int | None = _option(
        None,
        "MiB of main memory for what is kept of earlier answers",
        range(0, MAX_CACHE_RAM + 1),
        "-cram",
        "--cache-ram",
        none="a quarter of what is free beside the model, at most 8192",
        none_words=("-1",),
    )
    draft_window: int = _option(
        4096, "positions the drafter looks back", range(1, MAX_N_CTX + 1), "--draft-window"
    )
    repack: bool = _option(
        True,
        "rearrange weights for the CPU's faster kernels, in memory of their own, or leave them as "
        "they are in the file",
        bool,
        "--repack",
        shorthands=((("-nr",), False, ""),),
    )

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            object.__setattr__(self, name, option.checked(name, getattr(self, name)))


OPTIONS: dict[str, Option] = {x.name: x.metadata["option"] for x in fields(LoadConfig)}
"""The options of loading by name."""
DEFAULTS: dict[str, Any] = {x.name: x.default for x in fields(LoadConfig)}


def _described(name: str, option: Option) -> str:
    names = f": {', '.join(option.values)}" if isinstance(option.values, tuple) else ""
    none = f" None: {option.none}." if option.none else ""
    return f"    {name}: {option.about}{names}.{none}"


LoadConfig.__doc__ = "\n".join(
    [f"{LoadConfig.__doc__}\n", *(_described(name, option) for name, option in OPTIONS.items())]
)


def c_options(struct: str, config: LoadConfig) -> dict[str, Any]:
    """Options by the names of the params struct's fields; keep them as long as the struct."""
    names = OPTIONS.keys() & fields_of(struct)
    return {name: OPTIONS[name].in_c(getattr(config, name)) for name in names}
