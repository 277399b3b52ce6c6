// One pass of the target: which rows it has, what their inputs are, and running it.
#include "dflash.h"
#include "engine/sequence.h"
#include "error.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace dfl {

void Engine::check_verifies(const std::vector<Item> & items) const {
    int64_t n = 0, n_open = 0;
    for (const Item & item : items) {
        n += item.verifies ? item.n : 0;
    }
    for (const Sequence * sequence : sequences_) {
        n_open += sequence != nullptr ? sequence->open().n : 0;
    }
    DFL_CHECK(n + n_open <= verify_rows_ || n == 0, DFL_STATUS_ARGUMENT,
              "%lld rows to verify, there is room for %lld: reserve more, up to %lld", (long long)n,
              (long long)(verify_rows_ - n_open), (long long)MAX_VERIFY);
}

void Engine::check(const std::vector<Item> & items) const {
    DFL_CHECK(!items.empty(), DFL_STATUS_ARGUMENT, "there is nothing to run");
    int64_t n_appended = 0, n_wanted = 0;
    for (size_t i = 0; i < items.size(); ++i) {
        const Item & item = items[i];
        DFL_CHECK(&item.sequence->engine() == this, DFL_STATUS_ARGUMENT,
                  "item %zu is of a sequence of another engine", i);
        for (size_t j = 0; j < i; ++j) {
            DFL_CHECK(items[j].sequence != item.sequence, DFL_STATUS_ARGUMENT,
                      "items %zu and %zu are of one sequence", j, i);
        }
        item.sequence->check_no_open_verify();
        item.sequence->check_tokens(item.tokens, item.n);
        n_appended += item.verifies ? 0 : item.n;
        n_wanted += item.sequence->wanted_cells(item.n);
    }
    check_verifies(items);
    DFL_CHECK(items.size() == 1 || n_appended <= most_appended(), DFL_STATUS_ARGUMENT,
              "%lld tokens to append in one pass, which takes %lld (n_ubatch)",
              (long long)n_appended, (long long)most_appended());
    DFL_CHECK(n_wanted <= kv_.cells().n_unclaimed(), DFL_STATUS_ARGUMENT,
              "the pass needs %lld more cells, and %lld of %lld are free: other sequences hold the "
              "rest",
              (long long)n_wanted, (long long)kv_.cells().n_unclaimed(),
              (long long)kv_.cells().size());
}

void Engine::run(std::vector<Item> & items, const PrefillProgress & progress) {
    check(items);
    n_experts_ = 0;
    if (items.size() == 1 && !items[0].verifies) {
        append_in_steps(items[0], progress);
        return;
    }
    std::vector<int64_t> n_rows;
    for (const Item & item : items) {
        n_rows.push_back(item.n);
    }
    run_pass(items, std::vector<int64_t>(items.size(), 0), n_rows);
}

void Engine::append_in_steps(Item & item, const PrefillProgress & progress) {
    const int64_t n_vocab = model_->hparams().n_vocab;
    int64_t step = params_.n_ubatch;
    if (item.all_logits != nullptr) {
        // A row for every token of a large vocabulary would dwarf the rest of the arena.
        step = std::min(step, std::max<int64_t>(1, (int64_t(256) << 20) / (4 * n_vocab)));
    }
    for (int64_t n_done = 0; n_done < item.n;) {
        const int64_t n = std::min(step, item.n - n_done);
        run_pass({item}, {n_done}, {n});
        n_done += n;
        DFL_CHECK(!progress || !progress(n_done, item.n) || n_done == item.n, DFL_STATUS_CANCELLED,
                  "cancelled after %lld of %lld tokens", (long long)n_done, (long long)item.n);
    }
}

// Items in the order in which a pass has them: sequences that append one row by their slots, which
// is how their states lie, then pieces of prompts, then verifies.
static std::vector<size_t> in_order(const std::vector<Item> & items,
                                    const std::vector<int64_t> & n_rows) {
    std::vector<size_t> order(items.size());
    std::iota(order.begin(), order.end(), size_t(0));
    const auto key = [&](size_t i) {
        const int32_t kind = items[i].verifies ? 2 : n_rows[i] > 1 ? 1 : 0;
        return std::pair(kind, items[i].sequence->slot());
    };
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
    return order;
}

