#include "layers/cpu_ops/packed_experts.h"

#include "layers/cpu_ops/float_rows.h"
#include "layers/cpu_ops/packed_gated.h"
#include "layers/cpu_ops/packed_input.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace dfl {

namespace {

struct ExpertChoice {
    int32_t expert;
    float weight;
};

// Largest number of rows in one product with an expert, to bound scratch and keep the weights of a
// step of columns in L2 cache.
constexpr int64_t MAX_ROWS = 96;

// Node of route(). src: logits. dst: ExpertChoice [n_used, n_rows].
class Route : public CpuNode {
  public:
    explicit Route(int64_t n_used) : n_used_(n_used) {}

    void compute(ggml_tensor * dst, int ith, int nth) override {
        const ggml_tensor * logits = dst->src[0];
        auto * to = static_cast<ExpertChoice *>(dst->data);
        for (int64_t row = ith; row < logits->ne[1]; row += nth) {
            choose(row_of(logits, row), logits->ne[0], to + row * n_used_);
        }
    }

  private:
    // Chooses the n_used largest logits in descending order; among equal logits the lower index
    // wins.
    void choose(const float * logits, int64_t n_expert, ExpertChoice * best) const {
        for (int64_t expert = 0; expert < n_expert; ++expert) {
            const float logit = logits[expert];
            int64_t at = std::min(expert, n_used_);
            if (at == n_used_ && !(logit > best[at - 1].weight)) {
                continue;
            }
            at = std::min(at, n_used_ - 1);
            for (; at > 0 && logit > best[at - 1].weight; --at) {
                best[at] = best[at - 1];
            }
            best[at] = {static_cast<int32_t>(expert), logit};
        }
        const float maximum = best[0].weight;
        float sum = 0.0f;
        for (int64_t i = 0; i < n_used_; ++i) {
            best[i].weight = std::exp(best[i].weight - maximum);
            sum += best[i].weight;
        }
        for (int64_t i = 0; i < n_used_; ++i) {
            best[i].weight /= sum;
        }
    }

    int64_t n_used_;
};

// Sorts pairs of a row and one of its experts by expert, then by row, in a thread's scratch.
class Groups {
  public:
    Groups(int64_t n_expert, int64_t n_used, int64_t n_rows)
        : n_expert_(n_expert), n_used_(n_used), n_pairs_(n_used * n_rows) {}

    int64_t scratch_size() const {
        return whole_lines((2 * n_expert_ + 1 + n_pairs_) * sizeof(int32_t));
    }
    int64_t n_pairs() const { return n_pairs_; }
    int64_t n_used() const { return n_used_; }

    struct Sorted {
        const int32_t * active; // experts that rows have chosen, ascending
        int64_t n_active;
        const int32_t * first; // index in `pairs` of each expert's first pair, then n_pairs
        const int32_t * pairs; // row * n_used + i stands for the i-th choice of a row

        int64_t n_of(int64_t expert) const { return first[expert + 1] - first[expert]; }
    };

    Sorted sort(const ExpertChoice * choices, char * scratch) const {
        auto * first = reinterpret_cast<int32_t *>(scratch);
        int32_t *active = first + n_expert_ + 1, *pairs = active + n_expert_;
        std::fill(first, first + n_expert_ + 1, 0);
        for (int64_t i = 0; i < n_pairs_; ++i) {
            ++first[choices[i].expert];
        }
        int64_t n_active = 0;
        int32_t sum = 0;
        for (int64_t expert = 0; expert < n_expert_; ++expert) {
            if (first[expert] > 0) {
                active[n_active++] = static_cast<int32_t>(expert);
            }
            sum += first[expert];
            first[expert] = sum; // end of the expert's pairs; the next loop lowers it to the start
        }
        first[n_expert_] = sum;
        for (int64_t i = n_pairs_ - 1; i >= 0; --i) {
            pairs[--first[choices[i].expert]] = static_cast<int32_t>(i);
        }
        return {active, n_active, first, pairs};
    }

  private:
    int64_t n_expert_, n_used_, n_pairs_;
};

// Node of gate and up products. dst: quantised outputs of the sorted pairs, then thread scratch.
class GatedExperts : public CpuNode {
  public:
    GatedExperts(const ExpertWeights & w, Activation activation, Groups groups, PackedInput input)
        : steps_(w.gate, w.up, w.down, activation),
          x_size_(static_cast<int64_t>(
              w.gate.packed->product->quantized_row_size(w.gate.packed->n_in))),
          expert_bytes_(
              static_cast<int64_t>(w.gate.packed->expert_bytes() + w.up.packed->expert_bytes())),
          groups_(groups), input_(std::move(input)) {}

    std::vector<const PackedMatrix *> weights() const override { return steps_.weights(); }
    int64_t max_rows() const { return std::min(MAX_ROWS, input_.n_rows()); }

