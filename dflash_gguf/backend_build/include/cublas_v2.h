// Declares the part of cuBLAS that ggml calls, for machines where only nvcc is installed.
#pragma once

#include <cuda_runtime.h>
#include <library_types.h>

#define CUBLAS_VER_MAJOR 13
#define CUBLAS_VER_MINOR 0

// Names of the functions in the library.
#define cublasCreate cublasCreate_v2
#define cublasDestroy cublasDestroy_v2
#define cublasSetStream cublasSetStream_v2
#define cublasSetWorkspace cublasSetWorkspace_v2
#define cublasSgemm cublasSgemm_v2

typedef struct cublasContext * cublasHandle_t;
typedef enum { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_NOT_SUPPORTED = 15 } cublasStatus_t;
typedef enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 } cublasOperation_t;
typedef enum { CUBLAS_FILL_MODE_LOWER = 0, CUBLAS_FILL_MODE_UPPER = 1 } cublasFillMode_t;
typedef enum { CUBLAS_DIAG_NON_UNIT = 0, CUBLAS_DIAG_UNIT = 1 } cublasDiagType_t;
typedef enum { CUBLAS_SIDE_LEFT = 0, CUBLAS_SIDE_RIGHT = 1 } cublasSideMode_t;
typedef enum { CUBLAS_DEFAULT_MATH = 0, CUBLAS_TF32_TENSOR_OP_MATH = 3 } cublasMath_t;
typedef enum {
    CUBLAS_COMPUTE_16F = 64,
    CUBLAS_COMPUTE_32F = 68,
    CUBLAS_COMPUTE_32F_FAST_16F = 74,
    CUBLAS_COMPUTE_32F_FAST_TF32 = 77
} cublasComputeType_t;
typedef enum { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 } cublasGemmAlgo_t;

extern "C" {
cublasStatus_t cublasCreate(cublasHandle_t * handle);
cublasStatus_t cublasDestroy(cublasHandle_t handle);
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void * workspace, size_t bytes);
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
const char * cublasGetStatusString(cublasStatus_t status);

cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t a_op, cublasOperation_t b_op,
                           int m, int n, int k, const float * alpha, const float * a, int lda,
                           const float * b, int ldb, const float * beta, float * c, int ldc);
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t a_op,
                                         cublasOperation_t b_op, int m, int n, int k,
                                         const float * alpha, const float * a, int lda,
                                         long long a_step, const float * b, int ldb,
                                         long long b_step, const float * beta, float * c, int ldc,
                                         long long c_step, int n_batch);
cublasStatus_t cublasSgemmBatched(cublasHandle_t handle, cublasOperation_t a_op,
                                  cublasOperation_t b_op, int m, int n, int k, const float * alpha,
                                  const float * const * a, int lda, const float * const * b,
                                  int ldb, const float * beta, float * const * c, int ldc,
                                  int n_batch);
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t a_op, cublasOperation_t b_op,
                            int m, int n, int k, const void * alpha, const void * a,
                            cudaDataType a_type, int lda, const void * b, cudaDataType b_type,
                            int ldb, const void * beta, void * c, cudaDataType c_type, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm);
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t a_op,
                                          cublasOperation_t b_op, int m, int n, int k,
                                          const void * alpha, const void * a, cudaDataType a_type,
                                          int lda, long long a_step, const void * b,
                                          cudaDataType b_type, int ldb, long long b_step,
                                          const void * beta, void * c, cudaDataType c_type, int ldc,
                                          long long c_step, int n_batch,
                                          cublasComputeType_t compute, cublasGemmAlgo_t algorithm);
cublasStatus_t cublasGemmBatchedEx(cublasHandle_t handle, cublasOperation_t a_op,
                                   cublasOperation_t b_op, int m, int n, int k, const void * alpha,
                                   const void * const * a, cudaDataType a_type, int lda,
                                   const void * const * b, cudaDataType b_type, int ldb,
                                   const void * beta, void * const * c, cudaDataType c_type,
                                   int ldc, int n_batch, cublasComputeType_t compute,
                                   cublasGemmAlgo_t algorithm);
cublasStatus_t cublasStrsmBatched(cublasHandle_t handle, cublasSideMode_t side,
                                  cublasFillMode_t half, cublasOperation_t op,
                                  cublasDiagType_t diagonal, int m, int n, const float * alpha,
                                  const float * const * a, int lda, float * const * b, int ldb,
                                  int n_batch);
}