Pass Engine::plan(const std::vector<Item> & items, const std::vector<int64_t> & from,
                  const std::vector<int64_t> & n_rows) const {
    Pass pass;
    for (const size_t i : in_order(items, n_rows)) {
        const Item & of = items[i];
        PassItem item;
        item.sequence = of.sequence;
        item.verifies = of.verifies;
        item.first = pass.n_rows();
        item.n = n_rows[i];
        item.first_out = pass.n_out();
        item.reads_all = !of.verifies && of.all_logits != nullptr;
        const int32_t * tokens = of.tokens + from[i];
        const auto position = static_cast<int32_t>(of.sequence->position());
        if (of.verifies) {
            item.tree = Tree(tokens, of.parents, item.n);
        }
        for (int64_t row = 0; row < item.n; ++row) {
            pass.tokens.push_back(tokens[row]);
            const int64_t depth = of.verifies ? item.tree.depth(row) : row;
            pass.positions.push_back(position + static_cast<int32_t>(depth));
        }
        const int64_t n_left = of.n - from[i] - item.n;
        const bool ends = n_left == 0 && of.wants_row;
        item.n_out = of.verifies || item.reads_all ? item.n : ends ? 1 : 0;
        // Only what the drafter will still see after this prompt is worth injecting.
        item.injects =
            draft_ && !of.verifies && item.n > 1 && n_left + of.n_to_come < draft_->window();
        pass.items.push_back(std::move(item));
    }
    pass.n_real = pass.n_rows();
    const int64_t n_padded = this->n_padded(pass);
    if (n_padded > pass.n_real) {
        const int64_t first = pass.items.back().first;
        pass.tokens.resize(n_padded, pass.tokens[first]);
        pass.positions.resize(n_padded, pass.positions[first]);
    }
    return pass;
}

// Rows of the graph. Padding of a pass that appends writes what the row that it copies writes,
// where that one writes it; of a pass that verifies to a cell of its own.
int64_t Engine::n_padded(const Pass & pass) const {
    const std::vector<int64_t> pieces = pieces_of(pass);
    if (!pass.items.back().verifies) {
        if (std::any_of(pass.items.begin(), pass.items.end(),
                        [](const PassItem & item) { return item.reads_all; })) {
            return pass.n_real; // a row of logits is large
        }
        const int64_t n_single = static_cast<int64_t>(pass.items.size() - pieces.size());
        return std::min(most_appended(), sizes_.append_rows(n_single, pieces));
    }
    int64_t n_wanted = 0;
    for (const PassItem & item : pass.items) {
        const bool is_last = &item == &pass.items.back(); // padding needs a cell to write to
        n_wanted += item.sequence->wanted_cells(item.n + is_last);
    }
    if (n_wanted > kv_.cells().n_unclaimed()) {
        return pass.n_real;
    }
    if (!sizes_.are_few()) {
        return std::max(pass.n_real, sizes_.verify_rows(pass.n_real, model_->weights()));
    }
    if (pieces.empty()) {
        return sizes_.verify_rows(pass.n_real, model_->weights());
    }
    // Each for itself, as what is verified is of the same size most of the time.
    const int64_t n = std::accumulate(pieces.begin(), pieces.end(), int64_t(0));
    return n_beside(pieces) + sizes_.beside_rows(pass.n_real - n);
}

int64_t Engine::most_appended() const {
    return std::max<int64_t>(params_.n_ubatch, params_.n_parallel);
}

// Beside verifies one row that is appended is one, too: the last of a prompt.
std::vector<int64_t> Engine::pieces_of(const Pass & pass) const {
    const int64_t least = pass.items.back().verifies && sizes_.are_few() ? 1 : 2;
    std::vector<int64_t> pieces;
    for (const PassItem & item : pass.items) {
        if (!item.verifies && item.n >= least) {
            pieces.push_back(item.n);
        }
    }
    return pieces;
}

// Rows of a verify's graph that are there for pieces of prompts beside it.
int64_t Engine::n_beside(const std::vector<int64_t> & pieces) const {
    return std::min(most_appended(), sizes_.piece_rows(pieces));
}

