#include "graph/recurrent_batch.h"

#include "layers/delta_net.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace dfl {

// Prompt chunks of up to 32 rows share a batch, as do longer chunks of similar length.
static constexpr int64_t SHORT_CHUNK = 32;
// Up to 4 prompt chunks get 4 lanes with room for all rows: the graph depends on their sum only.
static constexpr int64_t FEW_CHUNKS = 4;

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

static int64_t length_class(int64_t n_rows) { return doubled(n_rows, SHORT_CHUNK); }

int64_t max_recurrent_batches(int64_t n_ubatch) {
    // Counts three batches of a pass: single rows, the shortest prompt chunks, and verifies.
    int64_t n = 3;
    for (int64_t length = SHORT_CHUNK; length < n_ubatch; length *= 2) {
        ++n;
    }
    return n;
}

// Merges the two length classes of the longest prompt chunks while the merged batch has at most
// max_rows padded rows, because fewer batches need fewer operations and graph shapes.
static void merge_classes(std::map<int64_t, std::vector<int32_t>> & chunks, int64_t max_rows) {
    while (chunks.size() > 1) {
        auto & [length, longest] = *chunks.rbegin();
        std::vector<int32_t> & next = std::next(chunks.rbegin())->second;
        if (length * static_cast<int64_t>(longest.size() + next.size()) > max_rows) {
            return;
        }
        longest.insert(longest.end(), next.begin(), next.end());
        std::sort(longest.begin(), longest.end());
        chunks.erase(std::next(chunks.rbegin())->first);
    }
}

static RecurrentBatch make_batch(const std::vector<int32_t> & members, bool is_chunk,
                                 const std::vector<RecurrentRows> & entries,
                                 const GraphSizes & sizes, const RecurrentBatchOptions & options) {
    RecurrentBatch batch;
    RecurrentBatchShape & shape = batch.shape;
    int64_t longest = 0, total = 0, end = 0;
    bool is_tree = false;
    for (const int32_t i : members) {
        longest = std::max(longest, entries[i].n);
        total += entries[i].n;
        end = std::max<int64_t>(end, entries[i].sequence + 1);
        is_tree = is_tree || !entries[i].parents.empty();
    }
    const auto n = static_cast<int64_t>(members.size());
    shape.is_verify = entries[members.front()].is_verify;
    shape.tree_form = !options.fused || is_tree || (shape.is_verify && options.tree_form);
    const bool has_class = is_chunk && sizes.serves_many();
    const bool is_mixed = n < static_cast<int64_t>(entries.size());
    const bool shares_lanes = has_class && n > 1 && n <= FEW_CHUNKS &&
                              FEW_CHUNKS * length_class(total) <= options.max_chunk_rows;
    if (has_class) {
        shape.n_rows = length_class(shares_lanes ? total : longest);
    } else if (shape.is_verify || longest > 1) {
        shape.n_rows = is_chunk ? sizes.chunk_lane_rows(longest) : sizes.lane_rows(longest);
    } else {
        shape.n_rows = 1;
    }
    if (is_chunk) { // computing long idle lanes in place takes more time than gathering states
        shape.in_place = options.n_slots == 1;
    } else if (sizes.uses_few_sizes() && is_mixed) {
        // Every slot gets a lane: idle lanes cost little time beside other batches of the pass.
        end = options.n_slots;
        shape.in_place = n > 1 || end == 1;
    } else {
        // Gathering states and writing them back moves three times the bytes of updating in place.
        end = sizes.lanes(end);
        shape.in_place = 3 * n >= end;
    }
    shape.n_lanes = shape.in_place ? end : sizes.lanes(shares_lanes ? FEW_CHUNKS : n);
    if (is_chunk && shape.size() > options.max_chunk_rows) {
        shape.n_lanes = n;
    }
    batch.entries.assign(shape.n_lanes, shape.in_place ? -1 : members.front());
    for (int64_t i = 0; i < n; ++i) {
        batch.entries[shape.in_place ? entries[members[i]].sequence : i] = members[i];
    }
    return batch;
}

// True if the lanes have exactly the rows of the pass, in order. A lone verify may have padding;
// several verifies must have equally many rows.
static bool is_identity_layout(RecurrentBatch & batch, const std::vector<RecurrentRows> & entries,
                               int64_t n_rows) {
    RecurrentBatchShape & shape = batch.shape;
    const bool is_alone = shape.n_lanes == 1 && entries.size() == 1 && shape.is_verify;
    const int64_t n = is_alone ? n_rows : shape.is_verify ? entries.front().n : shape.n_rows;
    bool lie = shape.in_place && n * shape.n_lanes == n_rows;
    for (int64_t i = 0; i < shape.n_lanes && lie; ++i) {
        const int32_t entry = batch.entries[i];
        lie = entry >= 0 && entries[entry].first == i * n && (is_alone || entries[entry].n == n);
    }
    shape.n_rows = lie ? n : shape.n_rows;
    return lie;
}

