"""The setting that every part of a measurement is given."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_gguf import native
from dflash_gguf.backend_build.build import KINDS
from dflash_gguf.backend_build.sources import DEFAULT_CACHE
from dflash_gguf.config import LoadConfig

Figures = dict[str, Any]
"""One line of the report."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Amounts to measure. preset: the shape of the pair.

    n_prompt: tokens before what is timed. n_warm: rounds before those that are timed, since graphs
    are built and captured meanwhile. n_long: of the long context. budgets: candidates of trees.
    prompts: lengths of prefills.
    """

    preset: str
    n_prompt: int
    n_decode: int
    n_rounds: int
    n_warm: int
    n_long: int
    chains: tuple[int, ...]
    budgets: tuple[int, ...]
    prompts: tuple[int, ...]
    copied_bytes: int


FULL = Sizes(
    "qwen35-27b",
    n_prompt=512,
    n_decode=128,
    n_rounds=24,
    n_warm=16,
    n_long=131072,
    chains=(3, 7, 11, 15),
    budgets=(7, 11, 15, 18, 22, 27, 31, 39, 47, 63, 95, 127),
    prompts=(1024, 8192, 32768),
    copied_bytes=4 << 30,
)
QUICK = Sizes(
    "tiny-qwen35",
    n_prompt=64,
    n_decode=4,
    n_rounds=2,
    n_warm=2,
    n_long=1024,
    chains=(15,),
    budgets=(22,),
    prompts=(64, 300),
    copied_bytes=16 << 20,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Device, files and sizes.

    device: ggml's name; "CPU" for the processor; None for the first GPU. module: a backend module.
    folder: for the files that are written. tools: folder with llama.cpp's tools, None to build
    them. build: kind of the backend to compile. cache: of what is compiled, and of its sources.
    target, drafter: files to measure in place of random ones. null_gpu:
    compute capability of one that computes nothing, in place of a GPU.
    """

    device: str | None
    module: str | None
    folder: Path
    sizes: Sizes
    tools: Path | None = None
    build: str | None = None
    cache: Path = DEFAULT_CACHE
    threads: int | None = None
    target_file: Path | None = None
    drafter_file: Path | None = None
    null_gpu: str | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Setting:
        """Builds a setting from the arguments of `add_arguments`."""
        return cls(
            args.device,
            args.backend_module,
            args.folder,
            QUICK if args.quick else FULL,
            args.tools,
            args.build,
            args.cache,
            args.threads,
            args.model,
            args.model_draft,
            args.null_gpu,
        )

    @property
    def target(self) -> Path:
        """The pair's target."""
        return self.target_file or self.folder / f"{self._name}.gguf"

    @property
    def drafter(self) -> Path:
        """Its drafter."""
        return self.drafter_file or self.folder / f"{self._name}-dflash.gguf"

    @property
    def arch(self) -> str:
        """CUDA architectures to compile for; "" for those of the GPUs in the machine."""
        return f"{self.null_gpu}-real" if self.null_gpu else ""

    @property
    def _name(self) -> str:
        """Name of the files to write: those of a null GPU are without weights."""
        return f"{self.sizes.preset}-empty" if self.null_gpu else self.sizes.preset

    @property
    def on_cpu(self) -> bool:
        """True if the CPU is measured."""
        return (self.device or "").upper() == "CPU"

    def load_config(self, **fields: Any) -> LoadConfig:
        """A configuration with everything on the device."""
        place: Mapping[str, Any] = (
            {"n_gpu_layers": 0} if self.on_cpu else {"device": self.device, "n_gpu_layers": None}
        )
        module = None if self.on_cpu else self.module
        return LoadConfig(backend_module=module, n_threads=self.threads, **place, **fields)

    def found_device(self) -> native.Device:
        """The device as ggml lists it. Raises Error if it is not there."""
        if self.module is not None and not self.on_cpu:
            native.load_backend(self.module)
        devices = native.devices()
        for device in devices:
            wanted = device.type == "gpu" if self.device is None else _same(self.device, device)
            if wanted:
                return device
        names = ", ".join(device.name for device in devices)
        what = "no GPU" if self.device is None else f"no device {self.device}"
        raise native.Error(f"{what} among {names}: is the backend module of its kind given?")


def _same(name: str, device: native.Device) -> bool:
    return name.lower() == device.name.lower()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of a Setting."""
    parser.add_argument("--device", metavar="NAME", help="default: the first GPU; CPU: without one")
    parser.add_argument("--backend-module", metavar="FILE", help="a backend of ggml to load first")
    parser.add_argument("--build", choices=KINDS, help="compile it, unless that was done before")
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help="of what is built; default: %(default)s"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("build/gpu"), help="for models; default: %(default)s"
    )
    parser.add_argument(
        "--null-gpu",
        metavar="CAPABILITY",
        help="without a GPU: one of 24 GiB that computes nothing, 86 for an RTX 3090",
    )
    parser.add_argument("--tools", type=Path, help="folder with peer-rounds; default: built")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("-m", "--model", type=Path, metavar="GGUF", help="in place of a random one")
    parser.add_argument("-md", "--model-draft", type=Path, metavar="GGUF", help="its drafter")
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