void Engine::take_cells(Pass & pass) {
    const bool pads = pass.n_rows() > pass.n_real && pass.items.back().verifies;
    for (KvGroup & group : kv_.groups()) {
        CellTable & table = group.cells();
        std::vector<int64_t> all;
        for (PassItem & item : pass.items) {
            const bool is_padded = pads && &item == &pass.items.back();
            item.cells.push_back(table.take(item.sequence->slot(), item.n + is_padded));
            const std::vector<int64_t> & cells = item.cells.back();
            for (int64_t i = 0; i < item.n && !item.verifies; ++i) {
                table.place(cells[i], pass.positions[item.first + i]);
            }
            all.insert(all.end(), cells.begin(), cells.begin() + item.n);
        }
        const std::vector<int64_t> & last = pass.items.back().cells.back();
        all.resize(pass.n_rows(), pads ? last.back() : last.front());
        pass.cells.push_back(std::move(all));
    }
}

void Engine::take_feature_rows(Pass & pass) {
    if (!draft_) {
        return;
    }
    const auto goes_to_ring = [](const PassItem & item) { return item.verifies || item.n == 1; };
    int64_t n_to_ring = 0, n_injected = 0;
    for (const PassItem & item : pass.items) {
        n_to_ring += goes_to_ring(item) ? item.n : 0;
    }
    if (!draft_->ring_has_room(n_to_ring)) {
        draft_->flush(graphs_);
    }
    for (PassItem & item : pass.items) {
        if (goes_to_ring(item)) {
            item.feature_rows = draft_->take_ring_rows(item.n);
        } else if (item.injects) {
            item.feature_rows = draft_->prefill_rows(n_injected, item.n);
            n_injected += item.n;
        }
    }
}

// The first gap of n among ranges (first, size).
static int64_t first_gap(std::vector<std::pair<int64_t, int64_t>> taken, int64_t n, int64_t size) {
    std::sort(taken.begin(), taken.end());
    int64_t at = 0;
    for (const auto & [first, length] : taken) {
        if (first - at >= n) {
            break;
        }
        at = std::max(at, first + length);
    }
    DFL_CHECK(at + n <= size, DFL_STATUS_ARGUMENT,
              "no room for the trace of %lld rows among verifies that wait for their commit",
              (long long)n);
    return at;
}

void Engine::take_trace(Pass & pass) const {
    if (!recurs_) {
        return;
    }
    const int64_t before = model_->hparams().recurrent.d_conv - 1;
    std::vector<std::pair<int64_t, int64_t>> taken, taken_conv;
    const auto take = [&](const PassItem & item, int64_t n) {
        taken.push_back({item.trace.first, n});
        taken_conv.push_back({item.trace.first_conv, n + before});
    };
    for (const Sequence * sequence : sequences_) {
        if (sequence != nullptr && sequence->open().n > 0) {
            take(sequence->open(), sequence->open().n);
        }
    }
    const RecurrentPart & part = *recurrent_.parts().front();
    for (PassItem & item : pass.items) {
        if (item.verifies) {
            item.trace = {first_gap(taken, item.n, part.n_trace),
                          first_gap(taken_conv, item.n + before, part.n_conv_trace)};
            take(item, item.n);
        }
    }
}

void Engine::give_back(Pass & pass) {
    for (PassItem & item : pass.items) {
        for (size_t i = 0; i < item.cells.size(); ++i) {
            std::for_each(item.cells[i].rbegin(), item.cells[i].rend(),
                          [&](int64_t cell) { kv_.groups()[i].cells().release(cell); });
        }
        if (draft_) {
            draft_->give_ring_rows(item.feature_rows);
        }
    }
}

// Most cells that one of the last passes attended, of those that are in use.
void Engine::note_cells() {
    for (size_t i = 0; i < kv_.groups().size(); ++i) {
        const KvGroup & group = kv_.groups()[i];
        const bool has_masks = !group.masks().empty();
        const int64_t n = sizes_.cells(group.cells().high(), group.cells().size(), has_masks);
        const bool comes_and_goes = has_masks && sizes_.are_shared();
        n_kv_[i] = !group.has_layers() ? 0
                   : comes_and_goes
                       ? std::min(sizes_.shared_cells(recent_cells_[i](n)), group.cells().size())
                       : n;
    }
}