std::vector<RecurrentBatch> make_recurrent_batches(const std::vector<RecurrentRows> & entries,
                                                   const GraphSizes & sizes,
                                                   const RecurrentBatchOptions & options) {
    const bool has_verifies = entries.back().is_verify;
    const bool has_classes = sizes.serves_many();
    std::vector<int32_t> single, verified;
    std::map<int64_t, std::vector<int32_t>> chunks;
    for (size_t i = 0; i < entries.size(); ++i) {
        // Single rows beside verifies are rare ends of prompts, so they count as chunks.
        const bool is_single = entries[i].n == 1 && !(has_verifies && has_classes);
        auto & group = entries[i].is_verify ? verified
                       : is_single          ? single
                                            : chunks[length_class(entries[i].n)];
        group.push_back(static_cast<int32_t>(i));
    }
    if (has_classes) {
        merge_classes(chunks, options.max_chunk_rows);
    }
    std::vector<RecurrentBatch> all;
    const auto add = [&](const std::vector<int32_t> & members, bool is_chunk) {
        if (!members.empty()) {
            all.push_back(make_batch(members, is_chunk, entries, sizes, options));
        }
    };
    add(single, false);
    for (const auto & [length, members] : chunks) {
        add(members, true);
    }
    add(verified, false);
    all.front().shape.identity_layout =
        all.size() == 1 && is_identity_layout(all.front(), entries, options.n_rows);
    return all;
}

static void make_tree_inputs(CachedGraph & cached, int64_t of, int64_t n, int64_t n_lanes) {
    ggml_context * ctx = cached.ctx.get();
    std::vector<TreeInputs> & trees = cached.in.trees;
    const bool exists = std::any_of(trees.begin(), trees.end(), [&](const TreeInputs & tree) {
        return tree.batch == of && tree.n == n;
    });
    if (n == 0 || exists) {
        return;
    }
    const auto make = [&](const char * name) {
        ggml_tensor * all = make_input(ctx, GGML_TYPE_F32, n, 2 * n * n_lanes, name);
        return ggml_reshape_4d(ctx, all, n, 2 * n, 1, n_lanes);
    };
    trees.push_back({of, n, make("ancestors"), make("path_bias"),
                     make_input(ctx, GGML_TYPE_F32, n, n, "identity")});
}

