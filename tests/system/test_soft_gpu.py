"""Instructions of the software GPU against scalar models, with random operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from soft_gpu import GpuError, PtxModule

N = 256
DTYPES = {
    **{
        f"{kind}{bits}": np.dtype(f"{kind.replace('s', 'i')}{bits // 8}")
        for kind in "us"
        for bits in (8, 16, 32, 64)
    },
    **{f"b{bits}": np.dtype(f"u{bits // 8}") for bits in (16, 32, 64)},
    **{"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")},
    **{"bf16": np.dtype("u2"), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4")},
    "pred": np.dtype("?"),
}
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
Model = Callable[..., Any]


def kernel(instruction: str, result: str, operands: list[str]) -> str:
    """A kernel that applies an instruction on %a, %b, ... to the elements of arrays."""
    names = "abce"[: len(operands)]
    lines = [".reg .pred %flag; .reg .b32 %i; .reg .b64 %at, %offset; .reg .b16 %byte;"]
    for name, kind in zip("d" + names, [result, *operands], strict=True):
        lines.append(f".reg .{'pred' if kind == 'pred' else f'b{8 * max(size(kind), 2)}'} %{name};")
    lines.append("mov.u32 %i, %tid.x;")
    for name, kind in zip(names, operands, strict=True):
        lines.append(address(name, kind))
        if kind == "pred":
            lines.append(f"ld.global.u8 %byte, [%at]; setp.ne.u16 %{name}, %byte, 0;")
        else:
            lines.append(f"ld.global.{loaded(kind)} %{name}, [%at];")
    lines.append(instruction)
    lines.append(address("result", result))
    if result == "pred":
        lines.append("selp.b16 %byte, 1, 0, %d; st.global.u8 [%at], %byte;")
    else:
        lines.append(f"st.global.b{8 * size(result)} [%at], %d;")
    parameters = ", ".join(f".param .u64 {name}" for name in ["result", *names])
    return f".visible .entry k({parameters})\n{{\n" + "\n".join(lines) + "\nret;\n}\n"


def size(kind: str) -> int:
    return DTYPES[kind].itemsize


def loaded(kind: str) -> str:
    return kind if kind in ("u8", "s8") else f"b{8 * size(kind)}"


def address(parameter: str, kind: str) -> str:
    return (
        f"ld.param.u64 %at, [{parameter}]; mul.wide.u32 %offset, %i, {size(kind)};"
        " add.s64 %at, %at, %offset;"
    )


def run(instruction: str, result: str, operands: list[str], arrays: list[np.ndarray]) -> np.ndarray:
    found = np.zeros(N, DTYPES[result])
    PtxModule(kernel(instruction, result, operands)).launch("k", found, *arrays, block=(N,))
    return found


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def random(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Random values, some of them extreme ones."""
    if kind == "pred":
        return rng.random(N) < 0.5
    if kind == "f16x2":
        return np.stack([random("f16", rng), random("f16", rng)], 1).reshape(-1).view(np.uint32)
    if kind == "bf16x2":
        return np.stack([random("bf16", rng), random("bf16", rng)], 1).reshape(-1).view(np.uint32)
    if kind == "bf16":
        return to_bf16(random("f32", rng))
    dtype = DTYPES[kind]
    if dtype.kind == "f":
        values = (rng.standard_normal(N) * 2.0 ** rng.integers(-6, 6, N)).astype(dtype)
        extremes = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, 2.5, -1.5], dtype)
    else:
        limits = np.iinfo(dtype)
        values = rng.integers(limits.min, limits.max, N, dtype, endpoint=True)
        small = rng.integers(max(limits.min, -9), 9, N).astype(dtype)
        values = np.where(rng.random(N) < 0.3, small, values)
        extremes = np.array([0, 1, limits.min, limits.max, limits.max - 1], dtype)
    places = rng.permutation(N)[: 4 * len(extremes)]
    values[places] = np.tile(extremes, 4)[: len(places)]
    return values


def check(
    instruction: str,
    result: str,
    operands: list[str],
    model: Model,
    *,
    tolerance: float = 0,
    arrays: list[np.ndarray] | None = None,
) -> None:
    """Compares an instruction with a model of arrays; NaNs are equal to each other."""
    rng = np.random.default_rng(len(instruction))
    given = [random(kind, rng) for kind in operands] if arrays is None else arrays
    found = run(instruction, result, operands, given)
    with np.errstate(all="ignore"):
        expected = np.asarray(model(*given))
    for one, other in zip(floats(found, result), floats(expected, result), strict=True):
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=0)
            zeros = (one == 0) & (other == 0)
            assert np.array_equal(np.signbit(one[zeros]), np.signbit(other[zeros]))
        else:
            np.testing.assert_array_equal(one, other)


