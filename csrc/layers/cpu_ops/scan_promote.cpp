#include "cpu/delta_net/delta_head.h"
#include "layers/cpu_ops/float_rows.h"
#include "layers/cpu_ops/scan_delta_net.h"

#include <algorithm>
#include <cstring>

namespace dfl {

namespace {

// Number of nodes of an accepted path that are gathered and scanned at once.
constexpr int64_t CHUNK = 32;

// CPU node that advances recurrent states along accepted paths. dst: scratch for each thread.
class Promote : public CpuNode {
  public:
    Promote(const cpu::DeltaHeadKernel & kernel, const RecurrentPart & cache,
            const GraphContext & g)
        : kernel_(kernel), cache_(cache), accepted_(g.recurrent.accepted), shape_(g.hp.recurrent),
          eps_(g.hp.eps) {}

    // Returns the floats of one thread's scratch: keys, values, exp(g) and beta of CHUNK nodes.
    static int64_t scratch_size(const RecurrentShape & shape) {
        return CHUNK * (2 * shape.d_state + 2);
    }

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const int64_t heads = shape_.n_v_heads, parts = heads * cache_.n_layers;
        float * scratch = static_cast<float *>(dst->data) + ith * scratch_size(shape_);
        // Number of state value updates from which on idle threads take over work of busy threads.
        constexpr int64_t long_scan = 1 << 21;
        int64_t n_nodes = 0;
        for (const AcceptedPath & path : accepted_) {
            n_nodes += static_cast<int64_t>(path.nodes.size());
        }
        const bool is_long = parts * shape_.d_state * shape_.d_state * n_nodes >= long_scan;
        const auto n_paths = static_cast<int64_t>(accepted_.size());
        share_out(parts * n_paths, is_long, ith, nth, [&](int64_t part) {
            const AcceptedPath & path = accepted_[part / parts];
            const int64_t layer = part % parts / heads, head = part % heads;
            if (head == 0) {
                promote_inputs(path, layer);
            }
            const auto n = static_cast<int64_t>(path.nodes.size());
            for (int64_t first = 0; first < n; first += CHUNK) {
                promote_state(path.sequence, layer, head, path.nodes.data() + first,
                              std::min(CHUNK, n - first), scratch);
            }
        });
    }

  private:
    void promote_inputs(const AcceptedPath & path, int64_t layer) const {
        const int64_t channels = shape_.conv_channels();
        for (int64_t row = 0; row < shape_.d_conv - 1; ++row) {
            std::memcpy(row_of(cache_.conv, path.sequence, layer) + row * channels,
                        row_of(cache_.conv_updates, path.conv[row], layer),
                        channels * sizeof(float));
        }
    }

    void promote_state(int32_t sequence, int64_t layer, int64_t head, const int32_t * path,
                       int64_t n, float * scratch) const {
        const int64_t d = shape_.d_state, n_k = shape_.n_k_heads, n_v = shape_.n_v_heads;
        float *k = scratch, *v = k + n * d, *decay = v + n * d, *beta = decay + n;
        for (int64_t i = 0; i < n; ++i) {
            const float * node = row_of(cache_.node_updates, path[i], layer);
            kernel_.scale(node + shape_.key_of(head) * d, d, 1.0f, eps_, k + i * d);
            std::copy_n(node + (n_k + head) * d, d, v + i * d);
            const float * gates = node + (n_k + n_v) * d + head;
            decay[i] = gates[0];
            beta[i] = gates[n_v];
        }
        float * state = row_of(cache_.state, sequence, layer) + head * d * d;
        cpu::DeltaScan work = {};
        work.d = d;
        work.n = n;
        work.k = k;
        work.v = v;
        work.qk_row = work.v_row = d;
        work.decay = decay;
        work.beta = beta;
        work.gate_row = 1;
        work.state = work.last_state = state;
        kernel_.scan(work, nullptr);
    }

    const cpu::DeltaHeadKernel & kernel_;
    const RecurrentPart & cache_;
    const std::vector<AcceptedPath> & accepted_;
    RecurrentShape shape_;
    float eps_;
};

} // namespace

void scan_promote(GraphContext & g, const RecurrentPart & part) {
    const int64_t scratch = g.cpu_nodes.n_threads * Promote::scratch_size(g.hp.recurrent);
    ggml_build_forward_expand(g.graph,
                              add_cpu_node(g, GGML_TYPE_F32, scratch, 1, {part.state},
                                           std::make_unique<Promote>(*cpu::delta_head(), part, g)));
}

} // namespace dfl
