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
    GraphInputs & in = live.in;
    const auto add = [&](int64_t of, int64_t n) {
        const bool is_there =
            std::any_of(in.paths.begin(), in.paths.end(),
                        [&](const PathInputs & path) { return path.of == of && path.n == n; });
        if (n == 0 || is_there) {
            return;
        }
        in.paths.push_back({of, n, make_input(ctx, GGML_TYPE_F32, n, 2 * n, "ancestors"),
                            make_input(ctx, GGML_TYPE_F32, n, 2 * n, "path_bias"),
                            make_input(ctx, GGML_TYPE_F32, n, n, "identity"),
                            make_input(ctx, GGML_TYPE_F32, recurrent.d_state, 2 * n, "unit")});
    };
    const std::vector<RecurrentRows> & all = live.shape.recurrent;
    for (size_t i = 0; i < all.size(); ++i) {
        in.conv_taps.push_back(nullptr);
        if (!all[i].by_paths) {
            continue;
        }
        if (all[i].verifies) {
            add(static_cast<int64_t>(i), all[i].n);
            in.conv_taps.back() =
                make_input(ctx, GGML_TYPE_I32, recurrent.d_conv * all[i].n, 1, "conv_taps");
        } else if (live.shape.kind == GraphKind::PROMOTE) {
            add(-1, all[i].n);
        } else {
            add(-1, std::min(all[i].n, PATH_CHUNK));
            add(-1, all[i].n % PATH_CHUNK);
        }
    }
}

std::vector<int32_t> convolution_taps(const std::vector<int32_t> & parents, int64_t d_conv) {
    const int64_t before = d_conv - 1;
    const auto n = static_cast<int64_t>(parents.size());
    std::vector<int32_t> taps(d_conv * n);
    for (int64_t tap = 0; tap <= before; ++tap) {
        for (int64_t i = 0; i < n; ++i) {
            int64_t row = before + i;
            for (int64_t step = tap; step < before; ++step) {
                row = row >= before ? before + parents[row - before] : row - 1;
            }
            taps[tap * n + i] = static_cast<int32_t>(row);
        }
    }
    return taps;
}

void write_path_inputs(const LiveGraph & live, const RecurrentShape & recurrent,
                       const std::vector<std::vector<int32_t>> & parents) {
    const GraphInputs & in = live.in;
    for (const PathInputs & path : in.paths) {
        const int64_t n = path.n;
        const auto above = [&](int64_t i) { return path.of < 0 ? i - 1 : parents[path.of][i]; };
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
    for (size_t i = 0; i < in.conv_taps.size(); ++i) {
        if (in.conv_taps[i] != nullptr) {
            const std::vector<int32_t> taps = convolution_taps(parents[i], recurrent.d_conv);
            live.write<int32_t>(in.conv_taps[i],
                                [&](int32_t * data) { std::copy(taps.begin(), taps.end(), data); });
        }
    }
}

} // namespace dfl
