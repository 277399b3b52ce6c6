"""Writes a GGUF of a published model's shape with random weights, as fast as memory allows.

    scripts/bench/synthetic_gguf.py qwen35-27b TARGET.gguf --outtype q4_k_m
    scripts/bench/synthetic_gguf.py qwen35-27b-dflash DRAFTER.gguf --target TARGET.gguf

Quantised blocks are valid, and their scales keep activations finite. A target has an invented
vocabulary or that of --vocabulary, a drafter its target's; llama.cpp loads both. --header-only
leaves out the weights: the file has its full length but takes no disk space, which is enough for
`dflash-run --plan`.
"""

from __future__ import annotations

import argparse
import errno
import math
import mmap
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from dflash_gguf.convert.plan import TensorPlan
from dflash_gguf.convert.schema import Key
from dflash_gguf.convert.types import FILE_TYPES, choose_types
from dflash_gguf.convert.write import ALIGNMENT, header_bytes, tensor_bytes
from numpy.typing import NDArray
from synthetic_shapes import PRESETS, Shape, metadata, tensors
from synthetic_vocabulary import copied_vocabulary, invented_vocabulary
from synthetic_weights import Pools, is_small, small_values

from dflash_gguf._files import replacing
from dflash_gguf.text.gguf_metadata import GgufMetadata

Piece = tuple[int, NDArray[np.uint8]]
"""A byte offset in the file, and the bytes to write there: a tensor or a part of it."""


def write_model(
    path: Path,
    shape: Shape,
    name: str,
    outtype: str,
    seed: int,
    vocabulary: Path | None = None,
    header_only: bool = False,
) -> None:
    """Writes a complete file or none. vocabulary: file to copy it from; None to invent one."""
    meta = metadata(shape, name, outtype)
    if vocabulary is None:
        invented_vocabulary(meta, shape.n_vocab)
    else:
        copied_vocabulary(meta, vocabulary)
    plans = [
        # Only type and size of a TensorPlan are used, so a view of one zero replaces its values.
        TensorPlan(n, s, (np.broadcast_to(np.float32(0), (math.prod(s[:-1]), s[-1])),))
        for n, s in tensors(shape)
    ]
    types = choose_types(
        plans, outtype, shape.arch, shape.n_layer, shape.experts.n if shape.experts else 0
    )
    if shape.experts and shape.experts.in_blocks:
        types |= {n: "mxfp4" for n, _ in tensors(shape) if n.endswith("_exps.weight")}
    header = header_bytes(meta, plans, types)
    starts = [len(header)]
    for plan in plans:
        n_bytes = tensor_bytes(plan, types[plan.name])
        starts.append(starts[-1] + n_bytes + -n_bytes % ALIGNMENT)
    with replacing(path) as file:
        file.write(header)
        file.truncate(starts[-1])
        if not header_only:
            # Checks the free space first, as a memory map cannot report a full disk.
            if shutil.disk_usage(path.parent).free < starts[-1]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            file.flush()
            _fill(file.fileno(), _pieces(plans, types, starts, np.random.default_rng(seed)))


def _pieces(
    plans: Sequence[TensorPlan],
    types: Mapping[str, str],
    starts: Sequence[int],
    random: np.random.Generator,
) -> Iterator[Piece]:
    pools = Pools(random)
    # `starts` has one offset more than tensors: the end of the file.
    for plan, start in zip(plans, starts, strict=False):
        kind = types[plan.name]
        if kind == "f32" and is_small(plan.name, plan.shape):
            yield start, small_values(plan.name, plan.shape, random)
            continue
        for piece in pools.pieces(kind, tensor_bytes(plan, kind)):
            yield start, piece
            start += len(piece)


def _fill(descriptor: int, pieces: Iterator[Piece]) -> None:
    """Copies bytes into a memory map of the file on all cores; plain writes would be serial."""
    with mmap.mmap(descriptor, 0) as mapped, ThreadPoolExecutor(os.cpu_count()) as threads:
        whole = np.frombuffer(mapped, np.uint8)
        copies = [
            threads.submit(np.copyto, whole[start : start + len(values)], values)
            for start, values in pieces
        ]
        for copy in copies:
            copy.result()
        del whole, copies, copy  # a memory map with views cannot be closed


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a GGUF with random weights")
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("outfile", type=Path, metavar="OUT.gguf")
    parser.add_argument("--outtype", choices=sorted(FILE_TYPES), default="q8_0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--target", type=Path, metavar="TARGET.gguf", help="target of a drafter preset"
    )
    parser.add_argument(
        "--vocabulary", type=Path, metavar="VOCAB.gguf", help="file of a target's vocabulary"
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="write only the first N layers; for a drafter: its target has only N layers",
    )
    parser.add_argument(
        "--header-only", action="store_true", help="write no weights, for memory plans"
    )
    args = parser.parse_args()
    shape = PRESETS[args.preset]
    if bool(shape.taps) != (args.target is not None):
        parser.error(f"{args.preset}: give --target with drafter presets, and only with them")
    if args.layers is not None:
        target = PRESETS[args.preset.removesuffix("-dflash")]
        if not 1 <= args.layers <= target.n_layer:
            parser.error(f"--layers {args.layers}: give 1 to {target.n_layer} for {args.preset}")
        if shape.taps:
            taps = {tap * args.layers // target.n_layer for tap in shape.taps}
            shape = replace(shape, taps=tuple(sorted(taps)))
        else:
            shape = shape.cut(args.layers)
    try:
        started = time.perf_counter()
        if args.vocabulary is not None:
            with GgufMetadata(args.vocabulary) as file:
                shape = replace(shape, n_vocab=file.entries[Key.TOKENIZER_TOKENS].count)
        write_model(
            args.outfile,
            shape,
            args.preset,
            args.outtype,
            args.seed,
            args.target or args.vocabulary,
            args.header_only,
        )
        seconds, size = time.perf_counter() - started, args.outfile.stat().st_size
        print(f"{args.outfile}: {size / 1e9:.2f} GB in {seconds:.1f} s")
    except OSError as error:
        sys.exit(f"error: {args.outfile}: cannot be written: {error.strerror or error}")


if __name__ == "__main__":
    main()
