// Plans and runs a pass of the target: its rows, their K/V cells and the inputs of its graph.
#include "dflash.h"
#include "engine/sequence.h"
#include "error.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace dfl {

void Engine::check_verifies(const std::vector<BatchEntry> & entries) const {
    int64_t n = 0, n_pending = 0;
    for (const BatchEntry & entry : entries) {
        n += entry.is_verify ? entry.n : 0;
    }
    for (const Sequence * sequence : sequences_) {
        n_pending += sequence != nullptr ? sequence->pending_verify().n : 0;
    }
    DFL_CHECK(n + n_pending <= verify_rows_ || n == 0, DFL_STATUS_ARGUMENT,
              "%lld rows are to be verified, memory is reserved for %lld: reserve more, up to %lld",
              (long long)n, (long long)(verify_rows_ - n_pending), (long long)MAX_VERIFY);
}

void Engine::check(const std::vector<BatchEntry> & entries) const {
    DFL_CHECK(!entries.empty(), DFL_STATUS_ARGUMENT,
              "the batch is empty, it must have at least one entry");
    check_sequences("entries", entries);
    int64_t n_appended = 0, n_needed = 0;
    for (const BatchEntry & entry : entries) {
        entry.sequence->check_no_pending_verify();
        check_ids(entry.tokens, entry.n, entry.sequence->position());
        DFL_CHECK(entry.all_features == nullptr || !params_.taps.empty(), DFL_STATUS_ARGUMENT,
                  "features are asked for, and the engine was created without taps");
        n_appended += entry.is_verify ? 0 : entry.n;
        n_needed += entry.sequence->cells_needed(entry.n);
    }
    check_verifies(entries);
    DFL_CHECK(entries.size() == 1 || n_appended <= max_appended(), DFL_STATUS_ARGUMENT,
              "the pass appends %lld tokens, the limit is %lld (n_ubatch)", (long long)n_appended,
              (long long)max_appended());
    DFL_CHECK(
        n_needed <= kv_.cells().n_unclaimed(), DFL_STATUS_ARGUMENT,
        "the pass needs %lld more K/V cells, and %lld of %lld are free: other sequences hold the "
        "rest",
        (long long)n_needed, (long long)kv_.cells().n_unclaimed(), (long long)kv_.cells().size());
}

void Engine::run(const std::vector<BatchEntry> & entries, const PrefillProgress & progress) {
    check(entries);
    if (entries.size() == 1 && !entries[0].is_verify) {
        append_in_microbatches(entries[0], progress);
        return;
    }
    std::vector<int64_t> n_rows;
    for (const BatchEntry & entry : entries) {
        n_rows.push_back(entry.n);
    }
    run_pass(entries, std::vector<int64_t>(entries.size(), 0), n_rows);
}

void Engine::append_in_microbatches(const BatchEntry & entry, const PrefillProgress & progress) {
    const int64_t n_vocab = model_->hparams().n_vocab;
    int64_t step = params_.n_ubatch;
    if (entry.all_logits != nullptr) {
        // Limits the logits of a micro-batch to 256 MiB of the arena.
        step = std::min(step, std::max<int64_t>(1, (int64_t(256) << 20) / (4 * n_vocab)));
    }
    for (int64_t n_done = 0; n_done < entry.n;) {
        const int64_t n = std::min(step, entry.n - n_done);
        run_pass({entry}, {n_done}, {n});
        entry.sequence->check_append();
        n_done += n;
        DFL_CHECK(!progress || !progress(n_done, entry.n) || n_done == entry.n,
                  DFL_STATUS_CANCELLED, "cancelled after %lld of %lld tokens", (long long)n_done,
                  (long long)entry.n);
    }
}

// Returns the order of the entries in a pass: appends of one row, prompt chunks, then verifies.
// Slot order within each kind is the memory order of recurrent states.
static std::vector<size_t> in_order(const std::vector<BatchEntry> & entries,
                                    const std::vector<int64_t> & n_rows) {
    std::vector<size_t> order(entries.size());
    std::iota(order.begin(), order.end(), size_t(0));
    const auto key = [&](size_t i) {
        const int32_t kind = entries[i].is_verify ? 2 : n_rows[i] > 1 ? 1 : 0;
        return std::pair(kind, entries[i].sequence->slot());
    };
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
    return order;
}

