"""The arguments that say how a model is loaded, and where. Flags of llama.cpp keep their names."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

from ..config import CACHE_TYPES, DEFAULT_N_CTX, MAX_LAYERS, LoadConfig


def add_model(p: argparse.ArgumentParser) -> None:
    """How a model is loaded; load_config() reads it."""
    group = p.add_argument_group("model")
    group.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        metavar="N",
        help="context in tokens, 0: all the model was trained for (default: that, at most "
        f"{DEFAULT_N_CTX} and what fits)",
    )
    group.add_argument(
        "-t",
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads, -1: one for each fast core, within a container's quota (default)",
    )
    group.add_argument(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        type=gpu_layers,
        metavar="N",
        help="layers on the GPU, the last ones, the head included; auto: all (default)",
    )
    add_device(group)
    group.add_argument(
        "-ub",
        "--ubatch-size",
        type=int,
        metavar="N",
        help=f"prompt tokens at once (default: {LoadConfig().n_ubatch})",
    )
    group.add_argument(
        "--repack",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="rearrange weights for the CPU's faster kernels (default), or leave them in the file",
    )
    group.add_argument("-nr", dest="repack", action="store_false", help=argparse.SUPPRESS)
    for flag, name, what in (("-ctk", "--cache-type-k", "K"), ("-ctv", "--cache-type-v", "V")):
        group.add_argument(
            flag, name, choices=CACHE_TYPES, help=f"type of the {what} cache (default: f16)"
        )
    group.add_argument(
        "--fit",
        action="store_true",
        help="choose what is not given of -c, -ctk, -ctv, -ub and --draft-window so that it fits",
    )
    group.add_argument(
        "--vram",
        type=byte_size,
        metavar="SIZE",
        help="use so much of the GPU, like 24G; with --plan also of an NVIDIA card that is not "
        "there",
    )


def add_device(group: argparse._ActionsContainer) -> None:
    """Where a model lies: --device, --cpu-moe, --n-cpu-moe and --backend-module."""
    group.add_argument(
        "-dev", "--device", metavar="NAME", help="device of --gpu-layers (default: the first GPU)"
    )
    experts = group.add_mutually_exclusive_group()
    experts.add_argument(
        "-ncmoe",
        "--n-cpu-moe",
        type=int,
        default=0,
        metavar="N",
        help="experts of the first N layers stay on the CPU",
    )
    experts.add_argument(
        "-cmoe",
        "--cpu-moe",
        dest="n_cpu_moe",
        action="store_const",
        const=MAX_LAYERS,
        help="experts of all layers stay on the CPU",
    )
    group.add_argument(
        "--backend-module",
        metavar="FILE",
        help="load a ggml backend (libggml-cuda.so) first; so does GGML_BACKEND_PATH",
    )


def load_config(args: argparse.Namespace, n_ctx_train: int | None) -> LoadConfig:
    """The flags of the model as a LoadConfig. ValueError names a bad value.

    n_ctx_train: for -c 0.
    """
    default = LoadConfig()
    given = {
        "n_ctx": n_ctx_train if args.ctx_size == 0 else args.ctx_size,
        "cache_type_k": args.cache_type_k,
        "cache_type_v": args.cache_type_v,
        "n_threads": None if args.threads == -1 else args.threads,
        "device": args.device,
        "n_gpu_layers": args.gpu_layers,
        "n_cpu_moe": args.n_cpu_moe,
        "backend_module": args.backend_module,
        "n_ubatch": args.ubatch_size,
        "draft_window": args.draft_window,
        "repack": args.repack,
    }
    return replace(default, **{name: value for name, value in given.items() if value is not None})


def gpu_layers(text: str) -> int | None:
    """A count, or None for "auto" and "all"."""
    if text in ("auto", "all"):
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, auto or all") from None


def byte_size(text: str) -> int:
    """The bytes of "24G" or "512M"; K, M, G and T are powers of 1024, as card makers count."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size like 24G")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))
