// Drafts from the text itself: what followed earlier occurrences of its longest repeated suffix.
#pragma once

#include "speculative/node_selection.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace dfl {

// The suffix automaton of a stream of tokens (Blumer et al., 1985): a state for every set of
// positions that some of its substrings end at, so that the longest suffix of the stream that
// occurs earlier is always known. Appending is amortised constant time; 2 states and 3 edges a
// token at most.
class SuffixAutomaton {
  public:
    struct State {
        int32_t length; // length of its longest substring
        int32_t link; // the state of that substring's longest suffix that occurs at more positions
        int32_t newest; // the last known position that it ends at, the end of the stream excluded
        int32_t first;  // edge, -1 for none; the others follow by Edge::next
    };
    struct Edge {
        int32_t state, token; // from where, and by which token
        int32_t to, next;
    };

    SuffixAutomaton() { clear(); }

    void clear();
    void append(int32_t token);

    // The state after a state and a token, -1 if they never followed.
    int32_t follow(int32_t state, int32_t token) const;

    // The state of the longest suffix of the stream that occurs earlier; 0: the empty one.
    int32_t match() const { return states_[last_].link < 0 ? 0 : states_[last_].link; }

    const State & state(int32_t at) const { return states_[at]; }
    const Edge & edge(int32_t at) const { return edges_[at]; }
    const std::vector<int32_t> & stream() const { return stream_; }
    // The state of the stream up to a position.
    int32_t prefix(size_t position) const { return prefixes_[position]; }
    size_t bytes() const;

  private:
    int32_t add_state(int32_t length, int32_t link, int32_t newest);
    void add_edge(int32_t state, int32_t token, int32_t to);
    int32_t find(int32_t state, int32_t token) const;
    void set_slot(int32_t edge);

    std::vector<State> states_;
    std::vector<Edge> edges_;
    std::vector<int32_t> slots_; // edges by the hash of (state, token), open addressing
    std::vector<int32_t> stream_;
    std::vector<int32_t> prefixes_; // states of the stream's prefixes
    int32_t last_ = 0;              // the state of the whole stream
};

// Proposes continuations of one sequence's texts, with probabilities learned from how often such
// guesses were accepted.
class SuffixIndex {
  public:
    // The probability of a guess depends on the length of its match and on its kind.
    static constexpr int N_LENGTHS = 12; // classes of match lengths
    static constexpr int N_KINDS = 7;    // of Kind
    // Evidence for a guess: the only token that ever followed the match; the latest of several; one
    // of the others; the token that the target generated instead at the same context before; the
    // token that was so replaced; a token that followed in an earlier text; the continuation of a
    // match that the target has left lately.
    enum Kind { UNIQUE, LATEST, ALTERNATIVE, SUBSTITUTION, OVERRIDDEN, EARLIER_TEXT, RESUMED };
    struct Outcome {
        double tried, accepted;
    };
    using Outcomes = std::array<Outcome, N_LENGTHS * N_KINDS>;

    // Keeps at most max_tokens tokens; the older half is dropped when they are full.
    explicit SuffixIndex(size_t max_tokens) : max_tokens_(max_tokens) {}

    // Appends tokens. is_generated: by the target, so that the outcomes of guesses are updated.
    void append(const int32_t * tokens, size_t n, bool is_generated);
    // Ends the text: no match crosses its end.
    void separate();

    size_t size() const { return automaton_.stream().size(); }
    size_t bytes() const;
    int32_t match_length() const { return automaton_.state(automaton_.match()).length; }
    const Outcomes & outcomes() const { return outcomes_; }
    void set_outcomes(const Outcomes & outcomes) { outcomes_ = outcomes; }

    // One text's part in a round, and the limits of its tree.
    struct Query {
        const SuffixIndex * index;
        size_t max_depth, max_nodes;
    };
    struct Node {
        int32_t token, parent, depth;
        double log_prob; // of the path
    };
    // Returns a tree of the likeliest guesses for each text, parents first; of all together as many
    // nodes as NodeSelector takes. The root is the text's last token with the parent -1; a tree
    // without guesses is empty.
    static std::vector<std::vector<Node>> propose(const std::vector<Query> & queries,
                                                  const BreakEven & break_even);

  private:
    // A token that may follow a match, and the state and length of the match that it extends.
    struct Guess {
        int32_t token, match_length, state, length;
        Kind kind;
    };
    static constexpr int MAX_GUESSES = 6, MAX_PER_STATE = 4;
    struct Guesses {
        std::array<Guess, MAX_GUESSES> all;
        int n = 0;
        uint64_t context = 0; // hash of the token that followed the match last and those after it
        int32_t token = -1;   // that token
    };
    // A match that is followed: the position of its next token, 0 for none, and its length.
    struct Match {
        int32_t next = 0, length = 0;
    };
    Guesses guesses(int32_t state, int32_t length) const;
    Guesses guesses() const;
    void add(const Guess & guess, Guesses & list) const;
    int32_t match_in_text() const; // longest match within this text
    Match find_resumption() const;
    void follow(int32_t token);
    void resume();
    double log_prob(const Guess & guess) const;
    void learn(int32_t token);
    void forget();

    SuffixAutomaton automaton_;
    Outcomes outcomes_ = initial_outcomes();
    // Tokens generated in place of guesses, by their contexts: names are changed more than once.
    std::unordered_map<uint64_t, int32_t> substitutions_;
    size_t max_tokens_;
    int32_t n_separators_ = 0;
    int32_t text_begin_ = 0; // position where this text begins, after earlier ones
    Match match_;            // the match in use
    int32_t left_ = -1;      // position where the target left it; -1: it did not
    int32_t since_ = 0;      // position of the text at that time

    static Outcomes initial_outcomes();
};

} // namespace dfl