Pass Engine::plan(const std::vector<BatchEntry> & entries, const std::vector<int64_t> & from,
                  const std::vector<int64_t> & n_rows) const {
    Pass pass;
    for (const size_t i : in_order(entries, n_rows)) {
        const BatchEntry & of = entries[i];
        PassEntry entry;
        entry.sequence = of.sequence;
        entry.is_verify = of.is_verify;
        entry.first = pass.n_rows();
        entry.n = n_rows[i];
        entry.first_out = pass.n_out();
        entry.reads_all_logits = !of.is_verify && of.all_logits != nullptr;
        const int32_t * tokens = of.tokens + from[i];
        const auto position = static_cast<int32_t>(of.sequence->position());
        if (of.is_verify) {
            entry.tree = Tree(tokens, of.parents, entry.n);
        }
        for (int64_t row = 0; row < entry.n; ++row) {
            pass.tokens.push_back(tokens[row]);
            const int64_t depth = of.is_verify ? entry.tree.depth(row) : row;
            pass.positions.push_back(position + static_cast<int32_t>(depth));
        }
        const int64_t n_left = of.n - from[i] - entry.n;
        const bool ends = n_left + of.n_remaining == 0;
        entry.n_out = of.is_verify || entry.reads_all_logits ? entry.n : ends ? 1 : 0;
        // Rows that no drafter attends to when the prompt ends need no features.
        entry.is_tapped = std::any_of(drafts_.begin(), drafts_.end(), [&](const auto & draft) {
            return n_left + of.n_remaining < draft->prompt_window();
        });
        entry.is_tapped = entry.is_tapped || (of.all_features != nullptr && !of.is_verify);
        pass.entries.push_back(std::move(entry));
    }
    pass.n_real = pass.n_rows();
    const int64_t n_padded = this->n_padded(pass);
    if (n_padded > pass.n_real) {
        const int64_t first = pass.entries.back().first;
        pass.tokens.resize(n_padded, pass.tokens[first]);
        pass.positions.resize(n_padded, pass.positions[first]);
    }
    return pass;
}

// Returns the rows of the graph, padding included. Padding of an append writes the same values to
// the same cell as the row that it copies; padding of a verify writes to a cell of its own.
int64_t Engine::n_padded(const Pass & pass) const {
    const std::vector<int64_t> chunks = chunks_of(pass);
    if (!pass.entries.back().is_verify) {
        if (std::any_of(pass.entries.begin(), pass.entries.end(),
                        [](const PassEntry & entry) { return entry.reads_all_logits; })) {
            return pass.n_real; // no padding: each row adds logits, which are large
        }
        const int64_t n_single = static_cast<int64_t>(pass.entries.size() - chunks.size());
        return std::min(max_appended(), sizes_.append_rows(n_single, chunks));
    }
    int64_t n_needed = 0;
    for (const PassEntry & entry : pass.entries) {
        const bool is_last = &entry == &pass.entries.back();
        n_needed += entry.sequence->cells_needed(entry.n + is_last);
    }
    if (n_needed > kv_.cells().n_unclaimed()) {
        return pass.n_real;
    }
    if (!sizes_.uses_few_sizes()) {
        return std::max(pass.n_real, sizes_.verify_rows(pass.n_real, model_->weights()));
    }
    if (chunks.empty()) {
        return sizes_.verify_rows(pass.n_real, model_->weights());
    }
    // Pads chunks and verifies separately, since the number of verified rows seldom changes.
    const int64_t n = std::accumulate(chunks.begin(), chunks.end(), int64_t(0));
    return std::min(max_appended(), sizes_.chunk_rows(chunks)) +
           sizes_.mixed_verify_rows(pass.n_real - n);
}

int64_t Engine::max_appended() const {
    return std::max<int64_t>(params_.n_ubatch, params_.n_parallel);
}

// Returns the lengths of prompt chunks. In a pass with verifies a single appended row is a chunk.
std::vector<int64_t> Engine::chunks_of(const Pass & pass) const {
    const int64_t min_rows = pass.entries.back().is_verify && sizes_.uses_few_sizes() ? 1 : 2;
    std::vector<int64_t> chunks;
    for (const PassEntry & entry : pass.entries) {
        if (!entry.is_verify && entry.n >= min_rows) {
            chunks.push_back(entry.n);
        }
    }
    return chunks;
}

