// The steps of a speculative round without the verify: draft, sample and commit.
#include "engine/sequence.h"
#include "error.h"
#include "graph/recurrent_batch.h"
#include "layers/cpu_ops/scan_delta_net.h"
#include "layers/delta_net.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace dfl {

DraftModel & Engine::drafter_at(int64_t index) {
    DFL_CHECK(!drafts_.empty(), DFL_STATUS_ARGUMENT, "the engine has no drafter");
    DFL_CHECK(index >= 0 && index < static_cast<int64_t>(drafts_.size()), DFL_STATUS_ARGUMENT,
              "drafter index %lld is out of range, the engine has %zu drafters", (long long)index,
              drafts_.size());
    return *drafts_[index];
}

Draft Engine::draft(int64_t index, const std::vector<DraftRequest> & requests, int64_t k) {
    DFL_CHECK(!requests.empty(), DFL_STATUS_ARGUMENT,
              "there are no draft requests, at least one is needed");
    DraftModel & model = drafter_at(index);
    const Drafter & drafter = model.drafter();
    const int64_t n_choices = drafter.head(*model_).n_out();
    int64_t n_rows = 0;
    std::vector<DraftBlock> blocks;
    check_sequences("requests", requests);
    for (const auto & [sequence, last_token, n_draft, sampler] : requests) {
        sequence->check_no_pending_verify();
        const int64_t max_draft = drafter.max_block() - 1, position = sequence->position();
        DFL_CHECK(n_draft >= 1 && n_draft <= max_draft, DFL_STATUS_ARGUMENT,
                  "n_draft is %lld, this drafter drafts 1 to %lld tokens", (long long)n_draft,
                  (long long)max_draft);
        DFL_CHECK(k >= 1 && k <= n_choices, DFL_STATUS_ARGUMENT,
                  "k is %lld candidates, expected 1 to %lld", (long long)k, (long long)n_choices);
        check_ids(&last_token, 1, position);
        DFL_CHECK(n_draft < n_ctx() - position, DFL_STATUS_ARGUMENT,
                  "%lld drafted tokens and last_token after %lld tokens do not fit into a context "
                  "of %lld",
                  (long long)n_draft, (long long)position, (long long)n_ctx());
        n_rows += n_draft + 1;
        blocks.push_back(
            {sequence->slot(), last_token, static_cast<int32_t>(position), n_draft, sampler});
    }
    DFL_CHECK(n_rows <= verify_rows_, DFL_STATUS_ARGUMENT,
              "the drafts have %lld rows in one pass, the limit is %lld", (long long)n_rows,
              (long long)verify_rows_);
    forget_rows();
    Draft draft = model.draft(blocks, k);
    int64_t row = 0;
    for (const DraftBlock & block : blocks) {
        bool is_finite = true;
        const auto sums = draft.log_sum_exp.begin() + row;
        for (const int64_t end = row + block.n_draft; row < end; ++row) {
            is_finite = is_finite && std::isfinite(draft.log_sum_exp[row]);
            for (int64_t i = row * k; i < (row + 1) * k; ++i) {
                is_finite = is_finite && std::isfinite(draft.best[i].logit);
                draft.best[i].token = drafter.token(draft.best[i].token);
            }
        }
        if (!is_finite) { // drops the drafter's K/V, which may hold NaN too
            model.clear(block.sequence);
            std::fill_n(sums, block.n_draft, NAN);
        }
    }
    return draft;
}

static void sample_path(SampleRequest & request, int64_t mask_words) {
    const Tree & tree = request.sequence->pending_verify().tree;
    int64_t node = 0;
    while (node >= 0) {
        int32_t token = 0;
        const TokenHistory history = {request.history.data(),
                                      static_cast<int64_t>(request.history.size())};
        const uint32_t * mask =
            request.masks != nullptr ? request.masks + node * mask_words : nullptr;
        if (!request.sequence->sample(node, *request.sampler, history, request.position, mask,
                                      token)) {
            return;
        }
        request.sampled.push_back(token);
        request.history.push_back(token);
        ++request.position;
        node = tree.child(node, token);
    }
}

void Engine::sample(std::vector<SampleRequest> & requests) {
    check_sequences("sample requests", requests);
    for (const SampleRequest & request : requests) {
        DFL_CHECK(request.sequence->n_out_rows() > 0, DFL_STATUS_ARGUMENT,
                  "there are no logits to sample from: the last pass had no row of the sequence");
    }
    for (SampleRequest & request : requests) {
        sample_path(request, mask_words());
    }
}