void make_recurrent_inputs(CachedGraph & cached, const RecurrentShape & recurrent) {
    ggml_context * ctx = cached.ctx.get();
    GraphInputs & in = cached.in;
    const int64_t before = recurrent.d_conv - 1;
    const auto make = [&](ggml_type type, int64_t n, const char * name) {
        return make_input(ctx, type, n, 1, name);
    };
    const std::vector<RecurrentBatchShape> & all = cached.shape.recurrent;
    const bool promotes = cached.shape.kind == GraphKind::PROMOTE;
    bool tree_form = false;
    for (size_t i = 0; i < all.size(); ++i) {
        const RecurrentBatchShape & batch = all[i];
        const int64_t n_inputs = (before + batch.n_rows) * batch.n_lanes;
        RecurrentInputs inputs;
        if (!batch.in_place) {
            inputs.slots = make(GGML_TYPE_I32, batch.n_lanes, "slots");
            inputs.to_slots = make(GGML_TYPE_I64, batch.n_lanes, "to_slots");
        }
        if (!promotes) {
            inputs.inputs = make(GGML_TYPE_I32, n_inputs, "inputs");
        }
        if (!batch.identity_layout && !promotes) {
            inputs.last_inputs = make(GGML_TYPE_I32, before * batch.n_lanes, "last_inputs");
            inputs.rows = make(GGML_TYPE_I32, batch.size(), "rows");
        }
        if (batch.is_verify) {
            inputs.update_rows = make(GGML_TYPE_I64, batch.size(), "update_rows");
            inputs.conv_update_rows = make(GGML_TYPE_I64, n_inputs, "conv_update_rows");
        }
        if (batch.is_verify) {
            inputs.conv_taps = make(GGML_TYPE_I32, recurrent.d_conv * batch.size(), "conv_taps");
            inputs.parents = make(GGML_TYPE_I32, batch.size(), "parents");
            inputs.counts = make(GGML_TYPE_I32, batch.n_lanes, "counts");
        }
        in.recurrent.push_back(inputs);
        tree_form = tree_form || batch.tree_form;
        if (batch.tree_form && batch.is_verify) {
            make_tree_inputs(cached, static_cast<int64_t>(i), batch.n_rows, batch.n_lanes);
        } else if (batch.tree_form && promotes) {
            make_tree_inputs(cached, -1, batch.n_rows, 1);
        } else if (batch.tree_form) {
            make_tree_inputs(cached, -1, std::min(batch.n_rows, TREE_FORM_CHUNK), 1);
            make_tree_inputs(cached, -1, batch.n_rows % TREE_FORM_CHUNK, 1);
        }
    }
    if (!all.empty() && !all.front().identity_layout && !promotes) {
        in.lane_rows = make(GGML_TYPE_I32, cached.shape.n_rows, "lane_rows");
    }
    if (tree_form) {
        in.unit = make_input(ctx, GGML_TYPE_F32, 1, 2 * recurrent.n_k_heads, "unit");
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

// Returns the parent of each of n rows of a lane; -1 for the root and for padding rows.
static std::vector<int32_t> parents_of(const RecurrentRows * entry, int64_t n) {
    std::vector<int32_t> parents(n, -1);
    for (int64_t i = 0; entry != nullptr && i < entry->n; ++i) {
        parents[i] = entry->parents.empty() ? static_cast<int32_t>(i) - 1 : entry->parents[i];
    }
    return parents;
}

// Returns the entry of a lane, or NULL if the lane is idle.
static const RecurrentRows * entry_of(const RecurrentBatch & batch,
                                      const std::vector<RecurrentRows> & entries, int64_t lane) {
    return batch.entries[lane] < 0 ? nullptr : &entries[batch.entries[lane]];
}

// Fills a graph input with f(lane, batch entry of the lane, i), for each lane and i < n.
template <typename T, typename F>
static void write_lanes(const CachedGraph & cached, ggml_tensor * input,
                        const RecurrentBatch & batch, const std::vector<RecurrentRows> & entries,
                        int64_t n, F && f) {
    if (input == nullptr) {
        return;
    }
    cached.write<T>(input, [&](T * data) {
        for (int64_t lane = 0; lane < batch.shape.n_lanes; ++lane) {
            const RecurrentRows * entry = entry_of(batch, entries, lane);
            for (int64_t i = 0; i < n; ++i) {
                *data++ = static_cast<T>(f(lane, entry, i));
            }
        }
    });
}

static void write_conv_taps(const CachedGraph & cached, ggml_tensor * input,
                            const RecurrentBatch & batch,
                            const std::vector<RecurrentRows> & entries, int64_t d_conv) {
    if (input == nullptr) {
        return;
    }
    const int64_t n = batch.shape.n_rows, size = batch.shape.size();
    cached.write<int32_t>(input, [&](int32_t * data) {
        for (int64_t lane = 0; lane < batch.shape.n_lanes; ++lane) {
            const std::vector<int32_t> taps =
                convolution_taps(parents_of(entry_of(batch, entries, lane), n), d_conv);
            const auto first = static_cast<int32_t>(lane * (d_conv - 1 + n));
            for (int64_t tap = 0; tap < d_conv; ++tap) {
                for (int64_t i = 0; i < n; ++i) {
                    data[tap * size + lane * n + i] = first + taps[tap * n + i];
                }
            }
        }
    });
}

void write_recurrent_inputs(const CachedGraph & cached, const RecurrentCache & cache,
                            const RecurrentShape & recurrent,
                            const std::vector<RecurrentBatch> & batches,
                            const std::vector<RecurrentRows> & entries) {
    const RecurrentPart & part = *cache.parts().front();
    const int64_t before = recurrent.d_conv - 1, n_slots = part.state->ne[1];
    // Row numbers of convolution inputs count committed inputs of all slots, then rows of the pass.
    const auto committed = [&](int64_t slot, int64_t i) { return slot * before + i; };
    const auto input_row = [&](int64_t lane, const RecurrentRows * entry, int64_t i) {
        if (entry == nullptr) { // an idle lane reads the inputs of its own slot
            return committed(lane, std::min(i, before - 1));
        }
        return i < before ? committed(entry->sequence, i)
                          : n_slots * before + entry->first + std::min(i - before, entry->n - 1);
    };
    for (size_t of = 0; of < batches.size(); ++of) {
        const RecurrentInputs & in = cached.in.recurrent[of];
        const RecurrentBatch & batch = batches[of];
        const int64_t n = batch.shape.n_rows;
        const auto slot = [](int64_t, const RecurrentRows * entry, int64_t) {
            return entry->sequence;
        };
        write_lanes<int32_t>(cached, in.slots, batch, entries, 1, slot);
        write_lanes<int64_t>(cached, in.to_slots, batch, entries, 1, slot);
        write_lanes<int32_t>(cached, in.inputs, batch, entries, before + n, input_row);
        write_lanes<int32_t>(cached, in.last_inputs, batch, entries, before,
                             [&](int64_t lane, const RecurrentRows * entry, int64_t i) {
                                 return input_row(lane, entry, entry == nullptr ? i : entry->n + i);
                             });
        write_lanes<int32_t>(cached, in.rows, batch, entries, n,
                             [&](int64_t, const RecurrentRows * entry, int64_t i) {
                                 return entry != nullptr && i < entry->n ? entry->first + i
                                                                         : cached.shape.n_rows;
                             });
        write_lanes<int64_t>(cached, in.update_rows, batch, entries, n,
                             [&](int64_t, const RecurrentRows * entry, int64_t i) {
                                 return entry != nullptr && i < entry->n ? entry->updates.first + i
                                                                         : part.padding_row();
                             });
        write_lanes<int64_t>(cached, in.conv_update_rows, batch, entries, before + n,
                             [&](int64_t, const RecurrentRows * entry, int64_t i) {
                                 return entry != nullptr && i < before + entry->n
                                            ? entry->updates.first_conv + i
                                            : part.padding_conv_row();
                             });
        write_conv_taps(cached, in.conv_taps, batch, entries, recurrent.d_conv);
        write_lanes<int32_t>(cached, in.parents, batch, entries, n,
                             [](int64_t, const RecurrentRows * entry, int64_t i) {
                                 const bool is_tree =
                                     entry != nullptr && i < entry->n && !entry->parents.empty();
                                 return is_tree ? entry->parents[i] : i - 1;
                             });
        write_lanes<int32_t>(cached, in.counts, batch, entries, 1,
                             [](int64_t, const RecurrentRows * entry, int64_t) {
                                 return entry != nullptr ? entry->n : 0;
                             });
    }
    if (cached.in.lane_rows != nullptr) {
        cached.write<int32_t>(cached.in.lane_rows, [&](int32_t * data) {
            int64_t first = 0;
            for (const RecurrentBatch & batch : batches) {
                for (int64_t lane = 0; lane < batch.shape.n_lanes; ++lane) {
                    const RecurrentRows * entry = entry_of(batch, entries, lane);
                    const int64_t at = first + lane * batch.shape.n_rows;
                    for (int64_t i = 0; entry != nullptr && i < entry->n; ++i) {
                        data[entry->first + i] = static_cast<int32_t>(at + i);
                    }
                }
                first += batch.shape.size();
            }
            const RecurrentRows & last = entries.back(); // padding is the last entry's first row
            std::fill(data + last.first + last.n, data + cached.shape.n_rows, data[last.first]);
        });
    }
    write_tree_inputs(cached, recurrent, batches, entries);
}

static void write_ancestors(float * ancestors, float * bias, int64_t n,
                            const std::vector<int32_t> & parents) {
    std::fill_n(ancestors, 2 * n * n, 0.0f);
    std::fill_n(bias, 2 * n * n, -INFINITY);
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = i; j >= 0; j = parents[j]) {
            ancestors[i * n + j] = ancestors[(n + i) * n + j] = 1.0f;
            bias[i * n + j] = 0.0f;
            bias[(n + i) * n + j] = j < i ? 0.0f : -INFINITY;
        }
    }
}