    int64_t scratch_size() const {
        return groups_.scratch_size() + input_.scratch_size() + whole_lines(max_rows() * x_size_) +
               steps_.scratch_size(max_rows());
    }
    int64_t bytes() const { return whole_lines(groups_.n_pairs() * steps_.row_size()); }

    void compute(ggml_tensor * dst, int ith, int nth) override {
        auto * to = static_cast<char *>(dst->data);
        Scratch at;
        char * scratch = to + bytes() + ith * scratch_size();
        const ggml_tensor * choices = dst->src[input_.sources().size()];
        at.sorted = groups_.sort(static_cast<const ExpertChoice *>(choices->data), scratch);
        scratch += groups_.scratch_size();
        at.x = input_.quantized(dst, scratch);
        at.rows = scratch + input_.scratch_size();
        at.columns = at.rows + whole_lines(max_rows() * x_size_);

        const int64_t steps = steps_.n_steps(), n = at.sorted.n_active * steps;
        const int64_t bytes = at.sorted.n_active * expert_bytes_;
        const int64_t parts = packed_parts(bytes, n, nth);
        share_out(parts, is_long_product(bytes), ith, nth, [&](int64_t part) {
            const int64_t end = (part + 1) * n / parts;
            for (int64_t i = part * n / parts; i < end;) {
                const int64_t last = std::min(end, (i / steps + 1) * steps);
                run(at, at.sorted.active[i / steps], i % steps, last - i / steps * steps, to);
                i = last;
            }
        });
    }

  private:
    struct Scratch {
        Groups::Sorted sorted;
        const char * x;
        char * rows;
        char * columns;
    };

    void run(const Scratch & at, int64_t expert, int64_t first, int64_t last, char * to) const {
        const int64_t begin = at.sorted.first[expert], n_rows = at.sorted.n_of(expert);
        for (int64_t done = 0; done < n_rows; done += max_rows()) {
            const int64_t n = std::min(max_rows(), n_rows - done);
            const char * x = gather(at, begin + done, n);
            for (int64_t step = first; step < last; ++step) {
                steps_.run(step, expert, x, n, at.columns, to + (begin + done) * steps_.row_size());
            }
        }
    }

    // Returns the input rows of (token, expert) pairs [first, first + n), copied unless contiguous.
    const char * gather(const Scratch & at, int64_t first, int64_t n) const {
        const auto row = [&](int64_t i) {
            return at.x + at.sorted.pairs[first + i] / groups_.n_used() * x_size_;
        };
        if (row(n - 1) == row(0) + (n - 1) * x_size_) {
            return row(0);
        }
        for (int64_t i = 0; i < n; ++i) {
            std::memcpy(at.rows + i * x_size_, row(i), x_size_);
        }
        return at.rows;
    }

    GatedSteps steps_;
    int64_t x_size_, expert_bytes_;
    Groups groups_;
    PackedInput input_;
};

// Node of down products and their weighted sum. dst: f32 [n_embd, n_rows], then thread scratch.
class SumExperts : public CpuNode {
  public:
    SumExperts(const ExpertWeights & w, Groups groups, const ExpertSumTerms & terms)
        : weights_(w.down), down_(*w.down.packed), groups_(groups),
          shared_(terms.shared != nullptr), adds_(terms.add != nullptr) {}

    std::vector<const PackedMatrix *> weights() const override { return {&down_}; }
    int64_t n_rows() const { return groups_.n_pairs() / groups_.n_used(); }
    int64_t max_rows() const { return std::min(MAX_ROWS, n_rows()); }
    int64_t bytes() const {
        return whole_lines(down_.n_out * n_rows() * static_cast<int64_t>(sizeof(float)));
    }
    int64_t scratch_size() const {
        return groups_.scratch_size() + whole_lines(max_rows() * WIDTH * sizeof(float));
    }

    void compute(ggml_tensor * dst, int ith, int nth) override {
        auto * to = static_cast<float *>(dst->data);
        char * scratch = static_cast<char *>(dst->data) + bytes() + ith * scratch_size();
        const auto * choices = static_cast<const ExpertChoice *>(dst->src[1]->data);
        const Groups::Sorted sorted = groups_.sort(choices, scratch);
        auto * values = reinterpret_cast<float *>(scratch + groups_.scratch_size());
        const int64_t tiles = down_.n_tiles(), tile = down_.product->tile;
        const auto expert_bytes = static_cast<int64_t>(down_.expert_bytes());
        const int64_t bytes = sorted.n_active * expert_bytes;
        // Each part of the columns has at least min_bytes of an expert's weights, for prefetching
        // to pay, unless threads would be idle.
        constexpr int64_t min_bytes = 1 << 16;
        const int64_t max_parts = std::max<int64_t>(nth, expert_bytes / min_bytes);
        const int64_t parts = std::min(packed_parts(bytes, tiles, nth), max_parts);
        share_out(parts, is_long_product(bytes), ith, nth, [&](int64_t part) {
            const int64_t first = part * tiles / parts, last = (part + 1) * tiles / parts;
            start(dst, first * tile, std::min(last * tile, down_.n_out), to);
            for (int64_t i = 0; i < sorted.n_active; ++i) {
                for (int64_t t = first; t < last; t += WIDTH / tile) {
                    add(dst, sorted, sorted.active[i], t, std::min(last, t + WIDTH / tile), values,
                        to);
                }
            }
        });
    }