static std::vector<int32_t> nodes_of(const Path & path) {
    std::vector<int32_t> nodes(path.n);
    if (path.nodes != nullptr) {
        nodes.assign(path.nodes, path.nodes + path.n);
    } else {
        std::iota(nodes.begin(), nodes.end(), 0);
    }
    return nodes;
}

void Engine::commit(const std::vector<Path> & paths) {
    check_sequences("paths", paths);
    bool promotes = false;
    for (const Path & of : paths) {
        const auto & [sequence, nodes, n] = of;
        const PassEntry & pending = sequence->pending_verify();
        DFL_CHECK(n >= 0 && n <= pending.n, DFL_STATUS_ARGUMENT,
                  nodes == nullptr ? "%lld rows are to be committed, the pending verify has %lld"
                                   : "the path has %lld nodes, the pending verify has %lld",
                  (long long)n, (long long)pending.n);
        const std::vector<int32_t> path = nodes_of(of);
        pending.tree.check_path(path.data(), n);
        for (const int32_t node : path) {
            sequence->check_finite(node, pending.finite[node]);
        }
        promotes = promotes || (n > 0 && is_recurrent_);
    }
    if (promotes) {
        forget_rows(); // the promotion overwrites the arena, which holds readable logits
        try {
            promote_paths(paths);
        } catch (...) { // after an error the states of some layers may have advanced
            for (const Path & path : paths) {
                if (path.n > 0) {
                    path.sequence->reset();
                }
            }
            throw;
        }
    }
    for (const Path & path : paths) {
        path.sequence->accept(nodes_of(path).data(), path.n);
    }
}

void Engine::promote_paths(const std::vector<Path> & paths) {
    recurrent_.accepted.clear();
    int64_t max_steps = 0;
    for (const Path & path : paths) {
        if (path.n == 0) {
            continue;
        }
        const PassEntry & pending = path.sequence->pending_verify();
        const std::vector<int32_t> nodes = nodes_of(path);
        AcceptedPath accepted = {path.sequence->slot(), nodes, last_inputs(pending, nodes, path.n)};
        for (int32_t & node : accepted.nodes) {
            node += static_cast<int32_t>(pending.updates.first);
        }
        max_steps = std::max(max_steps, path.n);
        recurrent_.accepted.push_back(std::move(accepted));
    }
    if (scans_) {
        graphs_.compute(scan_promote_graph());
        return;
    }
    for (int64_t first = 0; first < max_steps; first += MAX_STEPS) {
        promote_steps(recurrent_.accepted, first);
    }
}

std::vector<int32_t> Engine::last_inputs(const PassEntry & pending,
                                         const std::vector<int32_t> & path, int64_t n) const {
    const int64_t before = model_->hparams().recurrent.d_conv - 1;
    std::vector<int32_t> rows;
    for (int64_t at = n; at < n + before; ++at) {
        // conv_updates holds the d_conv - 1 inputs before the verify, then those of its nodes.
        const int64_t row = at < before ? at : before + path[at - before];
        rows.push_back(static_cast<int32_t>(pending.updates.first_conv + row));
    }
    return rows;
}

CachedGraph & Engine::scan_promote_graph() {
    BatchShape shape;
    shape.kind = GraphKind::PROMOTE;
    shape.scans = true;
    return graphs_.get(shape, [&](CachedGraph & fresh) {
        GraphContext g = {fresh.ctx.get(),   fresh.graph, fresh.cpu_nodes, model_->hparams(),
                          model_->weights(), kv_,         recurrent_,      shape,
                          fresh.in};
        for (const auto & part : recurrent_.parts()) {
            scan_promote(g, *part);
        }
    });
}

CachedGraph & Engine::promote_graph(int64_t n_steps, int64_t n_lanes, bool in_place) {
    const int64_t before = model_->hparams().recurrent.d_conv - 1;
    const bool is_alone = params_.n_parallel == 1 && fused_; // promotes all layers in one operation
    const int64_t n_layers = is_alone ? model_->hparams().n_recurrent() : 1;
    BatchShape shape;
    shape.kind = GraphKind::PROMOTE;
    shape.n_rows = n_steps;
    shape.recurrent = {{n_steps, n_lanes, false, !fused_, in_place, false}};
    return graphs_.get(shape, [&](CachedGraph & fresh) {
        ggml_context * ctx = fresh.ctx.get();
        PromoteInputs & in = fresh.promote;
        in.path = make_input(ctx, GGML_TYPE_I32, n_steps * n_lanes, n_layers, "path");
        in.conv_rows = make_input(ctx, GGML_TYPE_I32, before * n_lanes, n_layers, "conv_rows");
        in.to_slots = is_alone ? nullptr : make_input(ctx, GGML_TYPE_I64, n_lanes, 1, "to_slots");
        in.counts = make_input(ctx, GGML_TYPE_I32, n_lanes, 1, "counts");
        make_recurrent_inputs(fresh, model_->hparams().recurrent);
        GraphContext g = {ctx, fresh.graph, fresh.cpu_nodes, model_->hparams(), model_->weights(),
                          kv_, recurrent_,  shape,           fresh.in};
        for (const auto & part : recurrent_.parts()) {
            promote(g, *part, in);
        }
    });
}

