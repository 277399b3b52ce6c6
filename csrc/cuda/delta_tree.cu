#include "cuda/delta_tree.h"
#include "cuda/math.cuh"

#include <algorithm>
#include <cuda_pipeline.h>
#include <type_traits>

namespace dfl::cuda {
namespace {

constexpr int NODES = 16;       // side of a tile: nodes of one triangular solve
constexpr int WARP_VALUES = 16; // values (rows of the state) of a warp
constexpr int LANES = 8;        // lanes of a group, which share each row
constexpr int ROWS = 4;         // rows of a group of lanes
constexpr int TILE = NODES * NODES;
// Floats of one head's tile: factors of u in later u, then in outputs. The 16 floats behind them
// place the next head's tile in other banks of shared memory.
constexpr int HEAD_TILE = 2 * TILE + 16;
constexpr unsigned ALL = 0xffffffffu;

#ifdef DFL_PHASES // counts cycles of block 0 in each part of the kernel, for the benchmark
__device__ long long phase_cycles[8];
#define BEGIN_PHASES() long long phase_began = clock64()
#define END_PHASE(part)                                                                            \
    if (threadIdx.x == 0 && blockIdx.x == 0) {                                                     \
        const long long now = clock64();                                                           \
        phase_cycles[part] += now - phase_began;                                                   \
        phase_began = now;                                                                         \
    }
#else
#define BEGIN_PHASES()
#define END_PHASE(part)
#endif

// Offsets in shared memory, in floats. heads: value heads of a key head.
struct Layout {
    int queries, tiles, tile_size, products, path_decays, beta, query_scales, ancestors, log_decays,
        key_scales, parents, n_floats;
};

__host__ __device__ Layout layout(int d, int n, int heads, int n_columns) {
    Layout offsets;
    offsets.queries = NODES * d;
    offsets.tiles = 2 * NODES * d;
    offsets.tile_size = heads * HEAD_TILE;
    const int n_tiles = n <= NODES ? 1 : n <= 2 * NODES ? 2 : 3; // the own tile, and two buffers
    offsets.products = offsets.tiles + n_tiles * offsets.tile_size;
    offsets.path_decays = offsets.products + 2 * NODES * n_columns;
    offsets.beta = offsets.path_decays + heads * NODES;
    offsets.query_scales = offsets.beta + heads * NODES;
    offsets.ancestors = offsets.query_scales + NODES;
    offsets.log_decays = offsets.ancestors + 3 * NODES;
    offsets.key_scales = offsets.log_decays + heads * n;
    offsets.parents = offsets.key_scales + n;
    offsets.n_floats = offsets.parents + n;
    return offsets;
}

// Multiplies 4 rows by the keys and queries of N nodes. row(r, m): a lane's m-th 4 values of row r.
// Lane l of 8 gets the product of row l % 4 and k (l < 4) or q.
template <int D, int N, int UNROLL, class Row>
__device__ __forceinline__ void multiply(const Row & row, const float * const (&k)[N],
                                         const float * const (&q)[N], float (&result)[N]) {
    const int lane = threadIdx.x % LANES;
    float sum[N][2 * ROWS];
#pragma unroll
    for (int x = 0; x < N; ++x) {
#pragma unroll
        for (int r = 0; r < 2 * ROWS; ++r) {
            sum[x][r] = 0;
        }
    }
#pragma unroll UNROLL
    for (int m = 0; m < D / (4 * LANES); ++m) {
        float4 rows[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            rows[r] = row(r, m);
        }
#pragma unroll
        for (int x = 0; x < N; ++x) {
            const float4 key = quad(k[x] + (m * LANES + lane) * 4);
            const float4 query = quad(q[x] + (m * LANES + lane) * 4);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                sum[x][r] = dot(rows[r], key, sum[x][r]);
                sum[x][ROWS + r] = dot(rows[r], query, sum[x][ROWS + r]);
            }
        }
    }
    // Each step adds the sums of two halves of the lanes, and halves the number of sums of a lane.
#pragma unroll
    for (int half = ROWS; half > 0; half /= 2) {
        const bool is_high = lane & half;
#pragma unroll
        for (int x = 0; x < N; ++x) {
#pragma unroll
            for (int r = 0; r < half; ++r) {
                const float sent = is_high ? sum[x][r] : sum[x][half + r];
                const float kept = is_high ? sum[x][half + r] : sum[x][r];
                sum[x][r] = kept + __shfl_xor_sync(ALL, sent, half);
            }
        }
    }
#pragma unroll
    for (int x = 0; x < N; ++x) {
        result[x] = sum[x][0];
    }
}

// Computes the tree form. A block computes slices of 16 values of all value heads of one key head,
// for one sequence. A warp holds 16 rows of the state in registers; NODE_GROUPS warps hold the same
// rows and share the nodes.
template <int D, int NODE_GROUPS>
__global__ void __launch_bounds__(32 * MAX_WARPS, 1) tree_form(const DeltaTree work, int slices) {
    extern __shared__ __align__(16) float shared[];
    BEGIN_PHASES();
    constexpr int QUADS = D / (4 * LANES);
    constexpr int PART = NODES / (2 * NODE_GROUPS); // nodes of a thread, of one column (value)

    const int thread = threadIdx.x, n_threads = blockDim.x;
    // The shuffle tells the compiler that all lanes of a warp have the same value.
    const int warp = __shfl_sync(ALL, thread / 32, 0);
    const int lane = thread % 32, group = lane / LANES;
    const int heads = work.n_v / work.n_k, row_warps = heads * slices;
    const int n_columns = WARP_VALUES * row_warps;
    const int key_head = blockIdx.x % work.n_k, first_slice = blockIdx.x / work.n_k * slices;
    const int64_t first_row = static_cast<int64_t>(blockIdx.y) * work.n_rows;
    const int n = work.counts != nullptr ? min(work.counts[blockIdx.y], work.n_rows) : work.n_rows;

    const Layout offsets = layout(D, work.n_rows, heads, n_columns);
    float *keys = shared, *queries = shared + offsets.queries,
          *products = shared + offsets.products;
    float *log_decays = shared + offsets.log_decays, *key_scales = shared + offsets.key_scales;
    float *query_scales = shared + offsets.query_scales,
          *path_decays = shared + offsets.path_decays;
    float * betas = shared + offsets.beta;
    int *parents = reinterpret_cast<int *>(shared + offsets.parents),
        *ancestors = reinterpret_cast<int *>(shared + offsets.ancestors);

    const auto copy_nodes = [&](int first) {
        for (int x = thread; x < min(NODES, n - first) * (D / 4); x += n_threads) {
            const int64_t row = first_row + first + x / (D / 4);
            const int value = key_head * D + x % (D / 4) * 4;
            __pipeline_memcpy_async(keys + x * 4, work.k + row * work.k_row + value, 16);
            __pipeline_memcpy_async(queries + x * 4, work.q + row * work.q_row + value, 16);
        }
        __pipeline_commit();
    };
    for (int i = thread; i < n; i += n_threads) {
        if (work.parents != nullptr) {
            __pipeline_memcpy_async(parents + i, work.parents + first_row + i, sizeof(int));
        } else {
            parents[i] = i - 1;
        }
    }
    for (int x = thread; x < n * heads; x += n_threads) {
        const int i = x % n, head = key_head + work.n_k * (x / n);
        __pipeline_memcpy_async(log_decays + x, work.g + (first_row + i) * work.gate_row + head,
                                sizeof(float));
    }
    copy_nodes(0);

    // Rows of the state, which a warp multiplies by every NODE_GROUPS-th node. Other inputs are
    // needed before the state, so they are requested first.
    const int row_warp = warp % row_warps, node_group = warp / row_warps;
    float4 rows[ROWS][QUADS];
    {
        const int64_t slot = work.slots != nullptr ? work.slots[blockIdx.y] : blockIdx.y;
        const int head = key_head + work.n_k * (row_warp % heads);
        const int value = (first_slice + row_warp / heads) * WARP_VALUES + group * ROWS;
        const float * state = work.state + slot * work.state_slot +
                              (static_cast<int64_t>(head) * D + value) * D + lane % LANES * 4;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int m = 0; m < QUADS; ++m) {
                rows[r][m] = __ldg(reinterpret_cast<const float4 *>(state + r * D + m * LANES * 4));
            }
        }
    }

    // Column of the triangular system: one value of a head. A thread computes PART outputs of it.
    const int column = thread % n_columns, first_node = thread / n_columns * PART;
    const int column_head = column / WARP_VALUES % heads;
    const int64_t column_at = static_cast<int64_t>(key_head + work.n_k * column_head) * D +
                              (first_slice + column / WARP_VALUES / heads) * WARP_VALUES +
                              column % WARP_VALUES;
    const auto update_of = [&](int64_t row) {
        row += first_row;
        return work.updates +
               (work.update_rows != nullptr ? work.update_rows[row] : row) * work.update_row;
    };

    for (int first = 0; first < n; first += NODES) {
        const int count = min(NODES, n - first);
        const float * tile_column = shared + offsets.tiles + column_head * HEAD_TILE + first_node;
        __pipeline_wait_prior(0);
        __syncthreads();
        END_PHASE(0);

        float v[PART];
#pragma unroll
        for (int t = 0; t < PART; ++t) {
            const int i = min(first + first_node + t, n - 1);
            v[t] = work.v[(first_row + i) * work.v_row + column_at];
        }
        const int node = thread % NODES, node_head = thread / NODES;
        const bool is_walker = node_head < heads;
        const float beta = is_walker && node < count
                               ? work.beta[(first_row + first + node) * work.gate_row + key_head +
                                           work.n_k * node_head]
                               : 0.0f;
        // Thread (i, head) walks from node i towards the root and sums the log decays between i and
        // each ancestor. A difference G_i - G_j of large sums would lose digits.
        int ancestor = node < count ? first + node : -1;
        float log_decay = 0;
        const auto walk_ancestors = [&](int buffer, int tile) {
            float * to =
                shared + offsets.tiles + buffer * offsets.tile_size + node_head * HEAD_TILE + node;
#pragma unroll
            for (int j = 0; j < NODES; ++j) {
                to[j * NODES] = to[TILE + j * NODES] = 0;
            }
            int ancestor_bits = 0;
            while (ancestor >= tile) {
                const float decay = exponential(log_decay);
                const int j = ancestor - tile;
                to[j * NODES] = to[TILE + j * NODES] = decay;
                ancestor_bits |= 1 << j;
                log_decay += log_decays[node_head * n + ancestor];
                ancestor = parents[ancestor];
            }
            if (node_head == 0) {
                ancestors[buffer * NODES + node] = ancestor_bits;
            }
        };
        const auto finish_walk = [&] {
            path_decays[thread] = node < count ? exponential(log_decay) : 0.0f;
            betas[thread] = beta;
        };
        if (is_walker) {
            walk_ancestors(0, first);
        }
        for (int x = thread / LANES; x < NODES * 2; x += n_threads / LANES) {
            const bool is_key = x < NODES;
            const int i = min(x % NODES, count - 1);
            const float * from = (is_key ? keys : queries) + i * D + lane % LANES * 4;
            float sum = 0;
#pragma unroll
            for (int m = 0; m < QUADS; ++m) {
                const float4 value = quad(from + m * LANES * 4);
                sum = dot(value, value, sum);
            }
#pragma unroll
            for (int distance = LANES / 2; distance > 0; distance /= 2) {
                sum += __shfl_xor_sync(ALL, sum, distance);
            }
            const float scale = work.eps < 0 ? 1.0f : 1.0f / sqrtf(sum + work.eps);
            if (x % NODES >= count) {
                continue;
            }
            if (lane % LANES == 0) {
                (is_key ? key_scales + first : query_scales)[i] =
                    is_key ? scale : scale * work.q_scale;
            }
            if (is_key && first_slice == 0) {
                float * to = update_of(first + i) + key_head * D + lane % LANES * 4;
#pragma unroll
                for (int m = 0; m < QUADS; ++m) {
                    const float4 value = quad(from + m * LANES * 4);
                    *reinterpret_cast<float4 *>(to + m * LANES * 4) = make_float4(
                        value.x * scale, value.y * scale, value.z * scale, value.w * scale);
                }
            }
        }
        if (first_slice == 0 && is_walker && node < count) {
            const int head = key_head + work.n_k * node_head;
            update_of(first + node)[D * (work.n_k + work.n_v) + head] =
                log_decays[node_head * n + first + node];
        }
        __syncthreads();
        END_PHASE(1);

        // Multiplies the tile's nodes by the nodes of a tile: its own (IS_OWN) or an earlier one. A
        // warp takes 4 nodes of each, and skips them if no node is an ancestor of another.
        const auto node_products = [&](auto own, int buffer, int tile) {
            constexpr bool IS_OWN = decltype(own)::value;
            const int n_quads = (count + 3) / 4;
            const int n_parts = IS_OWN ? n_quads * (n_quads + 1) / 2 : n_quads * 4;
            for (int part = warp; part < n_parts; part += n_threads / 32) {
                int i_quad = part / 4, j_quad = part % 4;
                if (IS_OWN) {
                    i_quad = part >= 6 ? 3 : part >= 3 ? 2 : part >= 1 ? 1 : 0;
                    j_quad = part - i_quad * (i_quad + 1) / 2;
                }
                const int i = min(i_quad * 4 + group, count - 1);
                const int ancestor_bits =
                    i_quad * 4 + group < count ? ancestors[buffer * NODES + i] : 0;
                if (!__any_sync(ALL, ancestor_bits >> (j_quad * 4) & 15)) {
                    continue;
                }
                const float * node_rows[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const int j = min(j_quad * 4 + r, IS_OWN ? count - 1 : NODES - 1);
                    node_rows[r] =
                        (IS_OWN ? keys + j * D
                                : work.k + (first_row + tile + j) * work.k_row + key_head * D) +
                        lane % LANES * 4;
                }
                const auto node_row = [&](int r, int m) {
                    const auto * quad_of_row =
                        reinterpret_cast<const float4 *>(node_rows[r]) + m * LANES;
                    if constexpr (IS_OWN) {
                        return *quad_of_row;
                    } else {
                        return __ldg(quad_of_row);
                    }
                };
                float sums[1];
                multiply<D, 1, QUADS>(node_row, {keys + i * D}, {queries + i * D}, sums);
                const int j = j_quad * 4 + lane % ROWS;
                if (ancestor_bits >> j & 1) {
                    const bool is_query = lane % LANES >= ROWS;
                    const float product = sums[0] * key_scales[tile + j] *
                                          (is_query ? query_scales[i] : key_scales[first + i]);
                    float * to = shared + offsets.tiles + buffer * offsets.tile_size +
                                 is_query * TILE + j * NODES + i;
                    for (int h = 0; h < heads; ++h) {
                        to[h * HEAD_TILE] *= product;
                    }
                }
            }
        };
        node_products(std::true_type{}, 0, first);
        // Multiplies the nodes by the state, which arrives during the products of nodes.
        {
            const auto state_row = [&](int r, int m) { return rows[r][m]; };
            float * to = products + lane % LANES / ROWS * NODES * n_columns +
                         row_warp * WARP_VALUES + group * ROWS + lane % ROWS;
            int i = node_group;
            for (; i + NODE_GROUPS < count; i += 2 * NODE_GROUPS) {
                const int other = i + NODE_GROUPS;
                float sums[2];
                multiply<D, 2, QUADS>(state_row, {keys + i * D, keys + other * D},
                                      {queries + i * D, queries + other * D}, sums);
                to[i * n_columns] = sums[0];
                to[other * n_columns] = sums[1];
            }
            if (i < count) {
                float sums[1];
                multiply<D, 1, QUADS>(state_row, {keys + i * D}, {queries + i * D}, sums);
                to[i * n_columns] = sums[0];
            }
        }
        if (is_walker) {
            first > 0 ? walk_ancestors(1, first - NODES) : finish_walk();
        }
        __syncthreads();
        END_PHASE(2);

        float from_u[PART] = {}, out[PART] = {};
        int buffer = 1;
        for (int tile = first - NODES; tile >= 0; tile -= NODES) {
            node_products(std::false_type{}, buffer, tile);
            if (is_walker) {
                tile > 0 ? walk_ancestors(3 - buffer, tile - NODES) : finish_walk();
            }
            __syncthreads();
            const float * factors = tile_column + buffer * offsets.tile_size;
#pragma unroll 4
            for (int j = 0; j < NODES; ++j) {
                const float u = update_of(tile + j)[work.n_k * D + column_at];
                float u_factors[PART], out_factors[PART];
                load(factors + j * NODES, u_factors);
                load(factors + TILE + j * NODES, out_factors);
#pragma unroll
                for (int t = 0; t < PART; ++t) {
                    from_u[t] = fmaf(u_factors[t], u, from_u[t]);
                    out[t] = fmaf(out_factors[t], u, out[t]);
                }
            }
            __syncthreads();
            END_PHASE(3);
            buffer = 3 - buffer;
        }
        if (first + NODES < n) {
            copy_nodes(first + NODES);
        }
        {
            float path_decay[PART];
            load(path_decays + column_head * NODES + first_node, path_decay);
#pragma unroll
            for (int t = 0; t < PART; ++t) {
                const int i = first_node + t;
                if (i < count) {
                    float * x = products + i * n_columns + column;
                    out[t] = fmaf(path_decay[t] * query_scales[i], x[NODES * n_columns], out[t]);
                    *x = v[t] - path_decay[t] * key_scales[first + i] * *x - from_u[t];
                }
            }
        }
        __syncthreads();
        END_PHASE(4);

        if (thread < n_columns) {
            const float * factors = shared + offsets.tiles + column_head * HEAD_TILE;
            float x[NODES];
#pragma unroll
            for (int i = 0; i < NODES; ++i) {
                x[i] = i < count ? products[i * n_columns + column] : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < NODES; ++j) {
                if (j >= count) {
                    break;
                }
                const float u = x[j] * betas[column_head * NODES + j];
                products[j * n_columns + column] = u;
#pragma unroll
                for (int i = (j + 1) / 4 * 4; i < NODES; i += 4) {
                    const float4 factor = quad(factors + j * NODES + i);
                    x[i] = fmaf(-factor.x, u, x[i]);
                    x[i + 1] = fmaf(-factor.y, u, x[i + 1]);
                    x[i + 2] = fmaf(-factor.z, u, x[i + 2]);
                    x[i + 3] = fmaf(-factor.w, u, x[i + 3]);
                }
            }
        }
        __syncthreads();
        END_PHASE(5);

        for (int j = 0; j < min(count, first_node + PART); ++j) {
            const float u = products[j * n_columns + column];
            float factors[PART];
            load(tile_column + TILE + j * NODES, factors);
#pragma unroll
            for (int t = 0; t < PART; ++t) {
                out[t] = fmaf(factors[t], u, out[t]);
            }
        }
#pragma unroll
        for (int t = 0; t < PART; ++t) {
            const int i = first_node + t;
            if (i < count) {
                work.out[(first_row + first + i) * work.n_v * D + column_at] = out[t];
                update_of(first + i)[work.n_k * D + column_at] = products[i * n_columns + column];
            }
        }
        END_PHASE(6);
    }
    for (int i = n + thread / n_columns; i < work.n_rows; i += 2 * NODE_GROUPS) {
        work.out[(first_row + i) * work.n_v * D + column_at] = 0;
    }
}

