// libcublas.so: matrix products the plain way, with sums in float32, and triangular solves.
//
// With CUBLAS_TF32_TENSOR_OP_MATH, factors of float32 keep 10 bits, as on tensor cores; the real
// library's switch NVIDIA_TF32_OVERRIDE=0 turns that off. A captured product is a node of its
// graph.
#include "../types.h"
#include "api.h"
#include "streams.h"

#include <cstdlib>
#include <vector>

using namespace soft_gpu;

namespace {

enum DataType { F32 = 0, F16 = 2, BF16 = 14 };                   // cudaDataType
enum Compute { IN_F16 = 64, IN_F16_PEDANTIC = 65, IN_F32 = 68 }; // cublasComputeType_t
constexpr int TF32_MATH = 3;                                     // cublasMath_t

struct Handle {
    void * stream = nullptr;
    int math_mode = 0;

    bool uses_tf32() const {
        static const char * set = std::getenv("NVIDIA_TF32_OVERRIDE");
        return math_mode == TF32_MATH && (set == nullptr || set[0] != '0');
    }
};

int64_t bytes_of_type(int type) {
    if (type != F32 && type != F16 && type != BF16) {
        fail("cuBLAS: unknown type " + std::to_string(type));
    }
    return type == F32 ? 4 : 2;
}

f32 rounded_to_tf32(f32 value) {
    const u32 bits = bit_cast<u32>(value);
    return bit_cast<f32>((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu);
}

f32 read(const void * at, size_t i, int type) {
    return type == F32   ? static_cast<const f32 *>(at)[i]
           : type == F16 ? static_cast<f32>(static_cast<const f16 *>(at)[i])
                         : static_cast<f32>(static_cast<const bf16 *>(at)[i]);
}

void write(void * at, size_t i, int type, f32 value) {
    if (type == F32) {
        static_cast<f32 *>(at)[i] = value;
    } else if (type == F16) {
        static_cast<f16 *>(at)[i] = static_cast<f16>(value);
    } else {
        static_cast<bf16 *>(at)[i] = bf16(value);
    }
}

struct Matrix {
    const void * data;
    int type;
    int64_t stride;
    bool is_transposed;
};

// Sizes and factors of a product: c = alpha op(a) op(b) + beta c.
struct Product {
    int m, n, k;
    f32 alpha, beta;
    bool rounds_to_tf32;
};

// Returns n vectors of k elements. along_columns: whether a vector's elements are adjacent.
std::vector<f32> vectors(const Matrix & matrix, int n, int k, bool along_columns, bool to_tf32) {
    std::vector<f32> all(static_cast<size_t>(n) * k);
    for (int i = 0; i < n; ++i) {
        for (int j = 0; j < k; ++j) {
            const int64_t at = along_columns ? i * matrix.stride + j : i + j * matrix.stride;
            const f32 value = read(matrix.data, at, matrix.type);
            all[static_cast<size_t>(i) * k + j] =
                to_tf32 && matrix.type == F32 ? rounded_to_tf32(value) : value;
        }
    }
    return all;
}

void multiply(const Product & product, const Matrix & a, const Matrix & b, void * c, int c_type,
              int64_t c_stride) {
    const auto [m, n, k, alpha, beta, to_tf32] = product;
    const std::vector<f32> rows = vectors(a, m, k, a.is_transposed, to_tf32);
    const std::vector<f32> columns = vectors(b, n, k, !b.is_transposed, to_tf32);
    for (int column = 0; column < n; ++column) {
        for (int row = 0; row < m; ++row) {
            f32 sum = 0;
            for (int i = 0; i < k; ++i) {
                sum += rows[static_cast<size_t>(row) * k + i] *
                       columns[static_cast<size_t>(column) * k + i];
            }
            const size_t at = row + column * c_stride;
            write(c, at, c_type, alpha * sum + (beta != 0 ? beta * read(c, at, c_type) : 0));
        }
    }
}

f32 scalar(const void * at, int compute) {
    const bool is_half = compute == IN_F16 || compute == IN_F16_PEDANTIC;
    return read(at, 0, is_half ? F16 : F32);
}

template <class Body>
int call(const Handle * handle, const char * name, Body body) {
    ++counts().cublas_calls;
    enqueue(handle->stream, {name, body});
    return 0;
}

// Solves op(a) x = alpha b, or x op(a) = alpha b if a is on the right, in place of b.
struct Triangle {
    bool is_right, is_upper, is_transposed, has_unit_diagonal;
    int m, n;
    f32 alpha;
    int a_stride, b_stride;

    void solve(const f32 * a, f32 * b) const {
        const int size = is_right ? n : m, count = is_right ? m : n;
        const bool runs_forwards = is_right == (is_upper != is_transposed);
        for (int vector = 0; vector < count; ++vector) {
            for (int step = 0; step < size; ++step) {
                const int i = runs_forwards ? step : size - 1 - step;
                f64 sum = static_cast<f64>(alpha) * element(b, vector, i);
                for (int before = 0; before < step; ++before) {
                    const int j = runs_forwards ? before : size - 1 - before;
                    const f32 factor = is_right ? factor_at(a, j, i) : factor_at(a, i, j);
                    sum -= static_cast<f64>(factor) * element(b, vector, j);
                }
                element(b, vector, i) =
                    static_cast<f32>(has_unit_diagonal ? sum : sum / factor_at(a, i, i));
            }
        }
    }
    f32 factor_at(const f32 * a, int row, int column) const {
        return is_transposed ? a[column + static_cast<int64_t>(row) * a_stride]
                             : a[row + static_cast<int64_t>(column) * a_stride];
    }
    f32 & element(f32 * b, int vector, int i) const {
        return is_right ? b[vector + static_cast<int64_t>(i) * b_stride]
                        : b[i + static_cast<int64_t>(vector) * b_stride];
    }
};

const void * moved(const void * at, int64_t bytes) { return static_cast<const char *>(at) + bytes; }

} // namespace

EXPORT int cublasGemmStridedBatchedEx(Handle * handle, int a_op, int b_op, int m, int n, int k,
                                      const void * alpha, const void * a, int a_type, int lda,
                                      long long a_step, const void * b, int b_type, int ldb,
                                      long long b_step, const void * beta, void * c, int c_type,
                                      int ldc, long long c_step, int n_batch, int compute, int) {
    const Product product = {
        m, n, k, scalar(alpha, compute), scalar(beta, compute), handle->uses_tf32()};
    const int64_t a_bytes = bytes_of_type(a_type) * a_step,
                  b_bytes = bytes_of_type(b_type) * b_step,
                  c_bytes = bytes_of_type(c_type) * c_step;
    return call(handle, "product", [=] {
        for (int i = 0; i < n_batch; ++i) {
            multiply(product, {moved(a, i * a_bytes), a_type, lda, a_op != 0},
                     {moved(b, i * b_bytes), b_type, ldb, b_op != 0},
                     const_cast<void *>(moved(c, i * c_bytes)), c_type, ldc);
        }
    });
}

EXPORT int cublasGemmEx(Handle * handle, int a_op, int b_op, int m, int n, int k,
                        const void * alpha, const void * a, int a_type, int lda, const void * b,
                        int b_type, int ldb, const void * beta, void * c, int c_type, int ldc,
                        int compute, int algorithm) {
    return cublasGemmStridedBatchedEx(handle, a_op, b_op, m, n, k, alpha, a, a_type, lda, 0, b,
                                      b_type, ldb, 0, beta, c, c_type, ldc, 0, 1, compute,
                                      algorithm);
}

EXPORT int cublasSgemmStridedBatched(Handle * handle, int a_op, int b_op, int m, int n, int k,
                                     const f32 * alpha, const f32 * a, int lda, long long a_step,
                                     const f32 * b, int ldb, long long b_step, const f32 * beta,
                                     f32 * c, int ldc, long long c_step, int n_batch) {
    return cublasGemmStridedBatchedEx(handle, a_op, b_op, m, n, k, alpha, a, F32, lda, a_step, b,
                                      F32, ldb, b_step, beta, c, F32, ldc, c_step, n_batch, IN_F32,
                                      0);
}

EXPORT int cublasSgemm_v2(Handle * handle, int a_op, int b_op, int m, int n, int k,
                          const f32 * alpha, const f32 * a, int lda, const f32 * b, int ldb,
                          const f32 * beta, f32 * c, int ldc) {
    return cublasSgemmStridedBatched(handle, a_op, b_op, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta,
                                     c, ldc, 0, 1);
}

// The arrays of pointers lie in the GPU's memory, so that they are read when the stream gets there.
EXPORT int cublasGemmBatchedEx(Handle * handle, int a_op, int b_op, int m, int n, int k,
                               const void * alpha, const void * const * a, int a_type, int lda,
                               const void * const * b, int b_type, int ldb, const void * beta,
                               void * const * c, int c_type, int ldc, int n_batch, int compute,
                               int) {
    const Product product = {
        m, n, k, scalar(alpha, compute), scalar(beta, compute), handle->uses_tf32()};
    for (const int type : {a_type, b_type, c_type}) {
        bytes_of_type(type);
    }
    return call(handle, "product of pointers", [=] {
        for (int i = 0; i < n_batch; ++i) {
            multiply(product, {a[i], a_type, lda, a_op != 0}, {b[i], b_type, ldb, b_op != 0}, c[i],
                     c_type, ldc);
        }
    });
}

EXPORT int cublasSgemmBatched(Handle * handle, int a_op, int b_op, int m, int n, int k,
                              const f32 * alpha, const f32 * const * a, int lda,
                              const f32 * const * b, int ldb, const f32 * beta, f32 * const * c,
                              int ldc, int n_batch) {
    return cublasGemmBatchedEx(handle, a_op, b_op, m, n, k, alpha,
                               reinterpret_cast<const void * const *>(a), F32, lda,
                               reinterpret_cast<const void * const *>(b), F32, ldb, beta,
                               reinterpret_cast<void * const *>(c), F32, ldc, n_batch, IN_F32, 0);
}

EXPORT int cublasStrsmBatched(Handle * handle, int side, int half, int op, int diagonal, int m,
                              int n, const f32 * alpha, const f32 * const * a, int lda,
                              f32 * const * b, int ldb, int n_batch) {
    const Triangle triangle = {side != 0, half == 1, op != 0, diagonal != 0, m, n,
                               *alpha,    lda,       ldb};
    return call(handle, "triangular solve", [=] {
        for (int i = 0; i < n_batch; ++i) {
            triangle.solve(a[i], b[i]);
        }
    });
}

EXPORT int cublasCreate_v2(Handle ** handle) {
    *handle = new Handle;
    return 0;
}

EXPORT int cublasDestroy_v2(Handle * handle) {
    delete handle;
    return 0;
}

EXPORT int cublasSetMathMode(Handle * handle, int mode) {
    handle->math_mode = mode;
    return 0;
}

EXPORT int cublasSetStream_v2(Handle * handle, void * stream) {
    handle->stream = stream;
    return 0;
}

EXPORT int cublasSetWorkspace_v2(Handle *, void *, size_t) { return 0; }

EXPORT const char * cublasGetStatusString(int) { return "an error of the software GPU"; }