void Engine::promote_steps(const std::vector<AcceptedPath> & paths, int64_t first) {
    std::vector<const AcceptedPath *> active;
    int64_t max_steps = 0, end = 0;
    for (const AcceptedPath & path : paths) {
        const int64_t n = std::min(static_cast<int64_t>(path.nodes.size()) - first, MAX_STEPS);
        if (n > 0) {
            active.push_back(&path);
            max_steps = std::max(max_steps, n);
            end = std::max<int64_t>(end, path.sequence + 1);
        }
    }
    const auto n = static_cast<int64_t>(active.size());
    end = sizes_.lanes(end);
    // Gathering states moves three times as many bytes as promoting them in place.
    const bool in_place = 3 * n >= end;
    const int64_t n_lanes = in_place ? end : sizes_.lanes(n);
    CachedGraph & cached = promote_graph(sizes_.promote_steps(max_steps), n_lanes, in_place);
    // Accepted path of each lane; NULL marks a lane whose state does not change.
    std::vector<const AcceptedPath *> lanes(n_lanes, in_place ? nullptr : active.front());
    for (int64_t i = 0; i < n; ++i) {
        lanes[in_place ? active[i]->sequence : i] = active[i];
    }
    const auto zero_row = static_cast<int32_t>(recurrent_.parts().front()->zero_row());
    cached.write<int32_t>(cached.promote.path, [&](int32_t * data) {
        for (int64_t i = 0; i < ggml_nelements(cached.promote.path); ++i) {
            const AcceptedPath * path = lanes[i / cached.shape.n_rows % n_lanes];
            const auto step = static_cast<size_t>(first + i % cached.shape.n_rows);
            data[i] = path != nullptr && step < path->nodes.size() ? path->nodes[step] : zero_row;
        }
    });
    // Lanes without a path write the first path's convolution inputs to its slot a second time.
    const auto source = [&](int64_t lane) -> const AcceptedPath & {
        return lanes[lane] != nullptr ? *lanes[lane] : *active.front();
    };
    cached.write<int32_t>(cached.promote.conv_rows, [&](int32_t * data) {
        const auto before = static_cast<int64_t>(active.front()->conv.size());
        for (int64_t i = 0; i < ggml_nelements(cached.promote.conv_rows); ++i) {
            data[i] = source(i / before % n_lanes).conv[i % before];
        }
    });
    cached.write<int32_t>(cached.promote.counts, [&](int32_t * data) {
        for (int64_t lane = 0; lane < n_lanes; ++lane) {
            // Length 0 for a lane that repeats another lane's sequence: its state advances once.
            const bool is_idle = lanes[lane] == nullptr || (!in_place && lane >= n);
            const int64_t left = is_idle ? 0 : static_cast<int64_t>(lanes[lane]->nodes.size());
            data[lane] = static_cast<int32_t>(std::clamp<int64_t>(left - first, 0, MAX_STEPS));
        }
    });
    const auto write_slots = [&](ggml_tensor * input, auto * type) {
        using T = std::remove_pointer_t<decltype(type)>;
        if (input != nullptr) {
            cached.write<T>(input, [&](T * data) {
                for (int64_t lane = 0; lane < n_lanes; ++lane) {
                    data[lane] = source(lane).sequence;
                }
            });
        }
    };
    write_slots(cached.promote.to_slots, static_cast<int64_t *>(nullptr));
    write_slots(cached.in.recurrent[0].slots, static_cast<int32_t *>(nullptr));
    write_slots(cached.in.recurrent[0].to_slots, static_cast<int64_t *>(nullptr));
    write_tree_inputs(cached, model_->hparams().recurrent, {}, {});
    graphs_.compute(cached);
}

} // namespace dfl
