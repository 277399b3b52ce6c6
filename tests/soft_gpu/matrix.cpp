// Matrix products of a warp, and the loads and transposition of their fragments.
//
// Lane 4 g + t holds elements of row g of A and of the result, and of column g of B. A register of
// A or B holds the elements t n ... t n + n - 1 of a block of 4 n, n elements of 32 / n bits.
#include "decoder.h"
#include "warp.h"

#include <algorithm>
#include <cctype>

namespace soft_gpu {

namespace {

constexpr u32 N_COLUMNS = 8, MAX_ROWS = 16, MAX_DEPTH = 32;
constexpr int TARGET = 0, A = 4, B = 8, C = 12; // places of the fragments in Instruction::list

struct tf32 {
    u32 bits;
    explicit operator f32() const { return bit_cast<f32>(bits & ~0x1fffu); }
};

// Calls body(element, row, column) for the elements of a fragment with rows of `depth` elements.
template <class T, class Body>
void for_elements(const Warp & warp, const Register * registers, u32 rows, u32 depth,
                  Body && body) {
    constexpr u32 N = 4 / sizeof(T);
    const u32 n_blocks = depth / (4 * N), n_halves = rows / 8;
    for (u32 block = 0; block < n_blocks; ++block) {
        for (u32 half = 0; half < n_halves; ++half) {
            const T * values = warp.at<T>(registers[block * n_halves + half]);
            for (u32 lane = 0; lane < N_LANES; ++lane) {
                for (u32 i = 0; i < N; ++i) {
                    body(values[lane * N + i], half * 8 + lane / 4,
                         block * 4 * N + lane % 4 * N + i);
                }
            }
        }
    }
}

// Calls body(element, row, column) for the elements of the result, of type T.
template <class T, class Body>
void for_results(const Warp & warp, const Register * registers, u32 rows, Body && body) {
    constexpr u32 N = 4 / sizeof(T); // in a register
    for (u32 half = 0; half < rows / 8; ++half) {
        for (u32 pair = 0; pair < 2; ++pair) {
            T * values = warp.at<T>(registers[(half * 2 + pair) / N]);
            for (u32 lane = 0; lane < N_LANES; ++lane) {
                body(values[lane * N + pair % N], half * 8 + lane / 4, lane % 4 * 2 + pair);
            }
        }
    }
}

// Sums are made in the order of the depth, in float32 or 32-bit integers; those of a real GPU are
// not, so that bits differ.
template <class Element, class Sum, class Result>
void multiply(Warp & warp, const Instruction & instruction) {
    Sum a[MAX_ROWS][MAX_DEPTH], b[MAX_DEPTH][N_COLUMNS], sums[MAX_ROWS][N_COLUMNS];
    const u32 rows = instruction.rows, depth = instruction.depth;
    for_elements<Element>(warp, instruction.list + A, rows, depth,
                          [&](Element x, u32 row, u32 k) { a[row][k] = static_cast<Sum>(x); });
    for_elements<Element>(
        warp, instruction.list + B, N_COLUMNS, depth,
        [&](Element x, u32 column, u32 k) { b[k][column] = static_cast<Sum>(x); });
    for_results<Result>(warp, instruction.list + C, rows, [&](Result & x, u32 row, u32 column) {
        sums[row][column] = static_cast<Sum>(x);
    });
    for (u32 row = 0; row < rows; ++row) {
        for (u32 k = 0; k < depth; ++k) {
            for (u32 column = 0; column < N_COLUMNS; ++column) {
                sums[row][column] += a[row][k] * b[k][column];
            }
        }
    }
    for_results<Result>(
        warp, instruction.list + TARGET, rows,
        [&](Result & x, u32 row, u32 column) { x = static_cast<Result>(sums[row][column]); });
}

Execute choose_multiply(Type result, Type element) {
    const bool is_half = result == Type::F16;
    switch (element) {
    case Type::F16:
        return is_half ? multiply<f16, f32, f16> : multiply<f16, f32, f32>;
    case Type::BF16:
        return is_half ? Execute(nullptr) : multiply<bf16, f32, f32>;
    case Type::TF32:
        return is_half ? Execute(nullptr) : multiply<tf32, f32, f32>;
    case Type::S8:
        return multiply<s8, s32, s32>;
    default:
        return nullptr;
    }
}

// Lets all lanes of the warp arrive before a matrix instruction.
void converge(Decoder & decoder, Instruction & instruction) {
    instruction.flow = Flow::CONVERGE;
    instruction.members = decoder.constant(4, ALL_LANES);
}

void decode_multiply(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    static const std::vector<std::string> SHAPES = {"m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32",
                                                    "m8n8k16"};
    const int shape = statement.which(SHAPES);
    require(shape >= 0 && statement.types.size() == 4 && statement.has("row") &&
                statement.has("col") && statement.types[1] == statement.types[2] &&
                statement.types[0] == statement.types[3],
            "unknown matrix product");
    const Type element = statement.types[1];
    instruction.rows = shape == 4 ? 8 : 16;
    instruction.depth = shape == 4 ? 16 : 4u << shape;
    instruction.execute = choose_multiply(statement.types[0], element);
    const u32 bits = element == Type::S8 ? 8 : element == Type::TF32 ? 32 : 16;
    const u32 lane_bits = instruction.depth * bits / N_LANES;
    const u32 n_results = instruction.rows * N_COLUMNS / N_LANES;
    const u32 n_sums = statement.types[0] == Type::F16 ? n_results / 2 : n_results;
    const u32 expected[] = {n_sums, instruction.rows * lane_bits / 32, N_COLUMNS * lane_bits / 32,
                            n_sums};
    const int places[] = {TARGET, A, B, C};
    for (size_t i = 0; i < 4; ++i) {
        const size_t n = decoder.list(statement.operand(i), 4, instruction.list + places[i]);
        require(n == expected[i], "a fragment of an unexpected size");
    }
    converge(decoder, instruction);
    statement.has("satfinite") ? void(instruction.execute = nullptr) : void();
}

// Loads 8 x 8 matrices of 16 bits, whose rows begin at the addresses of 8 lanes each.
template <bool TRANSPOSED>
void load_matrices(Warp & warp, const Instruction & instruction) {
    u8 * rows[N_LANES];
    const u32 active = warp.active;
    warp.active = instruction.count == 4 ? ALL_LANES : (1u << 8 * instruction.count) - 1;
    resolve(warp, instruction.address, 16, rows); // of other lanes, no address is used
    warp.active = active;
    for (u32 matrix = 0; matrix < instruction.count; ++matrix) {
        u16 * target = warp.at<u16>(instruction.list[matrix]);
        for (u32 lane = 0; lane < N_LANES; ++lane) {
            for (u32 i = 0; i < 2; ++i) {
                const u32 row = TRANSPOSED ? lane % 4 * 2 + i : lane / 4;
                const u32 column = TRANSPOSED ? lane / 4 : lane % 4 * 2 + i;
                target[lane * 2 + i] =
                    reinterpret_cast<const u16 *>(rows[matrix * 8 + row])[column];
            }
        }
    }
}

void decode_load_matrices(Decoder & decoder, const Statement & statement,
                          Instruction & instruction) {
    require(statement.has("m8n8") && bytes_of(statement.type()) == 2, "unknown matrix load");
    const int count = statement.which({"x1", "x2", "x4"});
    require(count >= 0, "unknown number of matrices");
    instruction.count = static_cast<u8>(1 << count);
    instruction.address = decoder.address(statement.operand(1),
                                          statement.has("shared") ? Space::SHARED : Space::GENERIC);
    require(decoder.list(statement.operand(0), 4, instruction.list) == instruction.count,
            "registers are missing");
    instruction.execute = statement.has("trans") ? load_matrices<true> : load_matrices<false>;
    converge(decoder, instruction);
}

void transpose(Warp & warp, const Instruction & instruction) {
    u16 source[2 * N_LANES];
    std::memcpy(source, warp.at<u16>(instruction.source[0]), sizeof(source));
    u16 * target = warp.at<u16>(instruction.target);
    for (u32 row = 0; row < 8; ++row) {
        for (u32 column = 0; column < 8; ++column) {
            target[row * 8 + column] = source[column * 8 + row];
        }
    }
}

void decode_transpose(Decoder & decoder, const Statement & statement, Instruction & instruction) {
    require(statement.has("m8n8") && statement.has("trans"), "unknown transposition");
    decoder.operands(statement, instruction, 4, {4});
    instruction.execute = transpose;
    converge(decoder, instruction);
}

} // namespace

const std::vector<Operation> MATRICES = {
    {"mma", decode_multiply}, {"ldmatrix", decode_load_matrices}, {"movmatrix", decode_transpose}};

} // namespace soft_gpu