void Engine::lay_out(Pass & pass) {
    if (!recurs_) {
        return;
    }
    bool has_tree = false;
    for (const PassItem & item : pass.items) {
        WalkedRows rows = {
            item.sequence->slot(), item.first, item.n, item.verifies, item.trace, {}, {}};
        if (item.verifies && !item.tree.is_chain()) {
            has_tree = true;
            for (int64_t i = 0; i < item.n; ++i) {
                rows.parents.push_back(item.tree.parent(i));
            }
            if (walks_) {
                rows.taps = convolution_taps(rows.parents, model_->hparams().recurrent.d_conv);
            }
        }
        pass.walked.push_back(std::move(rows));
    }
    if (!walks_) {
        // Where both come, chains are verified as trees are, else each is a graph.
        const bool by_paths = recent_trees_(has_tree) > 0 && sizes_.are_shared();
        // Lanes run side by side, so that padding costs little of a short pass.
        const int64_t most = std::min(4 * pass.n_rows(), most_lane_rows());
        pass.lanes = lanes_of(pass.walked, sizes_,
                              {pass.n_rows(), most, params_.n_parallel, fused_, by_paths});
    }
}

BatchShape Engine::shape_of(const Pass & pass) const {
    BatchShape shape;
    const bool verifies = pass.items.back().verifies;
    shape.kind = verifies ? GraphKind::VERIFY : GraphKind::APPEND;
    shape.n_rows = pass.n_rows();
    shape.n_kv = n_kv_;
    shape.walks = walks_;
    bool reads_all = false;
    for (const PassItem & item : pass.items) {
        shape.taps = shape.taps || !item.feature_rows.empty();
        shape.n_inject += item.injects ? item.n : 0;
        reads_all = reads_all || item.reads_all;
    }
    const std::vector<int64_t> pieces = pieces_of(pass);
    if (draft_ && sizes_.are_few() && (shape.n_inject > 0 || verifies)) {
        shape.n_inject = n_beside(pieces);
    }
    // Rows that are padding have logits, too, where all have: then none need be picked.
    shape.n_out = pass.n_out();
    if (verifies && sizes_.are_few() && !pieces.empty()) {
        const int64_t n = std::min(sizes_.beside_rows(shape.n_out), shape.n_rows - 1);
        shape.n_out = std::max(n, shape.n_out);
    } else if (shape.n_out == pass.n_real) {
        shape.n_out = pass.n_rows();
    } else if (!reads_all && !verifies) {
        shape.n_out = std::min(sizes_.out_rows(shape.n_out), shape.n_rows - 1);
    }
    for (const Lanes & lanes : pass.lanes) {
        shape.recurrent.push_back(lanes.shape);
    }
    pick_top(shape, shape.n_out > 0 && !reads_all ? n_top_ : 0);
    return shape;
}

void Engine::set_inputs(LiveGraph & live, const Pass & pass) {
    const int64_t n = live.shape.n_rows;
    const GraphInputs & in = live.in;
    live.write<float>(in.embd, [&](float * data) { model_->embed(pass.tokens.data(), n, data); });
    if (in.per_layer != nullptr) {
        live.write<float>(in.per_layer, [&](float * data) {
            model_->embed_per_layer(pass.tokens.data(), n, data);
        });
    }
    if (in.positions != nullptr) {
        live.write<int32_t>(in.positions, [&](int32_t * data) {
            // M-RoPE: time, height and width are the position for text, the fourth is 0.
            for (int64_t i = 0; i < ggml_nelements(in.positions); ++i) {
                data[i] = i < 3 * n ? pass.positions[i % n] : 0;
            }
        });
    }
    std::vector<SequenceRows> sequences;
    for (const PassItem & item : pass.items) {
        sequences.push_back(
            {item.sequence->slot(), item.first, item.n, item.verifies ? &item.tree : nullptr});
    }
    for (size_t i = 0; i < kv_.groups().size(); ++i) {
        live.write<int64_t>(in.cells[i], [&](int64_t * data) {
            std::copy(pass.cells[i].begin(), pass.cells[i].end(), data);
        });
        kv_.groups()[i].set_rows({pass.positions, pass.cells[i], sequences}, live.shape.n_kv[i]);
    }
    if (in.out_rows != nullptr) {
        live.write<int32_t>(in.out_rows, [&](int32_t * data) {
            for (const PassItem & item : pass.items) {
                for (int64_t i = item.n - item.n_out; i < item.n; ++i) {
                    *data++ = static_cast<int32_t>(item.first + i);
                }
            }
            std::fill_n(data, live.shape.n_out - pass.n_out(), 0); // nobody reads these
        });
    }
    if (live.draft.feature_rows != nullptr) {
        live.write<int64_t>(live.draft.feature_rows, [&](int64_t * data) {
            std::fill_n(data, n, draft_->junk_row());
            for (const PassItem & item : pass.items) {
                std::copy(item.feature_rows.begin(), item.feature_rows.end(), data + item.first);
            }
        });
    }
    recurrent_.walked = pass.walked;
    if (recurs_ && !walks_) {
        write_lane_inputs(live, recurrent_, model_->hparams().recurrent, pass.lanes, pass.walked);
    }
    if (live.shape.n_inject > 0) {
        std::vector<InjectedRows> injected;
        for (const PassItem & item : pass.items) {
            if (item.injects) {
                injected.push_back({item.sequence->slot(), pass.positions[item.first], item.n});
            }
        }
        draft_->set_prefill_injection(live, injected);
    }
}

