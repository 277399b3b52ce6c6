#include "layers/cpu_ops/scan_delta_net.h"

#include "cpu/delta_net/delta_head.h"
#include "dflash.h"
#include "layers/cpu_ops/float_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace dfl {

namespace {

struct DeltaLayer {
    const DeltaNetWeights & w;
    const RecurrentPart & cache;
    const std::vector<RecurrentRows> & pass_rows; // rows of each sequence, set before a run
    RecurrentShape shape;
    int64_t n_rows;
    bool may_verify;
    int64_t index;
    float eps;

    // Returns a sequence's committed convolution inputs, d_conv - 1 rows of conv_channels floats.
    float * past(int32_t sequence) const { return row_of(cache.conv, sequence, index); }
    float * state(int32_t sequence, int64_t head) const {
        return row_of(cache.state, sequence, index) + head * shape.d_state * shape.d_state;
    }
    int64_t n_real() const { return pass_rows.back().first + pass_rows.back().n; }
};

// Number of a head's rows that are prefetched before the first row is used.
constexpr int64_t FETCHED_ROWS = 16;

// CPU node that prepares class Scan's scaled q and k, v, exp(g) and beta. src: qkv, beta, alpha.
class Prepare : public CpuNode {
  public:
    Prepare(const cpu::DeltaHeadKernel & kernel, const DeltaLayer & layer)
        : kernel_(kernel), layer_(layer) {}

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const RecurrentShape & shape = layer_.shape;
        const int64_t heads = 2 * shape.n_k_heads + shape.n_v_heads, n = layer_.n_rows;
        const auto n_sequences = static_cast<int64_t>(layer_.pass_rows.size());
        const bool is_long = heads * shape.d_state * n >= LONG_ROWS;
        share_out(heads * n_sequences, is_long, ith, nth, [&](int64_t part) {
            prepare(dst, layer_.pass_rows[part / heads], head_at(part % heads));
        });
    }

  private:
    // Number of values to convolve from which on idle threads take over work of busy threads.
    static constexpr int64_t LONG_ROWS = 1 << 17;

    // Returns the i-th head to convolve: a query head, its key head, then its value heads. The
    // delta rule has the same order, so that a core mostly reads rows it wrote.
    int64_t head_at(int64_t i) const {
        const RecurrentShape & shape = layer_.shape;
        const int64_t of_key = 2 + shape.values_a_key(), key = i / of_key, place = i % of_key;
        return place < 2 ? place * shape.n_k_heads + key
                         : 2 * shape.n_k_heads + shape.value_head(key, place - 2);
    }

    void prepare(ggml_tensor * dst, const RecurrentRows & rows, int64_t head) {
        const RecurrentShape & shape = layer_.shape;
        const int64_t d = shape.d_state, n_k = shape.n_k_heads, n = rows.n;
        const ggml_tensor * qkv = dst->src[0];
        cpu::DeltaConvolution work;
        work.d = d;
        work.n = n;
        work.d_conv = shape.d_conv;
        work.past = layer_.past(rows.sequence) + head * d;
        work.past_row = shape.conv_channels();
        work.u = row_of(qkv, rows.first) + head * d;
        work.u_row = stride(qkv);
        for (int64_t i = 0; i < std::min(n, FETCHED_ROWS); ++i) {
            fetch_early(work.u + i * work.u_row, d);
        }
        work.taps = rows.taps.empty() ? nullptr : rows.taps.data();
        work.kernel = static_cast<const float *>(layer_.w.conv->data) + head * d * shape.d_conv;
        work.out = row_of(dst, rows.first) + head * d;
        work.out_row = stride(dst);
        kernel_.convolve(work);
        if (rows.is_verify) {
            trace(work, rows.updates, head);
        } else {
            advance(work, layer_.past(rows.sequence) + head * d);
        }
        if (head >= 2 * n_k) {
            set_gates(dst, rows, head - 2 * n_k);
            return;
        }
        const float length = head < n_k ? 1.0f / std::sqrt(static_cast<float>(d)) : 1.0f;
        for (int64_t i = 0; i < n; ++i) {
            float * x = work.out + i * work.out_row;
            kernel_.scale(x, d, length, layer_.eps, x);
        }
    }

    // Commits the last d_conv - 1 inputs. Ascending copies are safe, as rows move to lower indices.
    void advance(const cpu::DeltaConvolution & work, float * past) const {
        const int64_t before = work.d_conv - 1;
        for (int64_t row = 0; row < before; ++row) {
            const int64_t from = work.n + row;
            std::memcpy(past + row * work.past_row,
                        from < before ? past + from * work.past_row
                                      : work.u + (from - before) * work.u_row,
                        work.d * sizeof(float));
        }
    }

