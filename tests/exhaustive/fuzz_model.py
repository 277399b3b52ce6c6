"""Child of test_fuzz.py: tokenises and prefills four tokens with damaged model files.

Arguments: folder of valid GGUF files, first index, count. Prints each index before its run, then
"ran N, prefilled M". A file may raise Error or ValueError; any other exception, a signal, 20
seconds or 4 GiB end the process.
"""

from __future__ import annotations

import random
import resource
import signal
import struct
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_gguf.config import LoadConfig
from dflash_gguf.native import Engine, Error, Model, Sequence
from dflash_gguf.text.tokenizer import Tokenizer

SECONDS = 20
ADDRESS_SPACE = 4 << 30
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
NUMBERS = (0, 1, -1, 2, 3, 7, 16, 33, 127, 255, 256, 1 << 15, 1 << 16, 1 << 20, (1 << 31) - 1)
NUMBERS += (-(1 << 31), (1 << 32) - 1, 1 << 32, (1 << 62) + 8, (1 << 63) - 1, -(1 << 63))
REALS = (0.0, -0.0, -1.0, 1e-30, 1e30, 1.0, float("inf"), float("-inf"), float("nan"))


@dataclass
class Entry:
    """One key or tensor of a GGUF header: its name, and the bytes after the name."""

    name: bytes
    rest: bytes


@dataclass
class File:
    """A GGUF file in parts; `counts` are the numbers of tensors and keys that its header claims."""

    counts: tuple[int, int]
    keys: list[Entry]
    tensors: list[Entry]
    data: bytearray

    def bytes(self) -> bytes:
        n_tensors, n_keys = self.counts
        head = b"GGUF" + struct.pack("<IQQ", 3, n_tensors % (1 << 64), n_keys % (1 << 64))
        for entry in (*self.keys, *self.tensors):
            head += struct.pack("<Q", len(entry.name)) + entry.name + entry.rest
        return head + bytes(-len(head) % 32) + self.data


def value_size(data: bytes, kind: int, at: int) -> int:
    """Returns the size in bytes of the GGUF value of type `kind` at offset `at`."""
    if kind in SCALARS:
        return struct.calcsize("<" + SCALARS[kind])
    if kind == STRING:
        return 8 + int.from_bytes(data[at : at + 8], "little")
    element, n = struct.unpack_from("<IQ", data, at)
    end = at + 12
    for _ in range(n):
        end += value_size(data, element, end)
    return end - at


def parse(data: bytes) -> File:
    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    keys, tensors, at = [], [], 24

    def name() -> bytes:
        nonlocal at
        size = int.from_bytes(data[at : at + 8], "little")
        at += 8 + size
        return data[at - size : at]

    for _ in range(n_keys):
        key = name()
        kind = int.from_bytes(data[at : at + 4], "little")
        size = 4 + value_size(data, kind, at + 4)
        keys.append(Entry(key, data[at : at + size]))
        at += size
    for _ in range(n_tensors):
        tensor = name()
        size = 4 + 8 * int.from_bytes(data[at : at + 4], "little") + 12
        tensors.append(Entry(tensor, data[at : at + size]))
        at += size
    return File((n_tensors, n_keys), keys, tensors, bytearray(data[at + -at % 32 :]))


def pack(kind: int, value: float, rng: random.Random) -> bytes:
    code = SCALARS[kind]
    if code in "fd":
        return struct.pack("<" + code, value if rng.randrange(2) else rng.choice(REALS))
    size = struct.calcsize("<" + code)
    return (int(value) % (1 << 8 * size)).to_bytes(size, "little")


def damage_key(file: File, rng: random.Random) -> None:
    """Changes a key's value, type, elements or length, or removes the key."""
    # Keys of the architecture matter most; the vocabulary's are fuzzed by fuzz_vocabulary.py.
    numbers = [e for e in file.keys if e.rest[0] in SCALARS]
    entry = rng.choice(numbers if rng.randrange(3) else file.keys)
    kind = entry.rest[0]
    choice = rng.randrange(8)
    if choice == 0:
        file.keys.remove(entry)
        file.counts = (file.counts[0], file.counts[1] - 1)
    elif choice == 1:
        other = rng.choice(list(SCALARS))
        entry.rest = struct.pack("<I", other) + pack(other, rng.choice(NUMBERS), rng)
    elif choice == 2:
        n = rng.choice((0, 1, 2, 4, 600))
        values = b"".join(pack(5, rng.choice(NUMBERS), rng) for _ in range(n))
        entry.rest = struct.pack("<IIQ", ARRAY, 5, n) + values
    elif kind in SCALARS and choice < 5:
        step = rng.choice((-1, 1))
        entry.rest = entry.rest[:4] + bytes([(entry.rest[4] + step) % 256]) + entry.rest[5:]
    elif kind in SCALARS:
        entry.rest = entry.rest[:4] + pack(kind, rng.choice(NUMBERS), rng)
    elif kind == ARRAY and entry.rest[4] in SCALARS:
        n = int.from_bytes(entry.rest[8:16], "little")
        size = struct.calcsize("<" + SCALARS[entry.rest[4]])
        at = 16 + size * rng.randrange(max(1, n))
        value = pack(entry.rest[4], rng.choice(NUMBERS), rng)
        entry.rest = entry.rest[:at] + value + entry.rest[at + size :]
    else:
        at = rng.randrange(4, len(entry.rest))
        entry.rest = entry.rest[:at] + rng.randbytes(1) + entry.rest[at + 1 :]