void Engine::take_cells(Pass & pass) {
    const bool pads = pass.n_rows() > pass.n_real && pass.entries.back().is_verify;
    for (KvGroup & group : kv_.groups()) {
        CellTable & table = group.cells();
        std::vector<int64_t> all;
        for (PassEntry & entry : pass.entries) {
            const bool is_padded = pads && &entry == &pass.entries.back();
            entry.cells.push_back(table.take(entry.sequence->slot(), entry.n + is_padded));
            const std::vector<int64_t> & cells = entry.cells.back();
            for (int64_t i = 0; i < entry.n && !entry.is_verify; ++i) {
                table.place(cells[i], pass.positions[entry.first + i]);
            }
            all.insert(all.end(), cells.begin(), cells.begin() + entry.n);
        }
        const std::vector<int64_t> & last = pass.entries.back().cells.back();
        all.resize(pass.n_rows(), pads ? last.back() : last.front());
        pass.cells.push_back(std::move(all));
    }
}

std::vector<int64_t> Engine::free_ring_rows(size_t n) const {
    std::vector<bool> is_taken(ring_->n_rows());
    for (const auto & draft : drafts_) {
        for (const Feature & feature : draft->pending()) {
            is_taken[feature.row] = true;
        }
    }
    for (const Sequence * sequence : sequences_) {
        if (sequence != nullptr) {
            for (const int64_t row : sequence->pending_verify().feature_rows) {
                is_taken[row] = true;
            }
        }
    }
    std::vector<int64_t> rows;
    for (int64_t row = 0; row < ring_->n_rows() && rows.size() < n; ++row) {
        if (!is_taken[row]) {
            rows.push_back(row);
        }
    }
    return rows;
}

void Engine::take_feature_rows(Pass & pass) {
    size_t n = 0;
    for (const PassEntry & entry : pass.entries) {
        n += entry.is_tapped ? entry.n : 0;
    }
    if (n == 0) {
        return;
    }
    std::vector<int64_t> rows = free_ring_rows(n);
    if (rows.size() < n) {
        for (const auto & draft : drafts_) {
            draft->catch_up();
        }
        rows = free_ring_rows(n);
    }
    auto next = rows.begin();
    for (PassEntry & entry : pass.entries) {
        if (entry.is_tapped) {
            entry.feature_rows.assign(next, next + entry.n);
            next += entry.n;
        }
    }
}

// Returns the first of n adjacent free rows of node_updates or conv_updates. taken: ranges (first
// row, number of rows) that pending verifies occupy.
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
              "the node updates of %lld rows do not fit beside verifies that wait for their commit",
              (long long)n);
    return at;
}

void Engine::take_update_rows(Pass & pass) const {
    if (!is_recurrent_) {
        return;
    }
    const int64_t before = model_->hparams().recurrent.d_conv - 1;
    std::vector<std::pair<int64_t, int64_t>> taken, taken_conv;
    const auto take = [&](const PassEntry & entry, int64_t n) {
        taken.push_back({entry.updates.first, n});
        taken_conv.push_back({entry.updates.first_conv, n + before});
    };
    for (const Sequence * sequence : sequences_) {
        if (sequence != nullptr && sequence->pending_verify().n > 0) {
            take(sequence->pending_verify(), sequence->pending_verify().n);
        }
    }
    const RecurrentPart & part = *recurrent_.parts().front();
    for (PassEntry & entry : pass.entries) {
        if (entry.is_verify) {
            entry.updates = {first_gap(taken, entry.n, part.n_update_rows),
                             first_gap(taken_conv, entry.n + before, part.n_conv_update_rows)};
            take(entry, entry.n);
        }
    }
}

void Engine::release(Pass & pass) {
    for (PassEntry & entry : pass.entries) {
        for (size_t i = 0; i < entry.cells.size(); ++i) {
            std::for_each(entry.cells[i].rbegin(), entry.cells[i].rend(),
                          [&](int64_t cell) { kv_.groups()[i].cells().release(cell); });
        }
    }
}