LiveGraph & Engine::compute(Pass & pass) {
    forget_rows();
    try {
        take_feature_rows(pass);
        take_cells(pass);
        take_trace(pass);
        lay_out(pass);
        note_cells();
        const BatchShape shape = shape_of(pass);
        LiveGraph & live = graphs_.get(shape, [&](LiveGraph & fresh) { build_forward(fresh); });
        set_inputs(live, pass);
        pass.began = true;
        ++n_passes_;
        graphs_.compute(live);
        n_experts_ += live.cpu_nodes.n_experts();
        return live;
    } catch (...) {
        give_back(pass);
        throw;
    }
}

void Engine::run_pass(const std::vector<Item> & items, const std::vector<int64_t> & from,
                      const std::vector<int64_t> & n_rows) {
    Pass pass = plan(items, from, n_rows);
    LiveGraph * live = nullptr;
    try {
        live = &compute(pass);
    } catch (...) {
        for (const PassItem & item : pass.items) {
            item.sequence->failed(item, pass.began);
        }
        throw;
    }
    for (PassItem & item : pass.items) {
        if (item.verifies) {
            item.finite = finite_rows(*live, item.first_out, item.n);
            Sequence & sequence = *item.sequence;
            sequence.verified(std::move(item), *live);
        } else {
            item.sequence->appended(item, pass.tokens.data() + item.first, *live);
        }
    }
    const int64_t n_vocab = model_->hparams().n_vocab;
    for (const PassItem & item : pass.items) {
        if (!item.reads_all) {
            continue;
        }
        const auto of = std::find_if(items.begin(), items.end(), [&](const Item & asked) {
            return asked.sequence == item.sequence;
        });
        const int64_t done = from[of - items.begin()];
        float * to = of->all_logits + done * n_vocab;
        const size_t row_size = n_vocab * sizeof(float);
        devices_.main().read(live->logits, to, item.first_out * row_size, item.n * row_size);
        for (int64_t row = 0; row < item.n; ++row) {
            item.sequence->note_row(done + row, all_finite(to + row * n_vocab, n_vocab));
        }
    }
}

std::vector<bool> Engine::finite_rows(LiveGraph & live, int64_t first, int64_t n) const {
    const int64_t n_vocab = model_->hparams().n_vocab;
    const bool is_host = live.argmax == nullptr;
    if (!is_host && live.firsts.empty()) {
        live.firsts.resize(live.logits->ne[1]);
        ggml_backend_tensor_get_2d(live.logits, live.firsts.data(), 0, sizeof(float),
                                   live.firsts.size(), live.logits->nb[1], sizeof(float));
    }
    std::vector<bool> finite;
    for (int64_t row = first; row < first + n; ++row) {
        const float value = is_host ? static_cast<const float *>(live.logits->data)[row * n_vocab]
                                    : live.firsts[row];
        finite.push_back(value < INFINITY);
    }
    return finite;
}

} // namespace dfl
