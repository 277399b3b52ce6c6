// Picking the best of rows of logits, on the host and on a device.
#pragma once

#include <cmath>
#include <cstdint>
#include <ggml.h>
#include <vector>

namespace dfl {

// A token and its raw logit.
struct Candidate {
    int32_t token;
    float logit;
};

// Larger logit first, lower token first on ties. NaNs come last: an order that they break would let
// std::sort leave its range.
inline bool is_better(const Candidate & a, const Candidate & b) {
    if (std::isnan(a.logit) || std::isnan(b.logit)) {
        return std::isnan(b.logit) && !std::isnan(a.logit);
    }
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// Whether no value is a NaN or +inf: a row may ban tokens by -inf.
bool all_finite(const float * logits, int64_t n);

// Index of the first largest of n values; n if there is none, as among NaNs.
int64_t first_largest(const float * x, int64_t n);

// The largest value of each block of a row, by which the rest of it need not be looked at.
struct Maxima {
    std::vector<float> of_blocks; // minus infinity among NaNs
    bool is_sound;                // no value is a NaN or +inf

    Maxima(const float * x, int64_t n);
    float largest() const;
};

// Appends the k largest of n values, best first, lower index first on ties; k is at most n.
void append_best(const float * x, int64_t n, int64_t k, std::vector<Candidate> & out);
// The same of a sound row whose maxima are known.
void append_best(const float * x, int64_t n, int64_t k, const Maxima & maxima,
                 std::vector<Candidate> & out);
// Appends the values of a sound row that are not below a bound, in the same order.
void append_from(const float * x, int64_t n, float bound, const Maxima & maxima,
                 std::vector<Candidate> & out);

// The k largest of long rows, as a device finds them.
//
// ggml's CUDA backend sorts a row whole, one multiprocessor to a row: about a millisecond for a
// vocabulary, of a draft that takes two. The k largest lie in the k blocks with the largest maxima,
// so few values are left to sort: blocks that fit into one bitonic sort.
struct TopRows {
    struct Level {
        ggml_tensor * blocks; // i32 [k, n_rows]: the blocks that are looked at further
        int64_t width;        // values of a block
    };
    std::vector<Level> levels;
    ggml_tensor * last = nullptr; // i32 [k, n_rows]: places among the values of the last blocks

    // Of each row the values at the places found, f32 [1, k, n_rows]; values: [n, n_rows].
    ggml_tensor * gather(ggml_context * ctx, ggml_tensor * values) const;
    // The place in its row of a result: i of k * n_rows. The arrays: what `levels` and `last` held.
    int64_t place(const std::vector<std::vector<int32_t>> & blocks,
                  const std::vector<int32_t> & last, int64_t i) const;
};

// The same tensor clamped to finite values.
ggml_tensor * without_nans(ggml_context * ctx, ggml_tensor * logits);

// values: f32 [n, n_rows] without NaNs. by_blocks false: whole rows are sorted as the device does.
TopRows find_top(ggml_context * ctx, ggml_tensor * values, int64_t k, bool by_blocks);

} // namespace dfl
