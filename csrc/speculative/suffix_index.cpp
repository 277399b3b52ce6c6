#include "speculative/suffix_index.h"

#include <algorithm>
#include <cmath>
#include <queue>

namespace dfl {

namespace {

// Largest number of shorter suffixes whose State::newest is updated at each append: a text that
// repeats one token has as many suffixes as tokens.
constexpr int MAX_LINKS = 16;
// Largest number of a state's edges that are searched for alternative next tokens.
constexpr int MAX_EDGES = 8;
// Acceptance rates of guesses: number of outcomes after which an older outcome weighs 1/e (MEMORY),
// and number of outcomes that a prior weighs.
constexpr double MEMORY = 64.0, PRIOR_WEIGHT = 4.0;
// Tokens that must agree to follow a match (MIN_MATCH), to leave it for a match elsewhere, and to
// resume it (MIN_RESUMED). Matches of MAX_RESUMED tokens need no RESUMED guess.
constexpr int32_t MIN_MATCH = 4, MIN_MATCH_ELSEWHERE = 16, MIN_RESUMED = 2, MAX_RESUMED = 16;
// Largest distance back and ahead at which a match that was left may resume.
constexpr int32_t MAX_BACK = 16, MAX_AHEAD = 64;

size_t slot_of(int32_t state, int32_t token) {
    const uint64_t key = (uint64_t(uint32_t(state)) << 32) | uint32_t(token);
    return size_t((key * 0x9E3779B97F4A7C15ull) >> 20);
}

uint64_t context_of(const std::vector<int32_t> & stream, size_t at) {
    uint64_t context = 0;
    for (size_t i = at; i < at + 3; ++i) {
        const int32_t token = i < stream.size() ? stream[i] : -1;
        context = (context ^ uint32_t(token)) * 0x9E3779B97F4A7C15ull;
        context ^= context >> 29;
    }
    return context;
}

int length_class(int32_t length) {
    constexpr int32_t ends[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48};
    return int(std::lower_bound(std::begin(ends), std::end(ends), length) - std::begin(ends));
}

} // namespace

void SuffixAutomaton::clear() {
    states_.clear();
    edges_.clear();
    slots_.assign(64, -1);
    stream_.clear();
    prefixes_.clear();
    last_ = 0;
    add_state(0, -1, -1);
}

int32_t SuffixAutomaton::add_state(int32_t length, int32_t link, int32_t newest) {
    states_.push_back({length, link, newest, -1});
    return int32_t(states_.size()) - 1;
}

void SuffixAutomaton::set_slot(int32_t edge) {
    const size_t mask = slots_.size() - 1;
    size_t slot = slot_of(edges_[edge].state, edges_[edge].token) & mask;
    while (slots_[slot] >= 0) {
        slot = (slot + 1) & mask;
    }
    slots_[slot] = edge;
}

void SuffixAutomaton::add_edge(int32_t state, int32_t token, int32_t to) {
    if (2 * (edges_.size() + 1) > slots_.size()) {
        slots_.assign(2 * slots_.size(), -1);
        for (int32_t edge = 0; edge < int32_t(edges_.size()); ++edge) {
            set_slot(edge);
        }
    }
    edges_.push_back({state, token, to, states_[state].first});
    states_[state].first = int32_t(edges_.size()) - 1;
    set_slot(states_[state].first);
}

int32_t SuffixAutomaton::find(int32_t state, int32_t token) const {
    const size_t mask = slots_.size() - 1;
    for (size_t slot = slot_of(state, token) & mask; slots_[slot] >= 0; slot = (slot + 1) & mask) {
        const Edge & edge = edges_[slots_[slot]];
        if (edge.state == state && edge.token == token) {
            return slots_[slot];
        }
    }
    return -1;
}

int32_t SuffixAutomaton::follow(int32_t state, int32_t token) const {
    const int32_t edge = find(state, token);
    return edge < 0 ? -1 : edges_[edge].to;
}

void SuffixAutomaton::append(int32_t token) {
    // The present end of the stream becomes an earlier occurrence of its suffixes.
    const int32_t end = int32_t(stream_.size()) - 1;
    int32_t at = last_;
    for (int n = 0; n < MAX_LINKS && at > 0; ++n, at = states_[at].link) {
        states_[at].newest = end;
    }
    stream_.push_back(token);

    const int32_t added = add_state(states_[last_].length + 1, 0, -1);
    for (at = last_; at >= 0; at = states_[at].link) {
        const int32_t edge = find(at, token);
        if (edge < 0) {
            add_edge(at, token, added);
            continue;
        }
        const int32_t next = edges_[edge].to;
        if (states_[next].length == states_[at].length + 1) {
            states_[added].link = next;
            break;
        }
        // Substrings of state `next` that also end at the new token get a state of their own.
        const int32_t split =
            add_state(states_[at].length + 1, states_[next].link, states_[next].newest);
        for (int32_t e = states_[next].first; e >= 0; e = edges_[e].next) {
            add_edge(split, edges_[e].token, edges_[e].to);
        }
        states_[next].link = states_[added].link = split;
        for (; at >= 0; at = states_[at].link) {
            const int32_t old = find(at, token);
            if (old < 0 || edges_[old].to != next) {
                break;
            }
            edges_[old].to = split;
        }
        break;
    }
    last_ = added;
    prefixes_.push_back(added);
}

size_t SuffixAutomaton::bytes() const {
    return states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) +
           (slots_.capacity() + stream_.capacity() + prefixes_.capacity()) * sizeof(int32_t);
}