constexpr int D = HEAD_SIZE;

// Returns the bytes of shared memory of a block with `row_warps` groups of warps for rows.
size_t shared_bytes(const DeltaTree & work, int row_warps) {
    return layout(D, work.n_rows, work.n_v / work.n_k, row_warps * WARP_VALUES).n_floats *
           sizeof(float);
}

template <int NODE_GROUPS>
cudaError_t launch_tree_form(const DeltaTree & work, int slices, cudaStream_t stream) {
    const int row_warps = work.n_v / work.n_k * slices;
    const size_t bytes = shared_bytes(work, row_warps);
    const auto kernel = tree_form<D, NODE_GROUPS>;
    if (bytes > 48 * 1024) {
        const cudaError_t status = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
        if (status != cudaSuccess) {
            return status;
        }
    }
    const dim3 grid(work.n_k * (D / WARP_VALUES / slices), work.n_sequences);
    kernel<<<grid, 32 * row_warps * NODE_GROUPS, bytes, stream>>>(work, slices);
    return cudaGetLastError();
}

} // namespace

#ifdef DFL_PHASES
void read_phases(long long (&cycles)[8]) {
    const long long zero[8] = {};
    cudaMemcpyFromSymbol(cycles, phase_cycles, sizeof(cycles));
    cudaMemcpyToSymbol(phase_cycles, zero, sizeof(zero));
}
#endif

