#include "graph/path_inputs.h"

#include "layers/delta_net.h"

#include <algorithm>
#include <cmath>

namespace dfl {

bool has_fused_delta_rule(const RecurrentCache & cache, const RecurrentShape & shape) {
    ggml_context_ptr ctx(ggml_init({16 * ggml_tensor_overhead(), nullptr, true}));
    auto heads = [&](int64_t ne0, int64_t ne1, int64_t ne2) {
        return ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, ne0, ne1, ne2, 1);
    };
    const int64_t d = shape.d_state, n_k = shape.n_k_heads, n_v = shape.n_v_heads;
    ggml_tensor * op =
        ggml_gated_delta_net(ctx.get(), heads(d, n_k, 2), heads(d, n_k, 2), heads(d, n_v, 2),
                             heads(1, n_v, 2), heads(1, n_v, 2), heads(d, d, n_v), /*K =*/1);
    return std::all_of(cache.parts().begin(), cache.parts().end(),
                       [&](const auto & part) { return part->backend->runs(op); });
}

void make_path_inputs(LiveGraph & live, const RecurrentShape & recurrent) {
    ggml_context * ctx = live.ctx.get();
    const BatchShape & shape = live.shape;
    GraphInputs & in = live.in;
    std::vector<int64_t> sizes = {shape.n_rows};
    if (shape.walks) {
        sizes.clear();
        in.parents = make_input(ctx, GGML_TYPE_I32, shape.n_rows, 1, "parents");
    } else if (shape.kind == GraphKind::APPEND) {
        sizes = {std::min(shape.n_rows, PATH_CHUNK), shape.n_rows % PATH_CHUNK};
    }
    for (const int64_t n : sizes) {
        if (n == 0 || (!in.paths.empty() && in.paths.back().n == n)) {
            continue;
        }
        in.paths.push_back({n, make_input(ctx, GGML_TYPE_F32, n, 2 * n, "ancestors"),
                            make_input(ctx, GGML_TYPE_F32, n, 2 * n, "path_bias"),
                            make_input(ctx, GGML_TYPE_F32, n, n, "identity"),
                            make_input(ctx, GGML_TYPE_F32, recurrent.d_state, 2 * n, "unit")});
    }
    if (shape.kind == GraphKind::VERIFY) {
        in.conv_taps =
            make_input(ctx, GGML_TYPE_I32, recurrent.d_conv * shape.n_rows, 1, "conv_taps");
    }
}

static void write_conv_taps(const LiveGraph & live, const RecurrentShape & recurrent,
                            const std::vector<int32_t> & parents) {
    const int64_t before = recurrent.d_conv - 1, n = parents.size();
    live.write<int32_t>(live.in.conv_taps, [&](int32_t * data) {
        for (int64_t tap = 0; tap <= before; ++tap) {
            for (int64_t i = 0; i < n; ++i) {
                int64_t row = before + i;
                for (int64_t step = tap; step < before; ++step) {
                    row = row >= before ? before + parents[row - before] : row - 1;
                }
                data[tap * n + i] = static_cast<int32_t>(row);
            }
        }
    });
}

void write_path_inputs(const LiveGraph & live, const RecurrentShape & recurrent,
                       const std::vector<int32_t> & parents) {
    const GraphInputs & in = live.in;
    for (const PathInputs & path : in.paths) {
        const int64_t n = path.n;
        const auto above = [&](int64_t i) { // beyond the tree's nodes, or without one: a chain
            return parents.empty() ? i - 1 : parents[i];
        };
        live.write<float>(path.ancestors, [&](float * data) {
            std::fill(data, data + 2 * n * n, 0.0f);
            for (int64_t i = 0; i < n; ++i) {
                for (int64_t j = i; j >= 0; j = above(j)) {
                    data[i * n + j] = data[(n + i) * n + j] = 1.0f;
                }
            }
        });
        live.write<float>(path.bias, [&](float * data) {
            std::fill(data, data + 2 * n * n, -INFINITY);
            for (int64_t i = 0; i < n; ++i) {
                for (int64_t j = i; j >= 0; j = above(j)) {
                    data[i * n + j] = 0.0f;
                    data[(n + i) * n + j] = j < i ? 0.0f : -INFINITY;
                }
            }
        });
        live.write<float>(path.identity, [&](float * data) {
            for (int64_t i = 0; i < n * n; ++i) {
                data[i] = i % (n + 1) == 0 ? 1.0f : 0.0f;
            }
        });
        const auto d = static_cast<float>(recurrent.d_state);
        live.write<float>(path.unit, [&](float * data) {
            std::fill(data, data + n * recurrent.d_state, 1.0f / d);
            std::fill(data + n * recurrent.d_state, data + 2 * n * recurrent.d_state,
                      1.0f / std::sqrt(d));
        });
    }
    if (in.parents != nullptr) {
        live.write<int32_t>(
            in.parents, [&](int32_t * data) { std::copy(parents.begin(), parents.end(), data); });
    }
    if (in.conv_taps != nullptr) {
        write_conv_taps(live, recurrent, parents);
    }
}

} // namespace dfl