SuffixIndex::Outcomes SuffixIndex::initial_outcomes(const NgramTable * ngrams) {
    constexpr double unique_probs[N_LENGTHS] = {0.1, 0.3,  0.4, 0.5, 0.6,  0.7,
                                                0.8, 0.85, 0.9, 0.9, 0.93, 0.95};
    constexpr double kind_factors[N_KINDS] = {1.0, 0.7, 0.2, 0.6, 0.3, 1.0, 0.9, 1.0};
    Outcomes outcomes;
    for (int kind = 0; kind < N_KINDS; ++kind) {
        for (int length = 0; length < N_LENGTHS; ++length) {
            const bool is_ngram = kind == Kind::NGRAM && ngrams != nullptr;
            const double prob = is_ngram ? double(ngrams->probs()[size_t(length)])
                                         : unique_probs[length] * kind_factors[kind];
            outcomes[kind * N_LENGTHS + length] = {PRIOR_WEIGHT, PRIOR_WEIGHT * prob};
        }
    }
    return outcomes;
}

size_t SuffixIndex::outcome_class(const Guess & guess) {
    const bool is_ngram = guess.kind == Kind::NGRAM;
    return size_t(guess.kind * N_LENGTHS +
                  (is_ngram ? guess.match_length : length_class(guess.match_length)));
}

double SuffixIndex::log_prob(const Guess & guess) const {
    const Outcome & outcome = outcomes_[outcome_class(guess)];
    return std::log(outcome.accepted / outcome.tried);
}

SuffixIndex::Guess SuffixIndex::guess_after(int32_t state, int32_t length, int32_t token,
                                            int32_t match_length, Kind kind) const {
    int32_t to = state;
    while (to > 0 && automaton_.follow(to, token) < 0) {
        to = automaton_.state(to).link;
    }
    const int32_t after = automaton_.follow(to, token);
    const int32_t agrees = to == state ? length : automaton_.state(to).length;
    return {token, match_length, std::max(after, 0), after < 0 ? 0 : agrees + 1, kind};
}

void SuffixIndex::add_ngrams(const NgramTable::Run & run, int32_t state, int32_t length,
                             Guesses & list) const {
    if (ngrams_ == nullptr) {
        return;
    }
    const NgramTable::Followers followers = ngrams_->followers(run);
    for (int i = 0; i < followers.n; ++i) {
        const auto [token, prob_class] = followers.all[size_t(i)];
        add(guess_after(state, length, token, prob_class, Kind::NGRAM), list);
    }
}

NgramTable::Run SuffixIndex::end_of_text() const {
    const std::vector<int32_t> & stream = automaton_.stream();
    NgramTable::Run run;
    for (size_t i = 0; i < run.size(); ++i) {
        run[i] = i < stream.size() ? stream[stream.size() - 1 - i] : -1;
    }
    return run;
}

