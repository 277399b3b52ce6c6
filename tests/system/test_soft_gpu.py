"""Integer instructions of the software GPU against scalar models, with random operands."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_models import INTEGERS, Model, N, by_element, check, random, run, size
from soft_gpu import GpuError


def quotient(a: int, b: int) -> int:
    return -1 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int:
    return a if b == 0 else a - b * quotient(a, b)


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul.lo", lambda a, b: a * b),
        ("min", min),
        ("max", max),
        ("div", quotient),
        ("rem", remainder),
    ],
)
def test_integers(name: str, kind: str, model: Model) -> None:
    check(f"{name}.{kind} %d, %a, %b;", kind, [kind, kind], by_element(model, kind))


@pytest.mark.parametrize("kind", INTEGERS)
def test_products_of_integers(kind: str) -> None:
    bits, three = 8 * size(kind), [kind] * 3
    high = by_element(lambda a, b: a * b >> bits, kind)
    check(f"mul.hi.{kind} %d, %a, %b;", kind, three[:2], high)
    sums = by_element(lambda a, b, c: a * b + c, kind)
    check(f"mad.lo.{kind} %d, %a, %b, %c;", kind, three, sums)
    if bits > 16:
        sums = by_element(lambda a, b, c: (a * b >> bits) + c, kind)
        check(f"mad.hi.{kind} %d, %a, %b, %c;", kind, three, sums)
    if bits < 64:
        wide = f"{kind[0]}{2 * bits}"
        check(f"mul.wide.{kind} %d, %a, %b;", wide, three[:2], by_element(lambda a, b: a * b, wide))
        sums = by_element(lambda a, b, c: a * b + c, wide)
        check(f"mad.wide.{kind} %d, %a, %b, %c;", wide, [kind, kind, wide], sums)
    if kind[0] == "s":
        check(f"neg.{kind} %d, %a;", kind, [kind], by_element(lambda a: -a, kind))
        check(f"abs.{kind} %d, %a;", kind, [kind], by_element(abs, kind))


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic_and_shifts(bits: int) -> None:
    kind = f"b{bits}"
    check(f"and.{kind} %d, %a, %b;", kind, [kind, kind], np.bitwise_and)
    check(f"or.{kind} %d, %a, %b;", kind, [kind, kind], np.bitwise_or)
    check(f"xor.{kind} %d, %a, %b;", kind, [kind, kind], np.bitwise_xor)
    check(f"not.{kind} %d, %a;", kind, [kind], np.invert)
    rng = np.random.default_rng(bits)
    count = np.where(rng.random(N) < 0.1, 1000, rng.integers(0, bits + 2, N)).astype(np.uint32)
    for name, of in (("shl", f"b{bits}"), ("shr", f"u{bits}"), ("shr", f"s{bits}")):
        model = by_element((lambda a, n: a << n) if name == "shl" else (lambda a, n: a >> n), of)
        arrays = [random(of, rng), count]
        check(f"{name}.{of} %d, %a, %b;", of, [of, "u32"], model, arrays=arrays)


def test_logic_of_predicates() -> None:
    for name, model in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.not_equal)):
        check(f"{name}.pred %d, %a, %b;", "pred", ["pred", "pred"], model)
    check("not.pred %d, %a;", "pred", ["pred"], np.logical_not)
    check("mov.pred %d, %a;", "pred", ["pred"], lambda a: a)


def field(a: int, position: int, length: int, bits: int, signed: bool) -> int:
    """Bits from a position on; a field past the end is filled with the sign or with zeros."""
    position, length = position & 255, length & 255
    top = min(position + length - 1, bits - 1)
    sign = (a >> top & 1) if signed and length else 0
    found = [(a >> k & 1) if k < bits else sign for k in range(position, position + length)]
    value = sum(bit << k for k, bit in enumerate(found[:bits]))
    return value - (sign << len(found)) if len(found) < bits else value


@pytest.mark.parametrize("bits", [32, 64])
def test_fields_of_bits(bits: int) -> None:
    kind, mask = f"b{bits}", 2**bits - 1
    check(f"popc.{kind} %d, %a;", "u32", [kind], by_element(int.bit_count, "u32"))
    check(f"clz.{kind} %d, %a;", "u32", [kind], by_element(lambda a: bits - a.bit_length(), "u32"))
    reverse = by_element(lambda a: int(f"{a:0{bits}b}"[::-1], 2), kind)
    check(f"brev.{kind} %d, %a;", kind, [kind], reverse)
    check(f"bfind.u{bits} %d, %a;", "u32", [kind], by_element(lambda a: a.bit_length() - 1, "u32"))
    rng = np.random.default_rng(bits)
    position = rng.integers(0, bits + 3, N).astype(np.uint32)
    length = rng.integers(0, bits + 3, N).astype(np.uint32)
    for of in (f"u{bits}", f"s{bits}"):
        model = by_element(lambda a, p, n, s=of[0] == "s": field(a, p, n, bits, s), of)
        arrays = [random(of, rng), position, length]
        check(f"bfe.{of} %d, %a, %b, %c;", of, [of, "u32", "u32"], model, arrays=arrays)

    def inserted(a: int, b: int, p: int, n: int) -> int:
        into = (2**n - 1) << p & mask
        return (b & ~into) | (a << p & into)

    arrays = [random(kind, rng), random(kind, rng), position, length]
    check(
        f"bfi.{kind} %d, %a, %b, %c, %e;",
        kind,
        [kind, kind, "u32", "u32"],
        by_element(inserted, kind),
        arrays=arrays,
    )


def test_masks_of_bits() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 35, N).astype(np.uint32) for _ in "ab"]
    model = by_element(lambda a, n: (2**n - 1) << a, "b32")
    check("bmsk.clamp.b32 %d, %a, %b;", "b32", ["b32", "b32"], model, arrays=arrays)


def test_bytes_and_tables() -> None:
    def permuted(a: int, b: int, selector: int) -> int:
        source = (b << 32 | a).to_bytes(8, "little")
        found = []
        for k in range(4):
            nibble = selector >> 4 * k & 15
            byte = source[nibble & 7]
            found.append((255 if byte & 128 else 0) if nibble & 8 else byte)
        return int.from_bytes(bytes(found), "little")

    check("prmt.b32 %d, %a, %b, %c;", "b32", ["b32"] * 3, by_element(permuted, "b32"))
    for table in (0xEA, 0x96, 0x1B):

        def looked_up(a: int, b: int, c: int, table: int = table) -> int:
            rows = ((a >> k & 1) << 2 | (b >> k & 1) << 1 | (c >> k & 1) for k in range(32))
            return sum((table >> row & 1) << k for k, row in enumerate(rows))

        check(
            f"lop3.b32 %d, %a, %b, %c, {table};", "b32", ["b32"] * 3, by_element(looked_up, "b32")
        )
    rng = np.random.default_rng(1)
    arrays = [random("b32", rng), random("b32", rng), rng.integers(0, 70, N).astype(np.uint32)]
    for name, model in {
        "shf.l.wrap": lambda a, b, n: (b << 32 | a) << (n & 31) >> 32,
        "shf.r.wrap": lambda a, b, n: (b << 32 | a) >> (n & 31),
        "shf.l.clamp": lambda a, b, n: (b << 32 | a) << min(n, 32) >> 32,
        "shf.r.clamp": lambda a, b, n: (b << 32 | a) >> min(n, 32),
    }.items():
        check(
            f"{name}.b32 %d, %a, %b, %c;",
            "b32",
            ["b32"] * 3,
            by_element(model, "b32"),
            arrays=arrays,
        )


@pytest.mark.parametrize("signs", ["u32.u32", "u32.s32", "s32.u32", "s32.s32"])
def test_dot_products_of_bytes(signs: str) -> None:
    def dot(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        left, right = (
            x.view("i1" if kind == "s32" else "u1").reshape(N, 4).astype(np.int64)
            for x, kind in zip((a, b), signs.split("."), strict=True)
        )
        return ((left * right).sum(1) + c).astype(np.uint32)

    check(f"dp4a.{signs} %d, %a, %b, %c;", "u32", ["u32", "u32", "u32"], dot)


COMPARISONS: dict[str, Model] = {
    "eq": np.equal,
    "ne": lambda a, b: (a != b) & ~unordered(a, b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: (a == b) | unordered(a, b),
    "neu": np.not_equal,
    "ltu": lambda a, b: (a < b) | unordered(a, b),
    "leu": lambda a, b: (a <= b) | unordered(a, b),
    "gtu": lambda a, b: (a > b) | unordered(a, b),
    "geu": lambda a, b: (a >= b) | unordered(a, b),
    "num": lambda a, b: ~unordered(a, b),
    "nan": lambda a, b: unordered(a, b),
}


def unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a != a) | (b != b)


@pytest.mark.parametrize("kind", [*INTEGERS, "f16", "f32", "f64"])
def test_comparisons(kind: str) -> None:
    names = list(COMPARISONS) if kind[0] == "f" else ["eq", "ne", "lt", "le", "gt", "ge"]
    rng = np.random.default_rng(3)
    a, b = random(kind, rng), random(kind, rng)
    arrays = [a, np.where(rng.random(N) < 0.3, a, b)]
    for name in names:
        check(
            f"setp.{name}.{kind} %d, %a, %b;",
            "pred",
            [kind, kind],
            COMPARISONS[name],
            arrays=arrays,
        )
    check(
        f"selp.b{8 * size(kind)} %d, %a, %b, %c;",
        kind,
        [kind, kind, "pred"],
        lambda a, b, c: np.where(c, a, b),
    )


def test_comparisons_combined_with_predicates() -> None:
    operands = ["s32", "s32", "pred"]
    for name, combine in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.not_equal)):
        for sign, negate in (("", False), ("!", True)):
            check(
                f"setp.lt.{name}.s32 %d, %a, %b, {sign}%c;",
                "pred",
                operands,
                lambda a, b, c, f=combine, n=negate: f(a < b, c ^ n),
            )
        check(
            f".reg .pred %q; setp.lt.{name}.s32 %q|%d, %a, %b, %c;",
            "pred",
            operands,
            lambda a, b, c, f=combine: f(~(a < b), c),
        )
    check(".reg .pred %q; setp.lt.s32 %q|%d, %a, %b;", "pred", ["s32", "s32"], np.greater_equal)


def test_moves_split_and_join_registers() -> None:
    check(
        ".reg .b16 %x, %y; mov.b32 {%x, %y}, %a; mov.b32 %d, {%y, %x};",
        "b32",
        ["b32"],
        lambda a: a << 16 | a >> 16,
    )
    check(
        ".reg .b32 %x; mov.b64 {_, %x}, %a; mov.b64 %d, {%x, %b};",
        "b64",
        ["b64", "b32"],
        lambda a, b: a >> 32 | b.astype("u8") << 32,
    )
    check("mov.b32 %d, 0f3F800000;", "f32", [], lambda: np.ones(N, np.float32))


def test_an_unknown_instruction_or_modifier_ends_the_run() -> None:
    for instruction, why in {
        "frobnicate.u32 %d, %a;": "unknown instruction",
        "add.cc.u32 %d, %a, %a;": "unknown modifier .cc",
        "fma.rz.f32 %d, %a, %a, %a;": "unknown type|modifier",
        "add.u32 %d, %a, %x;": "unknown operand %x",
        "add.u64 %d, %a, %a;": "%d has 4 bytes, expected 8",
        "popc.b16 %d, %a;": "unknown type",
    }.items():
        with pytest.raises(GpuError, match=why.replace(".", r"\.")):
            run(instruction, "u32", ["u32"], [np.zeros(N, np.uint32)])
    # Where it is not reached, it does no harm.
    run("bra END; frobnicate.u32 %d, %a; END:", "u32", ["u32"], [np.zeros(N, np.uint32)])