void write_tree_inputs(const CachedGraph & cached, const RecurrentShape & recurrent,
                       const std::vector<RecurrentBatch> & batches,
                       const std::vector<RecurrentRows> & entries) {
    for (const TreeInputs & tree : cached.in.trees) {
        if (tree.ancestors->view_src->buffer == nullptr) {
            continue; // no node reads the masks
        }
        const int64_t n = tree.n, n_lanes = tree.ancestors->ne[3];
        std::vector<float> ancestors(2 * n * n * n_lanes), bias(ancestors.size());
        std::vector<int32_t> chain(n);
        std::iota(chain.begin(), chain.end(), -1);
        for (int64_t lane = 0; lane < n_lanes; ++lane) {
            const size_t at = lane * 2 * n * n;
            const bool is_chain = tree.batch < 0;
            write_ancestors(ancestors.data() + at, bias.data() + at, n,
                            is_chain ? chain
                                     : parents_of(entry_of(batches[tree.batch], entries, lane), n));
        }
        const auto write = [&](ggml_tensor * view, const std::vector<float> & values) {
            cached.write<float>(view->view_src, [&](float * data) {
                std::copy(values.begin(), values.end(), data);
            });
        };
        write(tree.ancestors, ancestors);
        write(tree.bias, bias);
        cached.write<float>(tree.identity, [&](float * data) {
            for (int64_t i = 0; i < n * n; ++i) {
                data[i] = i % (n + 1) == 0 ? 1.0f : 0.0f;
            }
        });
    }
    if (cached.in.unit != nullptr) {
        cached.write<float>(cached.in.unit, [&](float * data) {
            const auto d = static_cast<float>(recurrent.d_state);
            std::fill_n(data, recurrent.n_k_heads, 1.0f / d);
            std::fill_n(data + recurrent.n_k_heads, recurrent.n_k_heads, 1.0f / std::sqrt(d));
        });
    }
}

} // namespace dfl