void Engine::update_attended_cells() {
    for (size_t i = 0; i < kv_.groups().size(); ++i) {
        const KvGroup & group = kv_.groups()[i];
        n_kv_[i] = group.has_layers() ? sizes_.cells(group.cells().high(), group.cells().size(),
                                                     !group.masks().empty(), recent_cells_[i])
                                      : 0;
    }
}

void Engine::plan_recurrent_rows(Pass & pass) {
    if (!is_recurrent_) {
        return;
    }
    bool has_tree = false;
    for (const PassEntry & entry : pass.entries) {
        RecurrentRows rows = {entry.sequence->slot(), entry.first, entry.n, entry.is_verify,
                              entry.updates,          {},          {}};
        if (entry.is_verify && !entry.tree.is_chain()) {
            has_tree = true;
            for (int64_t i = 0; i < entry.n; ++i) {
                rows.parents.push_back(entry.tree.parent(i));
            }
            if (scans_) {
                rows.taps = convolution_taps(rows.parents, model_->hparams().recurrent.d_conv);
            }
        }
        pass.recurrent_rows.push_back(std::move(rows));
    }
    if (!scans_) {
        // If recent passes had trees, chains run in tree form too: one graph then serves both.
        const bool tree_form = recent_trees_(has_tree) > 0 && sizes_.serves_many();
        // Lanes run in parallel, so padding costs little in a short pass.
        const int64_t max_chunk_rows = std::min(4 * pass.n_rows(), max_chunk_lane_rows());
        pass.recurrent_batches = make_recurrent_batches(
            pass.recurrent_rows, sizes_,
            {pass.n_rows(), max_chunk_rows, params_.n_parallel, fused_, tree_form});
    }
}

BatchShape Engine::shape_of(const Pass & pass) const {
    BatchShape shape;
    const bool has_verifies = pass.entries.back().is_verify;
    shape.kind = has_verifies ? GraphKind::VERIFY : GraphKind::APPEND;
    shape.n_rows = pass.n_rows();
    shape.n_kv = n_kv_;
    shape.scans = scans_;
    bool reads_all_logits = false;
    for (const PassEntry & entry : pass.entries) {
        shape.taps = shape.taps || !entry.feature_rows.empty();
        reads_all_logits = reads_all_logits || entry.reads_all_logits;
    }
    const std::vector<int64_t> chunks = chunks_of(pass);
    // If all rows get logits, padding rows get logits too, so that no rows have to be gathered.
    shape.n_out = pass.n_out();
    if (has_verifies && sizes_.uses_few_sizes() && !chunks.empty()) {
        const int64_t n = std::min(sizes_.mixed_verify_rows(shape.n_out), shape.n_rows - 1);
        shape.n_out = std::max(n, shape.n_out);
    } else if (shape.n_out == pass.n_real) {
        shape.n_out = pass.n_rows();
    } else if (!reads_all_logits && !has_verifies) {
        shape.n_out = std::min(sizes_.out_rows(shape.n_out), shape.n_rows - 1);
    }
    for (const RecurrentBatch & lanes : pass.recurrent_batches) {
        shape.recurrent.push_back(lanes.shape);
    }
    select_top(shape, shape.n_out > 0 && !reads_all_logits ? n_top_ : 0);
    return shape;
}

void Engine::set_inputs(CachedGraph & cached, const Pass & pass) {
    const int64_t n = cached.shape.n_rows;
    const GraphInputs & in = cached.in;
    cached.write<float>(in.embd, [&](float * data) { model_->embed(pass.tokens.data(), n, data); });
    if (in.per_layer != nullptr) {
        cached.write<float>(in.per_layer, [&](float * data) {
            model_->embed_per_layer(pass.tokens.data(), n, data);
        });
    }
    if (in.positions != nullptr) {
        cached.write_positions(in.positions, pass.positions);
    }
    std::vector<SequenceRows> sequences;
    for (const PassEntry & entry : pass.entries) {
        sequences.push_back({entry.sequence->slot(), entry.first, entry.n,
                             entry.is_verify ? &entry.tree : nullptr});
    }
    for (size_t i = 0; i < kv_.groups().size(); ++i) {
        cached.write(in.cells[i], pass.cells[i]);
        kv_.groups()[i].set_rows({pass.positions, pass.cells[i], sequences}, cached.shape.n_kv[i]);
    }
    if (in.out_rows != nullptr) {
        cached.write<int32_t>(in.out_rows, [&](int32_t * data) {
            for (const PassEntry & entry : pass.entries) {
                for (int64_t i = entry.n - entry.n_out; i < entry.n; ++i) {
                    *data++ = static_cast<int32_t>(entry.first + i);
                }
            }
            std::fill_n(data, cached.shape.n_out - pass.n_out(), 0);
        });
    }
    if (cached.feature_rows != nullptr) {
        cached.write<int64_t>(cached.feature_rows, [&](int64_t * data) {
            std::fill_n(data, n, ring_->padding_row());
            for (const PassEntry & entry : pass.entries) {
                std::copy(entry.feature_rows.begin(), entry.feature_rows.end(), data + entry.first);
            }
        });
    }
    recurrent_.pass_rows = pass.recurrent_rows;
    if (is_recurrent_ && !scans_) {
        write_recurrent_inputs(cached, recurrent_, model_->hparams().recurrent,
                               pass.recurrent_batches, pass.recurrent_rows);
    }
}

