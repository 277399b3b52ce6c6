"""LoadConfig: the options of loading a model, each declared here once.

Its fields also make the flags of the commands (cli/model_arguments.py) and fill the fields of the
same names in the params structs of the C ABI.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .._validate import choice, flag, integer, text
from ._ffi import ffi, fields_of, new
from .limits import MAX_PARALLEL, MAX_THREADS

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""llama.cpp's names of K/V cache types. Which pairs of K and V work depends on the device."""

MAX_N_CTX = 1 << 24
MAX_LAYERS = 1 << 16
MAX_UBATCH = 1 << 16
MAX_CACHE_RAM = 1 << 30
MAX_VOCAB = 1 << 24
DEFAULT_N_CTX = 32768
"""Default context in tokens of models that were trained for more."""


@dataclass(frozen=True, slots=True)
class Option:
    """Description of one option of loading, for Python, the command line and C.

    about: one phrase for help texts. values: range of integers, valid names, str, or bool.
    none: meaning of None in help texts; "" if None is invalid. none_words: words for None on the
    command line. none_in_c: integer for None in C, where texts are NULL instead. note, metavar: a
    remark and the name of the value in the help of commands. shorthands: more flags, each with the
    value that it stands for and its help ("": hidden).
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
        """Returns a value of this option, converted to its type; ValueError if it is invalid."""
        if value is None and self.none:
            return None
        if isinstance(self.values, range):
            return integer(name, value, self.values.start, self.values.stop - 1)
        if isinstance(self.values, tuple):
            return choice(name, value, self.values)
        return flag(name, value) if self.values is bool else text(name, value)

    def in_c(self, value: Any) -> Any:
        """Converts a checked value for a params struct. The caller must keep C text alive."""
        if isinstance(value, str):
            return new("char[]", value.encode())
        if value is None:
            return ffi.NULL if self.values is str else self.none_in_c
        return int(value)


def _option(default: object, about: str, values: Any, *flags: str, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(about, values, flags, **more)})


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Options of loading a model. A bad value raises ValueError with the name of its field."""

    n_ctx: int | None = _option(
        None,
        "tokens of context, for all parallel requests together",
        range(1, MAX_N_CTX + 1),
        "-c",
        "--ctx-size",
        none=f"the model's training context, at most {DEFAULT_N_CTX} and what fits in memory",
        note="0: the model's training context",
    )
    cache_type_k: str = _option("f16", "type of the K cache", CACHE_TYPES, "-ctk", "--cache-type-k")
    cache_type_v: str = _option("f16", "type of the V cache", CACHE_TYPES, "-ctv", "--cache-type-v")
    n_threads: int | None = _option(
        None,
        "CPU threads",
        range(1, MAX_THREADS + 1),
        "-t",
        "--threads",
        none="one for each fast core, within the CPU quota of a container",
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
        "number of last layers on the device, the output head among them",
        range(0, MAX_LAYERS + 1),
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        none="all",
        none_words=("auto", "all", "-1"),
        none_in_c=-1,
    )
    n_cpu_moe: int = _option(
        0,
        "number of first layers whose experts stay on the CPU",
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
        "requests that run at once and share the context",
        range(1, MAX_PARALLEL + 1),
        "-np",
        "--parallel",
    )
    n_ubatch: int = _option(
        512, "most prompt tokens in a micro-batch", range(1, MAX_UBATCH + 1), "-ub", "--ubatch-size"
    )
    cache_ram: int | None = _option(
        None,
        "MiB of main memory for the prefix cache",
        range(0, MAX_CACHE_RAM + 1),
        "-cram",
        "--cache-ram",
        none="a quarter of the memory that is free beside the model, at most 8192",
        none_words=("-1",),
    )
    mtp: bool = _option(
        True,
        "draft with the MTP layer of the model's own file, if there is one and no drafter is given",
        bool,
        "--mtp",
    )
    draft_vocab: int | None = _option(
        None,
        "tokens that an MTP layer drafts: those of the N lowest ids, and the end tokens",
        range(256, MAX_VOCAB + 1),
        "--draft-vocab",
        none="all, or those of the file's d2t",
        none_words=("all",),
    )
    draft_gpu_layers: int | None = _option(
        None,
        "0: the drafter stays on the CPU, also beside a GPU; else it is on the model's device",
        range(0, MAX_LAYERS + 1),
        "-ngld",
        "--gpu-layers-draft",
        "--n-gpu-layers-draft",
        none="all",
        none_words=("auto", "all", "-1"),
        none_in_c=-1,
    )
    draft_window: int = _option(
        4096,
        "number of last positions that the drafter attends to",
        range(1, MAX_N_CTX + 1),
        "--draft-window",
    )
    draft_embedding_scale: str = _option(
        "auto",
        "factor of the drafter's token embeddings: 1, or the target's or sqrt(hidden size)",
        ("auto", "raw", "sqrt"),
        "--draft-embedding-scale",
        note="auto: the file's; without one, if the target has a scale, the better of raw and sqrt",
    )
    draft_tap_shift: int = _option(
        0,
        "number added to the indices of the target layers that the drafter reads",
        range(-MAX_LAYERS, MAX_LAYERS + 1),
        "--draft-tap-shift",
    )
    draft_attention: str = _option(
        "auto",
        "attention within a block of the drafter",
        ("auto", "causal", "bidirectional"),
        "--draft-attention",
        note="auto: the file's",
    )
    draft_unwindowed: bool = _option(
        False,
        "let the drafter's layers with a sliding window attend to all positions",
        bool,
        "--draft-unwindowed",
    )
    repack: bool = _option(
        True,
        "copy weights into layouts for faster CPU kernels, or use them from the file as they are",
        bool,
        "--repack",
        shorthands=((("-nr",), False, ""),),
    )

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            object.__setattr__(self, name, option.checked(name, getattr(self, name)))


OPTIONS: dict[str, Option] = {x.name: x.metadata["option"] for x in fields(LoadConfig)}
DEFAULTS: dict[str, Any] = {x.name: x.default for x in fields(LoadConfig)}


def _described(name: str, option: Option) -> str:
    names = f": {', '.join(option.values)}" if isinstance(option.values, tuple) else ""
    none = f" None: {option.none}." if option.none else ""
    return f"    {name}: {option.about}{names}.{none}"


LoadConfig.__doc__ = "\n".join(
    [f"{LoadConfig.__doc__}\n", *(_described(name, option) for name, option in OPTIONS.items())]
)


def c_options(struct: str, config: LoadConfig) -> dict[str, Any]:
    """Returns the values of a C struct's fields, by name, that are options of a LoadConfig.

    The caller must keep the dict while the struct is used: the struct points into strings in it.
    """
    names = OPTIONS.keys() & fields_of(struct)
    return {name: OPTIONS[name].in_c(getattr(config, name)) for name in names}
