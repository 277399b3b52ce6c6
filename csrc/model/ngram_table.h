// An n-gram table: the tokens that followed runs of tokens in the target's answers to other
// prompts.
#pragma once

#include <array>
#include <cstdint>

namespace dfl {

class GgufFile;

// The rows of a drafter file of architecture "ngram", which must outlive the table. Row i of
// ngram.tokens, i32 [4, n], has a run, its last token first and then -1 if it is shorter than three
// tokens, and a token that followed. Rows are sorted by run, the followers of a run by probability.
// The ids may be stored in 16 bits, i16, with -1 as 0xFFFF; no token then has id 65,535.
// ngram.class, i8 [n], is the class of a row; ngram.prob, f32 [12], has the share of tokens of a
// class that were right in other answers.
class NgramTable {
  public:
    static constexpr int MAX_RUN = 3, MAX_FOLLOWERS = 4, N_CLASSES = 12;
    using Run = std::array<int32_t, MAX_RUN>; // end of a text, the last token first; < 0: no token
    struct Follower {
        int32_t token, prob_class;
    };
    struct Followers {
        std::array<Follower, MAX_FOLLOWERS> all;
        int n = 0;
    };

    // Throws DFL_STATUS_FILE if a tensor or a row is wrong, or a token is outside the vocabulary.
    NgramTable(const GgufFile & file, int64_t n_vocab);

    // Returns the tokens that followed the longest known run at the end of a text.
    Followers followers(const Run & run) const;
    const std::array<float, N_CLASSES> & probs() const { return probs_; }
    uint64_t bytes() const { return uint64_t(n_) * uint64_t(row_bytes_ + 1); }

  private:
    using Row = std::array<int32_t, MAX_RUN + 1>;
    Row row(int64_t index) const;

    const char * tokens_;
    int64_t row_bytes_;
    const int8_t * classes_;
    int64_t n_;
    std::array<float, N_CLASSES> probs_;
};

} // namespace dfl