CachedGraph & Engine::compute(Pass & pass) {
    forget_rows();
    try {
        take_feature_rows(pass);
        take_cells(pass);
        take_update_rows(pass);
        plan_recurrent_rows(pass);
        update_attended_cells();
        const BatchShape shape = shape_of(pass);
        CachedGraph & cached =
            graphs_.get(shape, [&](CachedGraph & fresh) { build_forward(fresh); });
        set_inputs(cached, pass);
        pass.has_started = true;
        ++n_passes_;
        graphs_.compute(cached);
        return cached;
    } catch (...) {
        release(pass);
        throw;
    }
}

void Engine::run_pass(const std::vector<BatchEntry> & entries, const std::vector<int64_t> & from,
                      const std::vector<int64_t> & n_rows) {
    Pass pass = plan(entries, from, n_rows);
    CachedGraph * cached = nullptr;
    try {
        cached = &compute(pass);
    } catch (...) {
        for (const PassEntry & entry : pass.entries) {
            entry.sequence->failed(entry, pass.has_started);
        }
        throw;
    }
    find_finite_rows(*cached, pass);
    const int64_t n_vocab = model_->hparams().n_vocab;
    const auto n_features = static_cast<int64_t>(params_.taps.size()) * model_->hparams().n_embd;
    for (PassEntry & entry : pass.entries) {
        const auto of =
            std::find_if(entries.begin(), entries.end(), [&](const BatchEntry & batch_entry) {
                return batch_entry.sequence == entry.sequence;
            });
        if (of->all_features != nullptr && !entry.is_verify) {
            ring_->read(params_.drafters.size(), entry.feature_rows,
                        of->all_features + from[of - entries.begin()] * n_features);
        }
        if (!entry.reads_all_logits) {
            continue;
        }
        float * to = of->all_logits + from[of - entries.begin()] * n_vocab;
        const size_t row_size = n_vocab * sizeof(float);
        devices_.main().read(cached->logits, to, entry.first_out * row_size, entry.n * row_size);
        for (int64_t row = 0; row < entry.n; ++row) {
            entry.finite[row] = entry.finite[row] && all_finite(to + row * n_vocab, n_vocab);
        }
    }
    for (PassEntry & entry : pass.entries) {
        Sequence & sequence = *entry.sequence;
        if (entry.is_verify) {
            sequence.verified(std::move(entry), *cached);
        } else {
            sequence.appended(entry, pass.tokens.data() + entry.first, *cached);
        }
    }
}

void Engine::find_finite_rows(const CachedGraph & cached, Pass & pass) {
    const auto * sums = cached.values<float>(cached.row_sums);
    const auto first_logit = [&](int64_t out) {
        return cached.firsts != nullptr
                   ? cached.values<float>(cached.firsts)[out]
                   : static_cast<const float *>(cached.logits->data)[out * cached.logits->ne[0]];
    };
    for (PassEntry & entry : pass.entries) {
        for (int64_t row = 0; row < entry.n; ++row) {
            const int64_t out = row - (entry.n - entry.n_out);
            entry.finite.push_back(std::isfinite(sums[entry.first + row]) &&
                                   (out < 0 || first_logit(entry.first_out + out) < INFINITY));
        }
    }
}

} // namespace dfl