// Returns guesses of the token after a match that ends in an automaton state: its latest
// continuation, the target's substitution for that, and others. If nothing followed the match, a
// shorter suffix serves. length: tokens of the match, drafted tokens included.
SuffixIndex::Guesses SuffixIndex::guesses(int32_t state, int32_t length) const {
    const std::vector<int32_t> & stream = automaton_.stream();
    Guesses result;
    for (int32_t at = state; at > 0; at = automaton_.state(at).link) {
        const SuffixAutomaton::State & here = automaton_.state(at);
        const size_t next = size_t(here.newest + 1);
        if (here.newest < 0 || next >= stream.size() || stream[next] < 0) {
            continue;
        }
        const int32_t match = at == state ? length : here.length;
        result.token = stream[next];
        result.context = context_of(stream, next);
        const auto substitution = substitutions_.find(result.context);
        const bool is_overridden =
            substitution != substitutions_.end() && substitution->second != result.token;
        if (is_overridden) {
            result.all[result.n++] =
                guess_after(at, match, substitution->second, match, Kind::SUBSTITUTION);
        }
        Guess & last = result.all[result.n++];
        int n_edges = 0;
        for (int32_t e = here.first; e >= 0 && n_edges < MAX_EDGES; e = automaton_.edge(e).next) {
            const SuffixAutomaton::Edge & edge = automaton_.edge(e);
            ++n_edges;
            const bool is_substitution = is_overridden && edge.token == substitution->second;
            if (edge.token != result.token && edge.token >= 0 && !is_substitution &&
                result.n < MAX_PER_STATE) {
                result.all[result.n++] = {edge.token, match, edge.to, match + 1, Kind::ALTERNATIVE};
            }
        }
        const Kind kind = is_overridden               ? Kind::OVERRIDDEN
                          : here.newest < text_begin_ ? Kind::EARLIER_TEXT
                          : n_edges > 1               ? Kind::LATEST
                                                      : Kind::UNIQUE;
        last = {result.token, match, automaton_.follow(at, result.token), match + 1, kind};
        break;
    }
    return result;
}

// Adds a guess to a list; of two guesses of one token, the more probable stays.
void SuffixIndex::add(const Guess & guess, Guesses & list) const {
    const auto end = list.all.begin() + list.n;
    const auto same = std::find_if(list.all.begin(), end,
                                   [&](const Guess & other) { return other.token == guess.token; });
    if (same != end) {
        *same = log_prob(guess) > log_prob(*same) ? guess : *same;
    } else if (list.n < MAX_GUESSES) {
        list.all[size_t(list.n++)] = guess;
    }
}

int32_t SuffixIndex::match_in_text() const {
    int32_t at = automaton_.match();
    while (at > 0 && automaton_.state(at).newest < text_begin_) {
        at = automaton_.state(at).link;
    }
    return at;
}

// Finds where a match that was left resumes: the position near left_ where most tokens generated
// since then agree. A single token need not agree: it may replace a token of the match.
SuffixIndex::Match SuffixIndex::find_resumption() const {
    const std::vector<int32_t> & stream = automaton_.stream();
    const int32_t size = int32_t(stream.size()), n_since = size - since_;
    Match best{n_since == 1 ? left_ + 1 : 0, 0};
    const auto consider = [&](int32_t next) {
        int32_t n = 0;
        while (n < std::min(n_since, next) &&
               stream[size_t(next - 1 - n)] == stream[size_t(size - 1 - n)]) {
            ++n;
        }
        if (n > best.length) {
            best = {next, n};
        }
    };
    for (int32_t next = left_; next < std::min(left_ + MAX_AHEAD, since_); ++next) {
        consider(next);
    }
    for (int32_t next = left_ - 1; next > std::max(left_ - MAX_BACK, 0); --next) {
        consider(next);
    }
    return best;
}