DeltaTreeLaunch choose_launch(const DeltaTree & work, int n_sms, size_t max_shared) {
    constexpr int SCHEDULERS = 4; // warp schedulers of a multiprocessor
    constexpr double STEP = 180;  // instructions of the products of 16 rows and a node
    constexpr double LOAD = 64;   // cycles of loading a warp's 16 rows through the L1 cache
    const int heads = work.n_v / work.n_k, n = work.n_rows, tiles = (n + NODES - 1) / NODES;
    const int node_steps = 10 * tiles + 8 * tiles * (tiles - 1);
    DeltaTreeLaunch fastest = {0, 0};
    double min_time = 0;
    for (int slices = 1; slices <= D / WARP_VALUES; slices *= 2) {
        for (int groups = 1; groups <= 4; groups *= 2) {
            const int warps = heads * slices * groups;
            if (warps > MAX_WARPS || shared_bytes(work, heads * slices) > max_shared) {
                continue;
            }
            const int n_blocks = work.n_k * (D / WARP_VALUES / slices) * work.n_sequences;
            const int blocks_per_sm = (n_blocks + n_sms - 1) / n_sms;
            // A multiprocessor has registers for 12 warps.
            const int concurrent_blocks = std::min(blocks_per_sm, MAX_WARPS / warps);
            const int rounds = (blocks_per_sm + concurrent_blocks - 1) / concurrent_blocks;
            const int warps_per_scheduler =
                (concurrent_blocks * warps + SCHEDULERS - 1) / SCHEDULERS;
            const double steps = (n + groups - 1) / groups + 1.0 * node_steps / warps;
            const double time =
                rounds * (warps_per_scheduler * steps * STEP + concurrent_blocks * warps * LOAD);
            if (min_time == 0 || time < min_time) {
                min_time = time;
                fastest = {slices, groups};
            }
        }
    }
    return fastest;
}

cudaError_t delta_tree(const DeltaTree & work, const DeltaTreeLaunch & launch,
                       cudaStream_t stream) {
    const int heads = work.n_v / work.n_k;
    if (work.n_rows < 1 || work.n_rows > MAX_TREE_NODES || heads * work.n_k != work.n_v ||
        heads * launch.slices * launch.node_groups > MAX_WARPS) {
        return cudaErrorInvalidValue;
    }
    switch (launch.node_groups) {
    case 1:
        return launch_tree_form<1>(work, launch.slices, stream);
    case 2:
        return launch_tree_form<2>(work, launch.slices, stream);
    case 4:
        return launch_tree_form<4>(work, launch.slices, stream);
    default:
        return cudaErrorInvalidValue;
    }
}

} // namespace dfl::cuda
