// Drafts from the text: tokens that followed earlier occurrences of its longest repeated suffix.
#pragma once

#include "model/ngram_table.h"
#include "speculative/node_selection.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace dfl {

// Suffix automaton of a stream of tokens (Blumer et al., 1985). A state is a set of substrings with
// equal end positions, so the longest suffix that occurs earlier is always known. Appending takes
// amortised constant time; a token adds at most 2 states and 3 edges.
class SuffixAutomaton {
  public:
    struct State {
        int32_t length; // length of the state's longest substring
        int32_t link;   // state of the longest suffix that occurs at more positions
        int32_t newest; // last known end position before the end of the stream; -1: none
        int32_t first;  // first edge, -1: none; Edge::next leads to the other edges
    };
    struct Edge {
        int32_t state, token;
        int32_t to, next;
    };

    SuffixAutomaton() { clear(); }

    void clear();
    void append(int32_t token);

    // Returns the state after a state and a token; -1 if the token never followed.
    int32_t follow(int32_t state, int32_t token) const;

    // Returns the state of the longest suffix of the stream that occurs earlier; 0: no such suffix.
    int32_t match() const { return states_[last_].link < 0 ? 0 : states_[last_].link; }

    const State & state(int32_t at) const { return states_[at]; }
    const Edge & edge(int32_t at) const { return edges_[at]; }
    const std::vector<int32_t> & stream() const { return stream_; }
    int32_t prefix(size_t position) const { return prefixes_[position]; }
    size_t bytes() const;

  private:
    int32_t add_state(int32_t length, int32_t link, int32_t newest);
    void add_edge(int32_t state, int32_t token, int32_t to);
    int32_t find(int32_t state, int32_t token) const;
    void set_slot(int32_t edge);

    std::vector<State> states_;
    std::vector<Edge> edges_;
    std::vector<int32_t> slots_; // hash table of edges by (state, token), open addressing
    std::vector<int32_t> stream_;
    std::vector<int32_t> prefixes_;
    int32_t last_ = 0;
};

// Proposes continuations of a sequence's texts, and learns their probabilities from acceptance.
class SuffixIndex {
  public:
    // Each pair of a Kind and a class of match lengths has a learned acceptance rate.
    static constexpr int N_LENGTHS = 12;
    static constexpr int N_KINDS = 8;
    // Evidence for a guess. UNIQUE: the only token that followed the match; LATEST: the last of
    // several; ALTERNATIVE: another of them; SUBSTITUTION: the token that the target generated
    // instead in this context; OVERRIDDEN: the token so replaced; EARLIER_TEXT: a token that
    // followed in an earlier text; RESUMED: the continuation of a match that the target left;
    // NGRAM: a token of the n-gram table, whose class of probability stands for the match length.
    enum Kind {
        UNIQUE,
        LATEST,
        ALTERNATIVE,
        SUBSTITUTION,
        OVERRIDDEN,
        EARLIER_TEXT,
        RESUMED,
        NGRAM
    };
    struct Outcome {
        double tried, accepted;
    };
    using Outcomes = std::array<Outcome, N_LENGTHS * N_KINDS>;

    // Keeps at most max_tokens tokens; a full index drops its older half. ngrams: an n-gram table,
    // whose tokens the index proposes too; it must outlive the index; NULL: no table.
    explicit SuffixIndex(size_t max_tokens, const NgramTable * ngrams = nullptr)
        : ngrams_(ngrams), priors_(initial_outcomes(ngrams)), outcomes_(priors_),
          max_tokens_(max_tokens) {}

    // Appends tokens. is_generated: true if the target generated them, so that guesses are scored.
    void append(const int32_t * tokens, size_t n, bool is_generated);
    // Ends the current text; no match crosses its end.
    void separate();

    size_t size() const { return automaton_.stream().size(); }
    size_t bytes() const;
    int32_t match_length() const { return automaton_.state(automaton_.match()).length; }
    const Outcomes & outcomes() const { return outcomes_; }
    void set_outcomes(const Outcomes & outcomes) { outcomes_ = outcomes; }

    struct Query {
        const SuffixIndex * index;
        size_t max_depth, max_nodes;
    };
    struct Node {
        int32_t token, parent, depth;
        double log_prob; // sum of log-probabilities over the path from the root
    };
    // Returns a tree of the most probable guesses for each query; NodeSelector limits all trees
    // together. A root is its text's last token (parent -1); a tree without guesses is empty.
    static std::vector<std::vector<Node>> propose(const std::vector<Query> & queries,
                                                  const BreakEven & break_even);

  private:
    // A token that may follow a match; state and length of the match extended by the token.
    struct Guess {
        int32_t token, match_length, state, length;
        Kind kind;
    };
    static constexpr int MAX_GUESSES = 6 + NgramTable::MAX_FOLLOWERS, MAX_PER_STATE = 4;
    struct Guesses {
        std::array<Guess, MAX_GUESSES> all;
        int n = 0;
        uint64_t context = 0; // hash of the 3 tokens after the match: key of substitutions_
        int32_t token = -1;
    };
    // A match that is followed: position of its next token (0: none) and length in tokens.
    struct Match {
        int32_t next = 0, length = 0;
    };
    Guesses guesses(int32_t state, int32_t length) const;
    Guesses guesses() const;
    // Adds the n-gram table's guesses of the token after a run and a match.
    void add_ngrams(const NgramTable::Run & run, int32_t state, int32_t length,
                    Guesses & list) const;
    NgramTable::Run end_of_text() const;
    // Returns a guess whose match is the longest suffix of a match that its token ever followed.
    Guess guess_after(int32_t state, int32_t length, int32_t token, int32_t match_length,
                      Kind kind) const;
    void add(const Guess & guess, Guesses & list) const;
    int32_t match_in_text() const; // state of the longest match within this text
    Match find_resumption() const;
    void follow(int32_t token);
    void resume();
    static size_t outcome_class(const Guess & guess);
    double log_prob(const Guess & guess) const;
    void learn(int32_t token);
    void forget();

    SuffixAutomaton automaton_;
    const NgramTable * ngrams_;
    Outcomes priors_, outcomes_;
    // Tokens generated in place of guesses, by context: a rename occurs many times in a text.
    std::unordered_map<uint64_t, int32_t> substitutions_;
    size_t max_tokens_;
    int32_t n_separators_ = 0;
    int32_t text_begin_ = 0; // position where the current text begins
    Match match_;
    int32_t left_ = -1; // next position of the match when the target left it; -1: not left
    int32_t since_ = 0; // length of the stream when the target left the match

    static Outcomes initial_outcomes(const NgramTable * ngrams);
};

} // namespace dfl