// Returns the tokens that followed earlier occurrences of the suffix: the longest match in all
// texts, the longest in the current text, and the match that the text has been repeating so far.
SuffixIndex::Guesses SuffixIndex::guesses() const {
    const std::vector<int32_t> & stream = automaton_.stream();
    const int32_t match = automaton_.match(), here = match_in_text();
    Guesses result = guesses(match, automaton_.state(match).length);
    if (here != match && here > 0) {
        const Guesses present = guesses(here, automaton_.state(here).length);
        if (present.n > 0) { // substitutions are learned in the present text only
            result.token = present.token, result.context = present.context;
        }
        for (int i = 0; i < present.n; ++i) {
            if (present.all[size_t(i)].kind != Kind::ALTERNATIVE) {
                add(present.all[size_t(i)], result);
            }
        }
    }
    const Match resumed = left_ < 0 ? match_ : find_resumption();
    const size_t next = size_t(resumed.next);
    if (resumed.next > 0 && resumed.length < MAX_RESUMED && next < stream.size() &&
        stream[next] >= 0) {
        add({stream[next], resumed.length, automaton_.prefix(next), resumed.length + 1,
             Kind::RESUMED},
            result);
    }
    add_ngrams(end_of_text(), match, automaton_.state(match).length, result);
    return result;
}

// Advances the followed match by a token, leaves it on a mismatch, or begins another match.
void SuffixIndex::follow(int32_t token) {
    const std::vector<int32_t> & stream = automaton_.stream();
    const auto is_next = [&](int32_t next) {
        return size_t(next) < stream.size() && stream[size_t(next)] == token;
    };
    if (match_.next > 0 && left_ < 0) {
        if (is_next(match_.next)) {
            ++match_.next, ++match_.length;
            return;
        }
        left_ = match_.next, since_ = int32_t(stream.size());
    }
    const SuffixAutomaton::State & match = automaton_.state(match_in_text());
    const int32_t min_length = match_.next > 0 ? MIN_MATCH_ELSEWHERE : MIN_MATCH;
    if (match.length + 1 >= min_length && is_next(match.newest + 1)) {
        match_ = {match.newest + 2, match.length + 1};
        left_ = -1;
    }
}

// Resumes a match that was left if enough tokens agree; gives the match up after MAX_AHEAD tokens.
void SuffixIndex::resume() {
    const Match match = find_resumption();
    if (match.length >= MIN_RESUMED) {
        match_ = match;
        left_ = -1;
    } else if (int32_t(size()) - since_ > MAX_AHEAD) {
        match_ = {};
        left_ = -1;
    }
}

void SuffixIndex::learn(int32_t token) {
    const Guesses predictions = guesses();
    follow(token);
    if (predictions.n == 0) {
        return;
    }
    const double decay = 1.0 - 1.0 / MEMORY;
    for (int i = 0; i < predictions.n; ++i) {
        const Guess & guess = predictions.all[size_t(i)];
        const Outcome & prior = priors_[outcome_class(guess)];
        Outcome & outcome = outcomes_[outcome_class(guess)];
        outcome.tried = decay * outcome.tried + (1.0 - decay) * prior.tried + 1.0;
        outcome.accepted = decay * outcome.accepted + (1.0 - decay) * prior.accepted +
                           (guess.token == token ? 1.0 : 0.0);
    }
    if (predictions.token < 0) {
        return; // the text has no continuation that the token could have replaced
    }
    if (predictions.token == token) {
        substitutions_.erase(predictions.context);
    } else {
        substitutions_[predictions.context] = token;
    }
}

size_t SuffixIndex::bytes() const {
    return automaton_.bytes() + substitutions_.size() * sizeof(*substitutions_.begin());
}

void SuffixIndex::append(const int32_t * tokens, size_t n, bool is_generated) {
    for (size_t i = 0; i < n; ++i) {
        if (size() >= max_tokens_) {
            forget();
        }
        if (is_generated) {
            learn(tokens[i]);
        }
        automaton_.append(tokens[i]);
        if (!is_generated) {
            match_ = {};
            left_ = -1;
        } else if (left_ >= 0) {
            resume();
        }
    }
}

