"""Memory, asynchronous copies and matrices of the software GPU, and mutants that must fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from ptx_kernels import HEAD, LOADED, STORED, kernel, run, words
from soft_gpu import GpuError, PtxModule

COPY = """
.shared .align 16 .b8 tile[256];
mov.u32 %r10, tile; shl.b32 %r11, %r1, 2; add.u32 %r12, %r10, %r11; add.u32 %r13, %r12, 128;
cp.async.ca.shared.global [%r12], [%rd6], 4; cp.async.commit_group;
cp.async.ca.shared.global.L2::128B [%r13], [%rd7], 4; cp.async.commit_group;
cp.async.wait_group 1; ld.shared.u32 %r5, [%r12];
cp.async.wait_all; ld.shared.u32 %r6, [%r13];
sub.u32 %r7, %r5, %r6; st.global.u32 [%rd5], %r7;
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cp.async.wait_group 1;", ""),
        ("cp.async.wait_group 1;", "cp.async.wait_group 2;"),
        ("cp.async.wait_all;", ""),
        ("cp.async.wait_all;", "cp.async.wait_group 1;"),
        ("%r5, %r6;", "%r6, %r5;"),
    ],
)
def test_a_missing_wait_for_a_copy_is_seen(old: str, new: str) -> None:
    a, b = words(32), words(32, 1)
    assert np.array_equal(run(COPY, a, b), a - b)
    assert old in COPY
    mutant = COPY.replace(old, new)
    assert not np.array_equal(run(mutant, a, b), a - b)


def test_copies_fill_with_zeros() -> None:
    body = """.shared .align 16 .b8 tile[512]; mov.u32 %r10, tile; shl.b32 %r11, %r1, 4;
    add.u32 %r12, %r10, %r11; and.b32 %r13, %r1, 3; shl.b32 %r13, %r13, 2;
    cp.async.cg.shared.global [%r12], [%rd2], 16, %r13; cp.async.wait_all;
    ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r12]; add.u32 %r5, %r5, %r6; add.u32 %r7, %r7, %r8;
    add.u32 %r7, %r5, %r7; st.global.u32 [%rd5], %r7;"""
    a = words(32) % 1000
    expected = [int(a[: lane % 4].sum()) for lane in range(32)]
    assert run(body, a).tolist() == expected