def damage_tensor(file: File, rng: random.Random) -> None:
    entry = rng.choice(file.tensors)
    n = int.from_bytes(entry.rest[:4], "little")
    shape = list(struct.unpack_from(f"<{n}Q", entry.rest, 4))
    kind, offset = struct.unpack_from("<IQ", entry.rest, 4 + 8 * n)
    choice = rng.randrange(8)
    if choice == 0:
        shape[rng.randrange(n)] = rng.choice(NUMBERS) % (1 << 64)
    elif choice == 1:
        at = rng.randrange(n)
        shape[at] = (shape[at] + rng.choice((-32, -1, 1, 32))) % (1 << 64)
    elif choice == 2:
        rng.shuffle(shape)
    elif choice == 3:
        shape = shape[1:] if n > 1 and rng.randrange(2) else [*shape, rng.choice((0, 1, 2))]
    elif choice == 4:
        kind = rng.randrange(48)
    elif choice == 5:
        offset = rng.choice(
            (0, 1, offset + 1, offset + 32, 1 << 40, (1 << 64) - 32, len(file.data))
        )
    elif choice == 6:
        entry.name = rng.choice(
            (rng.choice(file.tensors).name, entry.name + b"x", b"", b"\xff" * 63)
        )
    else:
        file.tensors.remove(entry)
        file.counts = (file.counts[0] - 1, file.counts[1])
    entry.rest = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def damage_counts(file: File, rng: random.Random) -> None:
    n_tensors, n_keys = file.counts
    number = rng.choice((*NUMBERS, n_keys + 1, n_tensors - 1, n_tensors + 1))
    file.counts = (n_tensors, number) if rng.randrange(2) else (number, n_keys)


def damage_data(file: File, rng: random.Random) -> None:
    """Overwrites weights with infinities, NaNs or random bytes."""
    for _ in range(rng.choice((1, 4, 64))):
        at = rng.randrange(len(file.data)) & ~3
        part = rng.choice((b"\x00\x00\x80\x7f", b"\x00\x00\xc0\xff", b"\xff" * 4, rng.randbytes(4)))
        file.data[at : at + 4] = part[: len(file.data) - at]


def damage_bytes(data: bytes, end: int, rng: random.Random) -> bytes:
    """Damages bytes before offset `end`, whatever their meaning."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, kind = rng.randrange(end), rng.randrange(5)
        if kind == 0:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            size = rng.choice((1, 4, 8))
            found[at : at + size] = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
        elif kind == 2:
            del found[at : at + rng.randrange(1, 40)]
        elif kind == 3:
            other = rng.randrange(end)
            found[at:at] = found[other : other + rng.randrange(1, 40)]
        else:
            del found[max(24, rng.randrange(len(found))) :]
        end = min(end, len(found))
    return bytes(found)


def mutated(data: bytes, rng: random.Random) -> bytes:
    file = parse(data)
    head = len(data) - len(file.data)
    file.keys = [replace(x) for x in file.keys]
    if rng.randrange(4) == 0:
        return damage_bytes(data, head, rng)
    damages = (damage_key, damage_key, damage_key, damage_tensor, damage_tensor, damage_data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        (damage_counts if rng.randrange(16) == 0 else rng.choice(damages))(file, rng)
    return file.bytes()


def run(path: Path) -> bool:
    """Returns True if the file loads and prefills up to its logits."""
    tokenizer = None
    try:
        tokenizer = Tokenizer.from_file(path)
        model = Model(str(path), LoadConfig(n_ctx=64, n_ubatch=3, n_threads=1, n_gpu_layers=0))
        sequence = Sequence(Engine(model))
        sequence.prefill([1, 2, 3, 4 % model.n_vocab]).argmax()
    except (Error, ValueError):
        return False
    finally:
        if tokenizer is not None:
            tokenizer.close()
    return True


def main(folder: Path, first: int, count: int) -> None:
    originals = [path.read_bytes() for path in sorted(folder.glob("*.gguf"))]
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path = folder / f"{first}.damaged"
    n_prefilled = 0
    for index in range(first, first + count):
        print(index, flush=True)
        path.write_bytes(mutated(originals[index % len(originals)], random.Random(index)))
        signal.alarm(SECONDS)
        n_prefilled += run(path)
        signal.alarm(0)
    print(f"ran {count}, prefilled {n_prefilled}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