  private:
    static constexpr int64_t WIDTH = 256;

    // Sets columns [first, last) to residual plus shared expert, before routed experts are added.
    void start(const ggml_tensor * dst, int64_t first, int64_t last, float * to) const {
        const ggml_tensor *shared = dst->src[2], *score = dst->src[3];
        const ggml_tensor * added = dst->src[shared_ ? 4 : 2];
        for (int64_t row = 0; row < n_rows(); ++row) {
            float * at = to + row * down_.n_out;
            if (adds_) {
                std::copy(row_of(added, row) + first, row_of(added, row) + last, at + first);
            } else {
                std::fill(at + first, at + last, 0.0f);
            }
            if (!shared_) {
                continue;
            }
            const float factor = 1.0f / (1.0f + std::exp(-*row_of(score, row)));
            const float * from = row_of(shared, row);
            for (int64_t i = first; i < last; ++i) {
                at[i] += from[i] * factor;
            }
        }
    }

    void add(const ggml_tensor * dst, const Groups::Sorted & sorted, int64_t expert, int64_t first,
             int64_t last, float * values, float * to) const {
        const cpu::PackedProduct & product = *down_.product;
        const auto x_size = static_cast<int64_t>(product.quantized_row_size(down_.n_in));
        const auto * choices = static_cast<const ExpertChoice *>(dst->src[1]->data);
        const int64_t column = first * product.tile;
        const int64_t n_columns = std::min(last * product.tile, down_.n_out) - column;
        const int64_t begin = sorted.first[expert], end = sorted.first[expert + 1];
        for (int64_t pair = begin; pair < end; pair += max_rows()) {
            const int64_t n = std::min(max_rows(), end - pair);
            product.multiply(down_.expert(expert), down_.n_in, down_.n_out,
                             static_cast<const char *>(dst->src[0]->data) + pair * x_size, n, first,
                             last, values - column, WIDTH);
            finish_outputs(weights_, expert, column, n_columns, values, n, WIDTH);
            for (int64_t i = 0; i < n; ++i) {
                const int32_t which = sorted.pairs[pair + i];
                const float weight = choices[which].weight;
                float * at = to + which / groups_.n_used() * down_.n_out + column;
                for (int64_t j = 0; j < n_columns; ++j) {
                    at[j] += weight * values[i * WIDTH + j];
                }
            }
        }
    }

    Linear weights_;
    const PackedMatrix & down_;
    Groups groups_;
    bool shared_, adds_;
};

} // namespace

ggml_tensor * route(GraphContext & g, ggml_tensor * logits, int64_t n_used) {
    const int64_t bytes = n_used * logits->ne[1] * static_cast<int64_t>(sizeof(ExpertChoice));
    return add_cpu_node(g, GGML_TYPE_I8, bytes, 1, {logits}, std::make_unique<Route>(n_used));
}

ggml_tensor * packed_experts(GraphContext & g, const ExpertWeights & w, const Rows & x,
                             ggml_tensor * routed, const ExpertSumTerms & terms) {
    const int64_t n_threads = g.cpu_nodes.max_threads, n_embd = w.down.packed->n_out;
    const Groups groups(w.gate.packed->n_experts, g.hp.experts.n_used, x.n_rows());
    const PackedInput input(g, *w.gate.packed->product, x);

    std::vector<ggml_tensor *> src = input.sources();
    src.push_back(routed);
    auto gates = std::make_unique<GatedExperts>(w, g.hp.experts.activation, groups, input);
    const int64_t gated_bytes = gates->bytes() + n_threads * gates->scratch_size();
    ggml_tensor * gated = add_cpu_node(g, GGML_TYPE_I8, gated_bytes, 1, src, std::move(gates));

    src = {gated, routed};
    for (ggml_tensor * more : {terms.shared, terms.score, terms.add}) {
        if (more != nullptr) {
            src.push_back(more);
        }
    }
    auto sums = std::make_unique<SumExperts>(w, groups, terms);
    const int64_t bytes = sums->bytes() + n_threads * sums->scratch_size();
    ggml_tensor * all = add_cpu_node(g, GGML_TYPE_F32, bytes / static_cast<int64_t>(sizeof(float)),
                                     1, src, std::move(sums));
    return ggml_view_2d(g.ctx, all, n_embd, x.n_rows(), n_embd * sizeof(float), 0);
}

} // namespace dfl