def product(shape: str, kinds: str, instruction: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Multiplies random matrices by mma; returns its result and numpy's."""
    rows, depth = (int(x) for x in shape[1:].replace("n8k", " ").split())
    result, element = kinds.split(".")[:2]
    rng = np.random.default_rng(0)
    bits = {"f16": 16, "bf16": 16, "tf32": 32, "s8": 8}[element]
    if element == "s8":
        a, b = (rng.integers(-128, 128, s).astype(np.int8) for s in ((rows, depth), (depth, 8)))
        c = rng.integers(-1000, 1000, (rows, 8)).astype(np.int32)
        stored = a, b
    else:
        a, b = (rng.integers(-64, 64, s) / 8 for s in ((rows, depth), (depth, 8)))
        c = (rng.integers(-64, 64, (rows, 8)) / 8).astype(
            result.replace("f16", "f2").replace("f32", "f4")
        )
        as_bits = {
            "f16": lambda x: x.astype(np.float16).view(np.uint16),
            "bf16": lambda x: (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
            "tf32": lambda x: x.astype(np.float32).view(np.uint32),
        }[element]
        stored = as_bits(a), as_bits(b)
    n = 32 // bits  # elements in a register
    lane = np.arange(32)
    group, part = lane // 4, lane % 4

    def packed(values: np.ndarray) -> np.ndarray:  # [lane, n] to [lane] registers
        return np.ascontiguousarray(values).view(np.uint32).reshape(32)

    fragment = [
        packed(
            np.stack(
                [stored[0][group + 8 * half, block * 4 * n + part * n + i] for i in range(n)], 1
            )
        )
        for block in range(depth // (4 * n))
        for half in range(rows // 8)
    ]
    n_a = len(fragment)
    fragment += [
        packed(np.stack([stored[1][block * 4 * n + part * n + i, group] for i in range(n)], 1))
        for block in range(depth // (4 * n))
    ]
    n_b = len(fragment) - n_a
    pairs = [
        np.stack([c[group + 8 * half, 2 * part + i] for i in (0, 1)], 1)
        for half in range(rows // 8)
    ]
    sums = (
        [packed(x) for x in pairs]
        if result == "f16"
        else [packed(x[:, i]) for x in pairs for i in (0, 1)]
    )
    every = np.concatenate([*fragment, *sums])
    n_c = len(sums)
    text = "mul.wide.u32 %rd4, %r1, 4; add.s64 %rd6, %rd2, %rd4; add.s64 %rd5, %rd1, %rd4;"
    for i in range(n_a + n_b + n_c):
        text += f"ld.global.b32 %r{10 + i}, [%rd6+{128 * i}];"

    def registers(first: int, count: int) -> str:
        return "{" + ", ".join(f"%r{i}" for i in range(first, first + count)) + "}"

    text += instruction or (
        f"mma.sync.aligned.{shape}.row.col.{kinds} {registers(30, n_c)}, {registers(10, n_a)},"
        f" {registers(10 + n_a, n_b)}, {registers(10 + n_a + n_b, n_c)};"
    )
    for i in range(n_c):
        text += f"st.global.b32 [%rd5+{128 * i}], %r{30 + i};"
    out = np.zeros(32 * n_c, np.uint32)
    kernel(text).launch("k", out, every, every, block=(32,))
    found = np.zeros((rows, 8))
    values = out.reshape(n_c, 32)
    for half in range(rows // 8):
        for i in (0, 1):
            column = (
                values[half].view(np.float16).reshape(32, 2)[:, i]
                if result == "f16"
                else values[2 * half + i].view(c.dtype)
            )
            found[group + 8 * half, 2 * part + i] = column
    return found, a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64)


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        ("m16n8k16", "f32.f16.f16.f32"),
        ("m16n8k8", "f32.f16.f16.f32"),
        ("m16n8k16", "f16.f16.f16.f16"),
        ("m16n8k16", "f32.bf16.bf16.f32"),
        ("m16n8k8", "f32.tf32.tf32.f32"),
        ("m16n8k4", "f32.tf32.tf32.f32"),
        ("m16n8k32", "s32.s8.s8.s32"),
        ("m16n8k16", "s32.s8.s8.s32"),
        ("m8n8k16", "s32.s8.s8.s32"),
    ],
)
def test_matrix_products(shape: str, kinds: str) -> None:
    found, expected = product(shape, kinds)
    if kinds.startswith("f16"):
        expected = expected.astype(np.float16).astype(float)
    assert np.array_equal(found, expected)


def test_swapped_operands_of_a_matrix_product_are_seen() -> None:
    right = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r30, %r31, %r32, %r33},"
    right += " {%r10, %r11}, {%r12}, {%r13, %r14, %r15, %r16};"
    found, expected = product("m16n8k8", "f32.f16.f16.f32", right)
    assert np.array_equal(found, expected)
    for old, new in (("%r10, %r11", "%r11, %r10"), ("%r13, %r14", "%r14, %r13")):
        found, expected = product("m16n8k8", "f32.f16.f16.f32", right.replace(old, new))
        assert not np.array_equal(found, expected)


@pytest.mark.parametrize("transposed", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_loaded_from_rows(count: int, transposed: str) -> None:
    matrices = np.random.default_rng(0).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    registers = ", ".join(f"%r{20 + i}" for i in range(count))
    stores = " ".join(f"st.global.u32 [%rd5+{128 * i}], %r{20 + i};" for i in range(count))
    body = f""".shared .align 16 .b8 tile[512]; mov.u32 %r10, tile; shl.b32 %r11, %r1, 4;
    mul.wide.u32 %rd8, %r11, 1; add.s64 %rd9, %rd2, %rd8; add.u32 %r12, %r10, %r11;
    ld.global.v4.u32 {{%r5, %r6, %r7, %r8}}, [%rd9];
    st.shared.v4.u32 [%r12], {{%r5, %r6, %r7, %r8}}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{registers}}}, [%r12]; {stores}"""
    out = np.zeros((count, 8, 8), np.uint16)
    kernel(body).launch("k", out, matrices, matrices, block=(32,))
    expected = matrices.transpose(0, 2, 1) if transposed else matrices
    assert np.array_equal(out, expected[:count])
    generic = body.replace(".shared.b16", ".b16").replace("[%r12]; st", "[%rd10]; st")
    generic = generic.replace(
        "ldmatrix", "cvt.u64.u32 %rd8, %r12; cvta.shared.u64 %rd10, %rd8; ldmatrix"
    )
    out[:] = 0
    kernel(generic).launch("k", out, matrices, matrices, block=(32,))
    assert np.array_equal(out, expected[:count])
    turned = np.zeros((8, 8), np.uint16)
    body = f"{LOADED} movmatrix.sync.aligned.m8n8.trans.b16 %r7, %r5; {STORED}"
    kernel(body).launch("k", turned, matrices[0], matrices[0], block=(32,))
    assert np.array_equal(turned, matrices[0].T)


def test_memory_of_all_spaces_and_widths() -> None:
    a = words(32)
    body = """.local .align 16 .b8 own[64]; .reg .b64 %own, %generic; mov.u64 %own, own;
    cvta.local.u64 %generic, %own; st.local.u32 [%own+4], %r5; ld.u32 %r7, [%generic+4];
    st.v2.u16 [%generic+8], {%h1, 9}; st.local.u8 [%own+12], 200; ld.local.s8 %r8, [%own+12];
    ld.local.u8 %r9, [own+12]; sub.u32 %r8, %r9, %r8; add.u32 %r7, %r7, %r8;"""
    assert np.array_equal(run(f"{LOADED} {body} {STORED}", a), a + np.uint32(256))
    table = ".const .align 4 .u32 table[4] = {5, 6, 7, 8};\n.global .align 4 .b8 more[4] = {1, 0};"
    body = """and.b32 %r8, %r1, 3; mul.wide.u32 %rd8, %r8, 4; mov.u64 %rd9, table;
    add.s64 %rd10, %rd9, %rd8; ld.const.u32 %r7, [%rd10]; ld.global.u32 %r9, [more];
    add.u32 %r7, %r7, %r9;"""
    found = run(f"{body} {STORED}", a, before=table)
    assert found.tolist() == [6, 7, 8, 9] * 8


def test_shared_memory_is_nan_in_each_block_and_has_bounds() -> None:
    body = """ld.shared.u32 %r7, [tile]; st.shared.u32 [tile], %r1;"""
    tile = ".shared .align 4 .b8 tile[64];"
    assert (run(f"{tile} {body} {STORED}", words(64), grid=2) == 0xFFFFFFFF).all()
    with pytest.raises(GpuError, match=r"address 64 is outside of the 64 bytes"):
        run(f"{tile} ld.shared.u32 %r7, [tile+64];", words(32))
    with pytest.raises(GpuError, match="no multiple of 8"):
        run(f"{tile} ld.shared.v2.u32 {{%r7, %r8}}, [tile+4];", words(32))


def test_dynamic_shared_memory_lies_behind_static() -> None:
    dynamic = ".extern .shared .align 16 .b8 dynamic[];"
    body = ".shared .align 4 .b8 one[20]; mov.u32 %r7, dynamic; st.shared.u32 [%r7+12], %r7;"
    text = f"{dynamic}\n.visible .entry k(.param .u64 out, .param .u64 a, .param .u64 b)\n"
    module = PtxModule(f"{text}{{\n{HEAD}{body} {STORED}\nret;\n}}\n")
    out = np.zeros(32, np.uint32)
    module.launch("k", out, out, out, shared=16)
    assert (out == 32).all()
    with pytest.raises(GpuError, match="outside of the 40 bytes"):
        module.launch("k", out, out, out, shared=8)
    with pytest.raises(GpuError, match="bytes of shared memory"):
        module.launch("k", out, out, out, shared=100 << 10)


COUNTED = """
from ptx_kernels import run, words
for stride in (4, 8, 128, 0):
    body = ".shared .align 16 .b8 tile[4096]; mov.u32 %r10, tile;"
    body += f" mul.lo.u32 %r11, %r1, {stride}; add.u32 %r12, %r10, %r11; ld.shared.u32 %r5, [%r12];"
    run(body + " ld.global.u32 %r6, [%rd6]; st.global.u32 [%rd5], %r6;", words(32))
"""


def test_bank_conflicts_and_sectors_are_counted() -> None:
    environment = os.environ | {"SOFT_GPU_COUNT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", COUNTED]
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stderr
    counts = dict(re.findall(r"(\w+) (\d+)", said.partition(": ")[2]))
    # Strides of two and of 32 words take 2 and 32 cycles; one word for all lanes takes one.
    assert counts["shared"] == "4"
    assert counts["conflicts"] == str(1 + 31)
    # 128 bytes loaded, and stored, in each of four runs; an array may begin within a sector.
    assert 4 * 2 * 4 <= int(counts["sectors"]) <= 4 * 2 * 5
