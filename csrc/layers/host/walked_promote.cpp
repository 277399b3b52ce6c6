#include "cpu/delta_head.h"
#include "layers/host/float_rows.h"
#include "layers/host/walked_delta_net.h"

#include <algorithm>
#include <cstring>

namespace dfl {

namespace {

// All layers' states along a path of their trace. src: path, on_path, conv_rows. dst: scratch for
// each thread.
class Promote : public CpuNode {
  public:
    Promote(const cpu::DeltaHeadKernel & kernel, const RecurrentPart & cache, const Build & b)
        : kernel_(kernel), cache_(cache), shape_(b.hp.recurrent), eps_(b.hp.eps) {}

    // Keys, values, exp(g) and beta of n rows.
    static int64_t scratch_size(const RecurrentShape & shape, int64_t n) {
        return n * (2 * shape.d_state + 2);
    }

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const ggml_tensor *path = dst->src[0], *on_path = dst->src[1], *conv_rows = dst->src[2];
        const auto * there = static_cast<const float *>(on_path->data);
        const int64_t n = std::find(there, there + path->ne[0], 0.0f) - there;
        const int64_t heads = shape_.n_v_heads, parts = heads * path->ne[1];
        float * scratch = static_cast<float *>(dst->data) + ith * scratch_size(shape_, path->ne[0]);
        constexpr int64_t long_walk = 1 << 21; // changes of a state's value
        const bool is_long = parts * shape_.d_state * shape_.d_state * n >= long_walk;
        shares_.share_out(parts, is_long, ith, nth, [&](int64_t part) {
            const int64_t layer = part / heads, head = part % heads;
            if (head == 0) {
                promote_inputs(layer, static_cast<const int32_t *>(conv_rows->data));
            }
            promote_state(layer, head, static_cast<const int32_t *>(path->data), n, scratch);
        });
    }

  private:
    void promote_inputs(int64_t layer, const int32_t * from) const {
        const int64_t channels = shape_.conv_channels();
        for (int64_t row = 0; row < shape_.d_conv - 1; ++row) {
            std::memcpy(row_of(cache_.conv, 0, layer) + row * channels,
                        row_of(cache_.conv_trace, from[row], layer), channels * sizeof(float));
        }
    }

    void promote_state(int64_t layer, int64_t head, const int32_t * path, int64_t n,
                       float * scratch) const {
        const int64_t d = shape_.d_state, n_k = shape_.n_k_heads, n_v = shape_.n_v_heads;
        float *k = scratch, *v = k + n * d, *decay = v + n * d, *beta = decay + n;
        for (int64_t i = 0; i < n; ++i) {
            const float * node = row_of(cache_.trace, path[i], layer);
            kernel_.scale(node + head % n_k * d, d, 1.0f, eps_, k + i * d);
            std::copy_n(node + (n_k + head) * d, d, v + i * d);
            const float * gates = node + (n_k + n_v) * d + head;
            decay[i] = gates[0];
            beta[i] = gates[n_v];
        }
        float * state = row_of(cache_.state, 0, layer) + head * d * d;
        cpu::DeltaWalk work = {};
        work.d = d;
        work.n = n;
        work.k = k;
        work.v = v;
        work.qk_row = work.v_row = d;
        work.decay = decay;
        work.beta = beta;
        work.gate_row = 1;
        work.state = work.last_state = state;
        kernel_.walk(work, nullptr);
    }

    const cpu::DeltaHeadKernel & kernel_;
    const RecurrentPart & cache_;
    RecurrentShape shape_;
    float eps_;
};

} // namespace

void walked_promote(Build & b, const RecurrentPart & part, ggml_tensor * path,
                    ggml_tensor * on_path, ggml_tensor * conv_rows) {
    const int64_t scratch =
        b.cpu_nodes.n_threads * Promote::scratch_size(b.hp.recurrent, path->ne[0]);
    ggml_build_forward_expand(b.graph,
                              add_cpu_node(b, GGML_TYPE_F32, scratch, 1, {path, on_path, conv_rows},
                                           std::make_unique<Promote>(*cpu::delta_head(), part, b)));
}

} // namespace dfl