    void trace(const cpu::DeltaConvolution & work, const UpdateRows & to, int64_t head) const {
        const int64_t d = work.d, before = work.d_conv - 1, n_k = layer_.shape.n_k_heads;
        const size_t bytes = d * sizeof(float);
        for (int64_t row = 0; row < before + work.n; ++row) {
            std::memcpy(row_of(layer_.cache.conv_updates, to.first_conv + row, layer_.index) +
                            head * d,
                        row < before ? work.past + row * work.past_row
                                     : work.u + (row - before) * work.u_row,
                        bytes);
        }
        for (int64_t i = 0; i < work.n && head >= n_k; ++i) { // promotions need no queries
            std::memcpy(row_of(layer_.cache.node_updates, to.first + i, layer_.index) +
                            (head - n_k) * d,
                        work.out + i * work.out_row, bytes);
        }
    }

    void set_gates(ggml_tensor * dst, const RecurrentRows & rows, int64_t head) const {
        const RecurrentShape & shape = layer_.shape;
        const int64_t n = rows.n, n_v = shape.n_v_heads;
        // Columns of a value head: y_at in the product for beta, x_at in the product for the decay.
        int64_t y_at = head, x_at = head;
        if (layer_.w.beta_alpha) {
            const int64_t of_key = shape.values_a_key();
            y_at = 2 * of_key * shape.key_of(head) + shape.place_of(head);
            x_at = y_at + of_key;
        }
        constexpr int64_t at_once = cpu::DELTA_GATES;
        float x[at_once] = {}, y[at_once] = {}, decay[at_once], beta[at_once];
        const cpu::DeltaGates work = {static_cast<const float *>(layer_.w.a->data)[head],
                                      static_cast<const float *>(layer_.w.dt_bias->data)[head],
                                      x,
                                      y,
                                      decay,
                                      beta};
        for (int64_t first = 0; first < n; first += at_once) {
            const int64_t count = std::min(at_once, n - first), row = rows.first + first;
            for (int64_t i = 0; i < count; ++i) {
                x[i] = row_of(dst->src[2], row + i)[x_at];
                y[i] = row_of(dst->src[1], row + i)[y_at];
            }
            kernel_.gates(work);
            for (int64_t i = 0; i < count; ++i) {
                float * gates = row_of(dst, row + i) + shape.conv_channels();
                gates[head] = decay[i];
                gates[n_v + head] = beta[i];
            }
            for (int64_t i = 0; i < count && rows.is_verify; ++i) {
                float * update = row_of(layer_.cache.node_updates, rows.updates.first + first + i,
                                        layer_.index) +
                                 shape.d_state * (shape.n_k_heads + n_v);
                update[head] = decay[i];
                update[n_v + head] = beta[i];
            }
        }
    }

    const cpu::DeltaHeadKernel & kernel_;
    DeltaLayer layer_;
};

// CPU node of delta rule, norm and gate. src: q, k, v, exp(g) and beta from node Prepare, then
// output gates. dst: result, thread scratch.
class Scan : public CpuNode {
  public:
    Scan(const cpu::DeltaHeadKernel & kernel, const DeltaLayer & layer)
        : kernel_(kernel), layer_(layer) {}

