// One pass of the target: which rows it has, what their inputs are, and running it.
#include "engine/sequence.h"
#include "graph/path_inputs.h"

#include <algorithm>
#include <numeric>

namespace dfl {

Pass Sequence::plan_append(const int32_t * tokens, int64_t n) const {
    Pass pass;
    pass.n = n;
    pass.tokens.assign(tokens, tokens + n);
    pass.positions.resize(n);
    std::iota(pass.positions.begin(), pass.positions.end(), static_cast<int32_t>(position()));
    return pass;
}

Pass Sequence::plan_verify(const Tree & tree) const {
    Pass pass;
    pass.kind = GraphKind::VERIFY;
    pass.tree = tree;
    pass.n = tree.size();
    for (int64_t i = 0; i < pass.n; ++i) {
        pass.tokens.push_back(tree.token(i));
        pass.positions.push_back(static_cast<int32_t>(position()) + tree.depth(i));
    }
    if (kv_.cells().n_free() > pass.n) { // padding needs a cell to write to
        const int64_t n_rows = engine_->padded_verify(pass.n);
        pass.tokens.resize(n_rows, tree.token(0));
        pass.positions.resize(n_rows, static_cast<int32_t>(position()));
    }
    return pass;
}

void Engine::set_inputs(LiveGraph & live, const Pass & pass) {
    const int64_t n = live.shape.n_rows;
    const GraphInputs & in = live.in;
    live.write<float>(in.embd, [&](float * data) { model_->embed(pass.tokens.data(), n, data); });
    if (in.positions != nullptr) {
        live.write<int32_t>(in.positions, [&](int32_t * data) {
            // M-RoPE: time, height and width are the position for text, the fourth is 0.
            for (int64_t i = 0; i < ggml_nelements(in.positions); ++i) {
                data[i] = i < 3 * n ? pass.positions[i % n] : 0;
            }
        });
        live.write<int64_t>(in.cells, [&](int64_t * data) {
            std::copy(pass.cells.begin(), pass.cells.end(), data);
        });
    }
    const bool verifies = pass.kind == GraphKind::VERIFY;
    kv_.set_rows({pass.positions, pass.cells, verifies ? &pass.tree : nullptr}, live.shape.n_kv);
    if (in.out_rows != nullptr) {
        live.write<int32_t>(in.out_rows,
                            [&](int32_t * data) { data[0] = static_cast<int32_t>(n - 1); });
    }
    if (live.draft.feature_rows != nullptr) {
        live.write<int64_t>(live.draft.feature_rows, [&](int64_t * data) {
            std::copy(pass.feature_rows.begin(), pass.feature_rows.end(), data);
        });
    }
    if (live.shape.by_paths) {
        std::vector<int32_t> parents; // none: rows of an APPEND follow each other
        for (int64_t i = 0; i < pass.n_rows() && verifies; ++i) {
            parents.push_back(i < pass.n ? pass.tree.parent(i) : -1);
        }
        write_path_inputs(live, model_->hparams().recurrent, parents);
    }
    if (live.shape.n_inject > 0) {
        draft_->set_prefill_injection(live, pass.positions[0]);
    }
}

void Engine::take_cells(Pass & pass) {
    CellTable & table = kv_.cells();
    const bool padding = pass.n_rows() > pass.n;
    pass.cells = table.find_free(pass.n + padding);
    for (int64_t i = 0; i < pass.n; ++i) {
        table.own(pass.cells[i], pass.kind == GraphKind::VERIFY ? OPEN_VERIFY : SEQUENCE,
                  pass.positions[i]);
    }
    pass.cells.resize(pass.n_rows(), pass.cells.back());
}

void Engine::take_feature_rows(Pass & pass, bool inject) {
    if (inject) {
        pass.feature_rows = draft_->prefill_rows(pass.n);
        return;
    }
    if (!draft_->ring_has_room(pass.n)) {
        draft_->flush(graphs_);
    }
    pass.feature_rows = draft_->ring_rows(pass.n);
    pass.feature_rows.resize(pass.n_rows(), draft_->junk_row());
}

LiveGraph & Engine::run(Pass & pass, int64_t n_out, bool inject) {
    const bool verifies = pass.kind == GraphKind::VERIFY;
    const bool to_ring = draft_ && (verifies || pass.n == 1);
    if (to_ring || inject) {
        take_feature_rows(pass, !to_ring);
    }
    take_cells(pass);
    try {
        BatchShape shape;
        shape.kind = pass.kind;
        shape.n_rows = pass.n_rows();
        shape.first_seq = SEQUENCE;
        shape.n_kv = sizes_.cells(kv_.cells().high(), kv_.cells().size());
        shape.n_out = n_out;
        shape.walks = walks_;
        shape.by_paths = recurs_ && !(fused_ && pass.tree.is_chain());
        shape.n_inject = !to_ring && inject ? pass.n : 0;
        pick_top(shape, verifies || n_out == 1 ? n_top_ : 0); // else the caller wants all logits
        LiveGraph & live = graphs_.get(
            shape, [&](LiveGraph & fresh) { build_forward(fresh, !pass.feature_rows.empty()); });
        set_inputs(live, pass);
        pass.began = true;
        ++n_passes_;
        graphs_.compute(live);
        return live;
    } catch (...) {
        for (const int64_t cell : pass.cells) {
            kv_.cells().release(cell);
        }
        throw;
    }
}

LiveGraph & Sequence::run(Pass & pass, int64_t n_out, bool inject) {
    last_ = nullptr;
    try {
        return engine_->run(pass, n_out, inject);
    } catch (...) {
        if (pass.began && pass.kind == GraphKind::APPEND && engine_->recurs()) {
            reset(); // a pass that died half way has advanced some layers' states
        } else if (draft_) {
            draft_->truncate(static_cast<int32_t>(position()));
        }
        throw;
    }
}

} // namespace dfl