def floats(values: np.ndarray, kind: str) -> list[np.ndarray]:
    if kind == "bf16x2":
        halves = np.ascontiguousarray(values, np.uint32).view(np.uint16)
        return [from_bf16(halves)]
    if kind == "f16x2":
        return [np.ascontiguousarray(values, np.uint32).view(np.float16)]
    return [from_bf16(values)] if kind == "bf16" else [values.astype(DTYPES[kind])]


def by_element(model: Model, result: str) -> Model:
    """An array model from one of Python's unbounded integers, whose result wraps."""
    bits = 8 * size(result)

    def wrapped(*arrays: np.ndarray) -> np.ndarray:
        rows = zip(*(x.tolist() for x in arrays), strict=True)
        return np.array([int(model(*row)) % 2**bits for row in rows], f"u{bits // 8}").view(
            DTYPES[result]
        )

    return wrapped


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


def in_float(model: Model, kind: str) -> Model:
    """A model that computes exactly, or nearly so, and rounds once to a type."""

    def halves(values: np.ndarray) -> np.ndarray:
        values = np.ascontiguousarray(values)
        if kind == "f16x2":
            return values.view(np.float16)
        if kind.startswith("bf16"):
            return from_bf16(values.view(np.uint16))
        return values

    def rounded(*arrays: np.ndarray) -> np.ndarray:
        exact = model(*(halves(x).astype(np.longdouble) for x in arrays))
        if kind.startswith("bf16"):
            found = to_bf16(exact.astype(np.float32))
            return found.view(np.uint32) if kind == "bf16x2" else found
        if kind == "f16x2":
            return exact.astype(np.float16).view(np.uint32)
        return exact.astype(DTYPES[kind])

    return rounded


def lesser(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    found = np.where((a < b) | ((a == b) & np.signbit(a)), a, b)
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, found))


def greater(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return -lesser(-a, -b)


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "f16x2", "bf16", "bf16x2"])
@pytest.mark.parametrize(
    ("name", "n", "model"),
    [
        ("add", 2, np.add),
        ("sub", 2, np.subtract),
        ("mul", 2, np.multiply),
        ("min", 2, lesser),
        ("max", 2, greater),
        ("fma.rn", 3, lambda a, b, c: a * b + c),
        ("neg", 1, np.negative),
        ("abs", 1, np.abs),
    ],
)
def test_floats(name: str, n: int, kind: str, model: Model) -> None:
    # Fused sums of bfloat16 are rounded twice, to float32 first.
    tolerance = 2**-8 if name == "fma.rn" and kind.startswith("bf16") else 0
    check(
        f"{name}.{kind} %d, {', '.join(['%a', '%b', '%c'][:n])};",
        kind,
        [kind] * n,
        in_float(model, kind),
        tolerance=tolerance,
    )


def test_float_functions() -> None:
    for kind in ("f32", "f64"):
        divided = in_float(np.divide, kind)
        check(f"div.rn.{kind} %d, %a, %b;", kind, [kind, kind], divided)
        check(f"sqrt.rn.{kind} %d, %a;", kind, [kind], np.sqrt)
        check(f"rcp.rn.{kind} %d, %a;", kind, [kind], lambda a: 1 / a)
    for name, model in {
        "rsqrt.approx.f32": lambda a: 1 / np.sqrt(a.astype("f8")),
        "ex2.approx.f32": lambda a: np.exp2(a.astype("f8")),
        "lg2.approx.f32": lambda a: np.log2(a.astype("f8")),
        "sin.approx.f32": lambda a: np.sin(a.astype("f8")),
        "cos.approx.f32": lambda a: np.cos(a.astype("f8")),
        "tanh.approx.f32": lambda a: np.tanh(a.astype("f8")),
    }.items():
        check(
            f"{name} %d, %a;",
            "f32",
            ["f32"],
            lambda a, model=model: model(a).astype(np.float32),
            tolerance=1e-6,
        )
    check(
        "add.sat.f32 %d, %a, %b;",
        "f32",
        ["f32", "f32"],
        lambda a, b: np.where((a + b) > 0, np.minimum(a + b, 1), 0).astype(np.float32),
    )
    check(
        "max.NaN.f32 %d, %a, %b;",
        "f32",
        ["f32", "f32"],
        lambda a, b: np.where(np.isnan(a + b) & (np.isnan(a) | np.isnan(b)), np.nan, greater(a, b)),
    )
    check("copysign.f32 %d, %a, %b;", "f32", ["f32", "f32"], lambda a, b: np.copysign(b, a))


def toward_zero(exact: np.ndarray) -> np.ndarray:
    """Float32 numbers that are no farther from zero."""
    rounded = exact.astype(np.float32)
    is_too_far = np.abs(rounded.astype(np.longdouble)) > np.abs(exact)
    return np.where(is_too_far, np.nextafter(rounded, np.float32(0)), rounded)


