"""Defines the device, files and sizes that all parts of bench_gpu.py share."""

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
"""Fields of one JSON line of the report."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Amounts of work of the GPU measurement. preset: name of the target's shape.

    n_prompt: tokens before timed ones. n_decode: timed tokens of plain decoding. n_rounds: timed
    rounds. n_warm: untimed rounds before them, which build graphs. n_long: context of the part
    `memory`. chains, budgets: candidates of chains and of trees in the part `sweep`. prompts:
    prefill lengths. copied_bytes: size of a copy that measures bandwidth.
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
    """Device, files and sizes of the GPU measurement.

    device: ggml's name, "CPU", or None for the first GPU. module: path of a backend module. folder:
    folder of random models. tools: folder of peer-rounds, None to build it. build: backend to
    compile, "cuda" or "vulkan". cache: folder of compiled files and sources. target_file,
    drafter_file: files in place of random models. null_gpu: compute capability of the null GPU that
    replaces the GPU. n_gpu_layers: layers on the device, None for all.
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
    n_gpu_layers: int | None = None

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
            args.n_gpu_layers,
        )

    @property
    def target(self) -> Path:
        """File of the target: the given or the random one."""
        return self.target_file or self.folder / f"{self._name}.gguf"

    @property
    def drafter(self) -> Path:
        """File of the drafter: the given or the random one."""
        return self.drafter_file or self.folder / f"{self._name}-dflash.gguf"

    @property
    def arch(self) -> str:
        """CUDA architectures to compile for; "" for those of the GPUs in the machine."""
        return f"{self.null_gpu}-real" if self.null_gpu else ""

    @property
    def _name(self) -> str:
        """Name of the random target's file, which has no weights for a null GPU."""
        return f"{self.sizes.preset}-empty" if self.null_gpu else self.sizes.preset

    @property
    def on_cpu(self) -> bool:
        """True if the CPU is measured, to try the script."""
        return (self.device or "").upper() == "CPU"

    @property
    def has_cuda(self) -> bool:
        """True if an NVIDIA GPU is measured, not another device or one that computes nothing."""
        named = (self.device or "CUDA").upper().startswith("CUDA")
        return named and self.null_gpu is None and self.build != "vulkan"

    def load_config(self, **fields: Any) -> LoadConfig:
        """Returns a LoadConfig with the layers' places and the given fields."""
        place: Mapping[str, Any] = (
            {"n_gpu_layers": 0}
            if self.on_cpu
            else {"device": self.device, "n_gpu_layers": self.n_gpu_layers}
        )
        module = None if self.on_cpu else self.module
        return LoadConfig(backend_module=module, n_threads=self.threads, **place, **fields)

    def found_device(self) -> native.Device:
        """Loads the backend module and returns ggml's device. Raises Error if there is none."""
        if self.module is not None and not self.on_cpu:
            native.load_backend(self.module)
        devices = native.devices()
        for device in devices:
            wanted = device.type == "gpu" if self.device is None else _same(self.device, device)
            if wanted:
                return device
        names = ", ".join(device.name for device in devices)
        what = "no GPU" if self.device is None else f"no device {self.device}"
        raise native.Error(f"{what} among {names}; load its backend with --backend-module")


def _same(name: str, device: native.Device) -> bool:
    return name.lower() == device.name.lower()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments that make a Setting."""
    parser.add_argument(
        "--device", metavar="NAME", help="ggml's name of the device, or CPU; default: the first GPU"
    )
    parser.add_argument(
        "--backend-module", metavar="FILE", help="load the device's backend from FILE"
    )
    parser.add_argument("--build", choices=KINDS, help="compile this backend, unless it exists")
    parser.add_argument(
        "--cache",
        type=Path,
        default=DEFAULT_CACHE,
        help="folder for compiled files; default: %(default)s",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/gpu"),
        help="folder for random models; default: %(default)s",
    )
    parser.add_argument(
        "--null-gpu",
        metavar="CAPABILITY",
        help="replace the GPU by one that computes nothing; 86: as an RTX 3090",
    )
    parser.add_argument("--tools", type=Path, help="folder with peer-rounds; default: build it")
    parser.add_argument(
        "--quick", action="store_true", help="measure tiny models, to try the script"
    )
    parser.add_argument(
        "-m", "--model", type=Path, metavar="GGUF", help="target to measure; default: a random one"
    )
    parser.add_argument(
        "-md", "--model-draft", type=Path, metavar="GGUF", help="drafter of --model"
    )
    parser.add_argument("-t", "--threads", type=int, help="default: one per physical core")
    parser.add_argument(
        "-ngl", "--n-gpu-layers", type=int, metavar="N", help="layers on the GPU; default: all"
    )
