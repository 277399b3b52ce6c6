// Copies of a text so far as a draft: where its end stood before, what came next may come again.
#pragma once

#include "speculative/node_selection.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace dfl {

// The suffix automaton of a stream of tokens (Blumer et al., 1985): a state for every set of places
// that some strings of it end at, so that the longest end of the stream that also stands earlier is
// always known. Appending is amortised constant time; 2 states and 3 edges a token at most.
class SuffixAutomaton {
  public:
    struct State {
        int32_t length; // of its longest string
        int32_t link;   // the state of that string's longest end that stands in more places
        int32_t newest; // the last place that it is known to end at, the present one left out
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

    // The longest end of the stream that ends earlier as well; the empty string's is 0.
    int32_t match() const { return states_[last_].link < 0 ? 0 : states_[last_].link; }

    const State & state(int32_t at) const { return states_[at]; }
    const Edge & edge(int32_t at) const { return edges_[at]; }
    const std::vector<int32_t> & stream() const { return stream_; }
    // The state of the stream up to a place.
    int32_t prefix(size_t place) const { return prefixes_[place]; }
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
    std::vector<int32_t> prefixes_; // states of the stream's beginnings
    int32_t last_ = 0;              // the state of the whole stream
};

// Copies of one timeline's texts, with chances learned from how often such copies came true.
class Copies {
  public:
    // Chances depend on how long the match is and what kind of a guess it is.
    static constexpr int n_lengths = 12; // classes of match lengths
    static constexpr int n_kinds = 7;    // of Kind
    // What followed the match: always the same, the newest of several, or another of them. Where
    // the target last took something else in place of that: this, or all the same what is there.
    // What followed in an older text. How a copy goes on where the target has left it lately.
    enum Kind { same, newest, other, replacing, replaced, older, resumed };
    struct Outcome {
        double tried, taken;
    };
    using Outcomes = std::array<Outcome, n_lengths * n_kinds>;

    // n_most: tokens remembered; older ones are forgotten, half of it at a time.
    explicit Copies(size_t n_most) : n_most_(n_most) {}

    // The stream goes on. is_chosen: by the target, so that they tell how good copies are.
    void append(const int32_t * tokens, size_t n, bool is_chosen);
    // What follows has nothing to do with what came before: no copy goes across.
    void separate();

    size_t size() const { return automaton_.stream().size(); }
    size_t bytes() const;
    int32_t match_length() const { return automaton_.state(automaton_.match()).length; }
    const Outcomes & outcomes() const { return outcomes_; }
    void set_outcomes(const Outcomes & outcomes) { outcomes_ = outcomes; }

    // One text's part in a round: copies no deeper than n_positions, and so many of them at most.
    struct Asked {
        const Copies * text;
        size_t n_positions, n_nodes;
    };
    struct Node {
        int32_t token, parent, depth;
        double log_chance; // of the path
    };
    // The likeliest copies of each text, parents first; of all together as many as are worth a
    // pass. A tree has its root, the text's last token with the parent -1, where it has any other
    // node.
    static std::vector<std::vector<Node>> propose(const std::vector<Asked> & asked,
                                                  const Worth & worth);

  private:
    // token: after a match of so many tokens. state, length: of what agrees after it.
    struct Guess {
        int32_t token, match, state, length;
        Kind kind;
    };
    static constexpr int most_guesses = 6, most_of_end = 4;
    struct Guesses {
        std::array<Guess, most_guesses> all;
        int n = 0;
        uint64_t place = 0; // of what followed the match last
        int32_t token = -1; // what that was
    };
    // Of a copy: the place of what comes next, none at 0, and how many tokens have agreed.
    struct Place {
        int32_t next = 0, n = 0;
    };
    Guesses guesses(int32_t state, int32_t length) const;
    Guesses guesses() const;
    void add(const Guess & guess, Guesses & found) const;
    int32_t match_here() const; // the longest end that stands in this text as well
    Place resumption() const;
    void follow(int32_t token);
    void resume();
    double log_chance(const Guess & guess) const;
    void learn(int32_t token);
    void forget();

    SuffixAutomaton automaton_;
    Outcomes outcomes_ = initial();
    // Where a copy last was wrong, what was right: names are changed in more places than one.
    std::unordered_map<uint64_t, int32_t> replacing_;
    size_t n_most_;
    int32_t n_separators_ = 0;
    int32_t begin_ = 0; // place of this text's beginning, after older ones
    Place copy_;        // that goes on, or was left at a place (-1: it was not) for other tokens
    int32_t left_ = -1, since_ = 0;

    static Outcomes initial();
};

} // namespace dfl