def test_sums_and_products_rounded_toward_zero() -> None:
    rng = np.random.default_rng(0)
    arrays = [(rng.standard_normal(N) * 2.0 ** rng.integers(-30, 30, N)).astype("f4") for _ in "ab"]
    arrays[0][:2], arrays[1][:2] = np.float32(0.49999997), 0.5  # as roundf() adds
    for name, model in (("add", np.add), ("mul", np.multiply)):
        exact = model(*(x.astype(np.longdouble) for x in arrays))
        expected = toward_zero(exact)
        check(
            f"{name}.rz.f32 %d, %a, %b;",
            "f32",
            ["f32", "f32"],
            lambda *_, expected=expected: expected,
            arrays=arrays,
        )


def test_denormals_are_flushed_where_the_kernel_says_so() -> None:
    small = [np.full(N, 1e-39, np.float32), np.zeros(N, np.float32)]
    for name, expected in (("add.f32", np.float32(1e-39)), ("add.ftz.f32", np.float32(0))):
        found = run(f"{name} %d, %a, %b;", "f32", ["f32", "f32"], small)
        assert (found == expected).all()


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


def clamped(values: np.ndarray, kind: str) -> np.ndarray:
    """Rounded values in the range of an integer type; NaN gives 0."""
    limits = np.iinfo(DTYPES[kind])
    rows = [
        0
        if math.isnan(x)
        else limits.min
        if x < limits.min
        else limits.max
        if x > limits.max
        else int(x)
        for x in values.astype(float).tolist()
    ]
    return np.array(rows, DTYPES[kind])


ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@pytest.mark.parametrize("to", ["u8", "s8", *INTEGERS])
def test_conversions_to_integers(to: str) -> None:
    held = to if size(to) > 1 else f"{to[0]}16"
    for rounding, model in ROUNDINGS.items():
        for source in ("f16", "f32", "f64"):
            check(
                f"cvt.{rounding}.{to}.{source} %d, %a;",
                held,
                [source],
                lambda a, model=model: clamped(model(a), to).astype(DTYPES[held]),
            )
    for source in ("u8", "s8", *INTEGERS):
        wrap = by_element(
            lambda a: (
                (a + (2 ** (8 * size(to) - 1) if to[0] == "s" else 0)) % 2 ** (8 * size(to))
                - (2 ** (8 * size(to) - 1) if to[0] == "s" else 0)
            ),
            held,
        )
        check(f"cvt.{to}.{source} %d, %a;", held, [source], wrap)
    limits = np.iinfo(DTYPES[to])
    bounded = by_element(lambda a: min(max(a, int(limits.min)), int(limits.max)), held)
    check(f"cvt.sat.{to}.s64 %d, %a;", held, ["s64"], bounded)


def test_conversions_to_floats() -> None:
    for to in ("f16", "f32", "f64"):
        for source in ("u8", "s8", *INTEGERS, "f16", "f32", "f64"):
            check(
                f"cvt.rn.{to}.{source} %d, %a;",
                to,
                [source],
                lambda a, to=to: (
                    a.astype(np.longdouble).astype(DTYPES[to])
                    if to != "f16"
                    else a.astype(np.float32).astype(np.float16)
                ),
            )
    for rounding, model in ROUNDINGS.items():
        check(f"cvt.{rounding}.f32.f32 %d, %a;", "f32", ["f32"], model)
    check(
        "cvt.sat.f32.f32 %d, %a;",
        "f32",
        ["f32"],
        lambda a: np.where(a > 0, np.minimum(a, 1), 0).astype(np.float32),
    )
    check("cvt.rn.bf16.f32 %d, %a;", "bf16", ["f32"], to_bf16)
    check("cvt.f32.bf16 %d, %a;", "f32", ["bf16"], from_bf16)
    check(
        "cvt.rn.f16x2.f32 %d, %a, %b;",
        "f16x2",
        ["f32", "f32"],
        lambda a, b: np.stack([b, a], 1).astype("f2").reshape(-1).view("u4"),
    )
    check(
        "cvt.rn.bf16x2.f32 %d, %a, %b;",
        "bf16x2",
        ["f32", "f32"],
        lambda a, b: to_bf16(np.stack([b, a], 1).reshape(-1)).view("u4"),
    )
    finite = [np.random.default_rng(1).standard_normal(N).astype(np.float32)]
    check(
        "cvt.rna.tf32.f32 %d, %a;",
        "b32",
        ["f32"],
        lambda a: (a.view("u4") + 0x1000) & ~np.uint32(0x1FFF),
        arrays=finite,
    )


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