    static int64_t scratch_size(const cpu::DeltaHeadKernel & kernel, const DeltaLayer & layer) {
        const int64_t n = layer.n_rows, n_nodes = std::min<int64_t>(n, DFL_MAX_VERIFY);
        return n + (layer.may_verify ? kernel.scratch_size(layer.shape.d_state, n_nodes) : 0);
    }

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const RecurrentShape & shape = layer_.shape;
        const int64_t n_v = shape.n_v_heads, width = shape.d_state * n_v;
        auto * out = static_cast<float *>(dst->data);
        float * scratch = out + width * layer_.n_rows + ith * scratch_size(kernel_, layer_);
        if (ith == 0) { // padding rows have no sequence: their result is 0
            const int64_t n = layer_.n_real();
            std::fill_n(out + n * width, (layer_.n_rows - n) * width, 0.0f);
        }
        const auto n_sequences = static_cast<int64_t>(layer_.pass_rows.size());
        const bool is_long = width * shape.d_state * layer_.n_rows >= LONG_SCAN;
        share_out(n_v * n_sequences, is_long, ith, nth, [&](int64_t part) {
            scan(dst, layer_.pass_rows[part / n_v], head_at(part % n_v), out, scratch);
        });
    }

  private:
    // Number of state value updates from which on idle threads take over work of busy threads.
    static constexpr int64_t LONG_SCAN = 1 << 21;

    // Returns the i-th value head. Heads of a key are adjacent, so that a core reads rows it
    // prepared.
    int64_t head_at(int64_t i) const {
        const int64_t of_key = layer_.shape.values_a_key();
        return layer_.shape.value_head(i / of_key, i % of_key);
    }

    // Appended rows that are scanned at once, so that their queries and keys stay in the L1 cache.
    static constexpr int64_t CHUNK = 32;

    void scan(const ggml_tensor * dst, const RecurrentRows & rows_of_sequence, int64_t head,
              float * out, float * scratch) const {
        const RecurrentShape & shape = layer_.shape;
        const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_v = shape.n_v_heads;
        const int64_t n = rows_of_sequence.n, inner = d * n_v;
        const ggml_tensor *rows = dst->src[0], *gate = dst->src[1];
        float * qk = scratch;
        cpu::DeltaScan work;
        work.d = d;
        work.qk_row = work.v_row = work.gate_row = stride(rows);
        work.parents = rows_of_sequence.parents.empty() ? nullptr : rows_of_sequence.parents.data();
        work.out_row = inner;
        for (int64_t i = 0; i < std::min(n, FETCHED_ROWS); ++i) {
            fetch_early(row_of(gate, rows_of_sequence.first + i) + head * d, d);
        }
        // Chunks pass on the state through the cache; verifies, which must not change it, are one
        // chunk.
        const int64_t chunk = rows_of_sequence.is_verify ? n : CHUNK;
        for (int64_t first = 0; first < n; first += chunk) {
            const float * row = row_of(rows, rows_of_sequence.first + first);
            work.n = std::min(chunk, n - first);
            work.q = row + shape.key_of(head) * d;
            work.k = work.q + n_k * d;
            work.v = row + (2 * n_k + head) * d;
            work.decay = row + shape.conv_channels() + head;
            work.beta = work.decay + n_v;
            for (int64_t i = 0; i < work.n; ++i) {
                qk[i] = kernel_.dot(work.q + i * work.qk_row, work.k + i * work.qk_row, d);
            }
            work.qk = qk;
            work.state = layer_.state(rows_of_sequence.sequence, head);
            work.last_state = rows_of_sequence.is_verify
                                  ? nullptr
                                  : layer_.state(rows_of_sequence.sequence, head);
            work.out = out + (rows_of_sequence.first + first) * inner + head * d;
            kernel_.scan(work, scratch + layer_.n_rows);
        }
        for (int64_t i = rows_of_sequence.first; i < rows_of_sequence.first + n; ++i) {
            kernel_.gate({d, static_cast<const float *>(layer_.w.norm->data),
                          row_of(gate, i) + head * d, layer_.eps, out + i * inner + head * d});
        }
    }

    const cpu::DeltaHeadKernel & kernel_;
    DeltaLayer layer_;
};

} // namespace

bool can_scan_delta_net(const RecurrentShape & shape) {
    return shape.d_state <= cpu::MAX_DELTA_HEAD && shape.d_conv <= cpu::MAX_DELTA_TAPS;
}

ggml_tensor * scan_delta_net(GraphContext & g, int il, const DeltaNetProducts & in) {
    const cpu::DeltaHeadKernel & kernel = *cpu::delta_head();
    const RecurrentShape & shape = g.hp.recurrent;
    const int64_t inner = shape.d_state * shape.n_v_heads, n = g.shape.n_rows;
    const DeltaLayer layer = {g.weights.layers[il].delta,
                              g.recurrent.part_of(il),
                              g.recurrent.pass_rows,
                              shape,
                              n,
                              g.shape.kind == GraphKind::VERIFY,
                              g.recurrent.index(il),
                              g.hp.eps};
    ggml_tensor * rows =
        add_cpu_node(g, GGML_TYPE_F32, shape.conv_channels() + 2 * shape.n_v_heads, n,
                     {in.qkv, in.beta, in.alpha}, std::make_unique<Prepare>(kernel, layer));
    const int64_t scratch = g.cpu_nodes.n_threads * Scan::scratch_size(kernel, layer);
    ggml_tensor * all = add_cpu_node(g, GGML_TYPE_F32, inner * n + scratch, 1, {rows, in.gate},
                                     std::make_unique<Scan>(kernel, layer));
    ggml_build_forward_expand(g.graph, all); // the state advances even if no row gets logits
    return ggml_view_2d(g.ctx, all, inner, n, inner * sizeof(float), 0);
}

} // namespace dfl
