"""Writes python-tiny with its trained MTP layer as a file of 150 MB that has the same text.

    scripts/bench/deepen.py OUT.gguf [--layers 3] [--width 18] [--whole-head] [--shuffled]

The layers are followed by copies whose output projections are zero, and feed-forward networks have
repeated rows whose products are multiplied by zero. Both are computed and add nothing, so a pass
reads as many weights as one of a larger model, and tokens, hidden states of the first layers, and
accepted drafts are those of python-tiny.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import ReaderTensor
from numpy.typing import NDArray

from dflash_gguf.bundled import TARGET

LAYER = Path(__file__).resolve().parents[2] / "tests" / "support" / "python_tiny_mtp.gguf"
OUTPUTS = ("attn_output", "ssm_out", "ffn_down")

Named = tuple[str, ReaderTensor, NDArray[np.uint8]]
"""Name of a tensor in the file to write, its source, and its rows as stored."""


def deepened(
    path: Path,
    *,
    layers: int = 3,
    width: int = 18,
    whole_head: bool = False,
    shuffled: bool = False,
) -> Path:
    """Writes the file with `layers` times the layers and `width` times the feed-forward width.

    whole_head: drafts all tokens, as llama.cpp does. shuffled: rows of the MTP layer's matrices are
    in random order.
    """
    target, layer = gguf.GGUFReader(TARGET), gguf.GGUFReader(LAYER)
    n_block = target.fields["qwen35.block_count"].contents()
    recurrent = target.fields["qwen35.attention.recurrent_layers"].contents()
    changed = {
        "qwen35.block_count": layers * n_block + 1,
        "qwen35.attention.recurrent_layers": [*recurrent * layers, False],
        "qwen35.feed_forward_length": width
        * target.fields["qwen35.feed_forward_length"].contents(),
    }
    writer = gguf.GGUFWriter(path, "qwen35")
    for name, field in (target.fields | layer.fields).items():
        if not name.startswith(("GGUF.", "general.architecture")):
            element = field.types[1] if len(field.types) > 1 else None
            value = changed.get(name, field.contents())
            writer.add_key_value(name, value, field.types[0], element)
    for name, tensor, data in (
        *_trunk(target, n_block, layers),
        *_mtp(layer, layers * n_block, whole_head=whole_head, shuffled=shuffled),
    ):
        writer.add_tensor(name, _widened(name, data, width), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _trunk(target: gguf.GGUFReader, n_block: int, layers: int) -> Iterator[Named]:
    for tensor in target.tensors:
        yield tensor.name, tensor, tensor.data
        if tensor.name.startswith("blk."):
            _, block, kind = tensor.name.split(".", 2)
            data = np.zeros_like(tensor.data) if kind.startswith(OUTPUTS) else tensor.data
            for copy in range(1, layers):
                yield f"blk.{int(block) + copy * n_block}.{kind}", tensor, data


def _mtp(
    layer: gguf.GGUFReader, block: int, *, whole_head: bool, shuffled: bool
) -> Iterator[Named]:
    random = np.random.default_rng(0)
    for tensor in layer.tensors:
        data = (
            random.permutation(tensor.data) if shuffled and tensor.data.ndim == 2 else tensor.data
        )
        if tensor.name.startswith("blk."):
            yield f"blk.{block}.{tensor.name.split('.', 2)[2]}", tensor, data
        elif not whole_head:
            yield tensor.name, tensor, data


def _widened(name: str, data: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    if ".ffn_down." in name:
        return np.pad(data, ((0, 0), (0, (width - 1) * data.shape[1])))
    if ".ffn_" in name:
        return np.tile(data, (width, 1))
    return data


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("outfile", type=Path, metavar="OUT.gguf")
    add("--layers", type=int, default=3, metavar="N", help="write N times as many layers")
    add("--width", type=int, default=18, metavar="N", help="make FFNs N times as wide")
    add("--whole-head", action="store_true", help="draft all tokens, as llama.cpp does")
    add("--shuffled", action="store_true", help="shuffle the rows of the MTP layer's matrices")
    args = parser.parse_args()
    deepened(
        args.outfile,
        layers=args.layers,
        width=args.width,
        whole_head=args.whole_head,
        shuffled=args.shuffled,
    )


if __name__ == "__main__":
    main()