void SuffixIndex::separate() {
    if (size() > 0) {
        const int32_t separator = -1 - n_separators_++; // unique, so no match contains a separator
        append(&separator, 1, false);
    }
    text_begin_ = int32_t(size());
}

void SuffixIndex::forget() {
    const std::vector<int32_t> & stream = automaton_.stream();
    const std::vector<int32_t> tail(stream.end() - std::ptrdiff_t(stream.size() / 2), stream.end());
    text_begin_ = std::max(text_begin_ - int32_t(stream.size() - tail.size()), 0);
    automaton_.clear();
    substitutions_.clear();
    match_ = {};
    left_ = -1;
    for (const int32_t token : tail) {
        automaton_.append(token);
    }
}

std::vector<std::vector<SuffixIndex::Node>> SuffixIndex::propose(const std::vector<Query> & queries,
                                                                 const BreakEven & break_even) {
    struct OpenNode {
        double log_prob;
        int32_t text, parent, token, state, length, depth;
        NgramTable::Run run; // end of the text with the node's token
        bool operator<(const OpenNode & other) const {
            if (log_prob != other.log_prob) {
                return log_prob < other.log_prob;
            }
            return text != other.text ? text > other.text : parent > other.parent;
        }
    };
    NodeSelector selector(break_even, 0.0);
    std::priority_queue<OpenNode> frontier;
    const auto expand = [&](const Guesses & guesses, double log_path, int32_t text, int32_t parent,
                            int32_t depth, const NgramTable::Run & run) {
        for (int i = 0; i < guesses.n; ++i) {
            const Guess & guess = guesses.all[size_t(i)];
            const double log_prob = log_path + queries[size_t(text)].index->log_prob(guess);
            frontier.push({log_prob,
                           text,
                           parent,
                           guess.token,
                           guess.state,
                           guess.length,
                           depth + 1,
                           {guess.token, run[0], run[1]}});
        }
    };
    for (size_t i = 0; i < queries.size(); ++i) {
        const Query & of = queries[i];
        const bool has_any = of.index->automaton_.match() != 0 || of.index->ngrams_ != nullptr;
        if (has_any && of.max_depth > 0 && of.max_nodes > 0) {
            expand(of.index->guesses(), 0.0, int32_t(i), 0, 0, of.index->end_of_text());
        }
    }
    struct ProposedNode {
        Node node;
        int32_t text;
        bool is_chain;
    };
    std::vector<ProposedNode> nodes;
    std::vector<int32_t> counts(queries.size(), 0), ends(queries.size(), 0);
    while (!frontier.empty()) {
        const OpenNode node = frontier.top();
        frontier.pop();
        const double prob = std::exp(node.log_prob);
        if (!selector.can_improve(prob)) {
            break;
        }
        const size_t text = size_t(node.text);
        if (size_t(counts[text]) == queries[text].max_nodes) {
            continue;
        }
        const int32_t number = ++counts[text];
        const bool is_chain = node.parent == ends[text];
        if (is_chain) {
            ends[text] = number;
        }
        nodes.push_back(
            {{node.token, node.parent, node.depth, node.log_prob}, node.text, is_chain});
        selector.add(prob, is_chain);
        if (size_t(node.depth) < queries[text].max_depth) {
            const SuffixIndex & index = *queries[text].index;
            Guesses guesses = index.guesses(node.state, node.length);
            index.add_ngrams(node.run, node.state, node.length, guesses);
            expand(guesses, node.log_prob, node.text, number, node.depth, node.run);
        }
    }
    std::vector<std::vector<Node>> trees(queries.size());
    size_t n_left = selector.n();
    for (const ProposedNode & one : nodes) {
        if (n_left == 0) {
            break;
        }
        if (!selector.is_tree() && !one.is_chain) {
            continue;
        }
        std::vector<Node> & tree = trees[size_t(one.text)];
        if (tree.empty()) {
            tree.push_back(
                {queries[size_t(one.text)].index->automaton_.stream().back(), -1, 0, 0.0});
        }
        tree.push_back(one.node);
        if (!selector.is_tree()) {
            tree.back().parent = int32_t(tree.size()) - 2;
        }
        --n_left;
    }
    return trees;
}

} // namespace dfl
