#include "speculative/suffix_index.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>

namespace dfl {

namespace {

// Places of shorter ends than so many links away are not updated: a text of one token over and over
// would have a link for each.
constexpr int most_links = 16;
// An ambiguous state looks at so many of its edges for other continuations.
constexpr int most_edges = 8;
// Outcomes of a class after which one weighs 1/e, and how many its first guess counts as.
constexpr double memory = 64.0, prior_weight = 4.0;
// A copy begins where so many tokens agree, at another place than the last one where many do, and
// goes on near where it was left where a few do; by its length matches tell no less than it does.
constexpr int32_t least_copy = 4, least_elsewhere = 16, least_resumed = 2, most_resumed = 16;
// How far before and behind that place it may go on.
constexpr int32_t most_back = 16, most_ahead = 64;

size_t slot_of(int32_t state, int32_t token) {
    const uint64_t key = (uint64_t(uint32_t(state)) << 32) | uint32_t(token);
    return size_t((key * 0x9E3779B97F4A7C15ull) >> 20);
}

// A place of a text, by the three tokens from it on.
uint64_t place_of(const std::vector<int32_t> & stream, size_t at) {
    uint64_t place = 0;
    for (size_t i = at; i < at + 3; ++i) {
        const int32_t token = i < stream.size() ? stream[i] : -1;
        place = (place ^ uint32_t(token)) * 0x9E3779B97F4A7C15ull;
        place ^= place >> 29;
    }
    return place;
}

// Classes of match lengths: 1, 2, 3, 4, to 6, 8, 12, 16, 24, 32, 48, more.
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
    // The present end becomes an earlier one.
    const int32_t place = int32_t(stream_.size()) - 1;
    int32_t at = last_;
    for (int n = 0; n < most_links && at > 0; ++n, at = states_[at].link) {
        states_[at].newest = place;
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
        // The strings of `next` that also end here become a state of their own.
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

Copies::Outcomes Copies::initial() {
    constexpr double same[n_lengths] = {0.1, 0.3,  0.4, 0.5, 0.6,  0.7,
                                        0.8, 0.85, 0.9, 0.9, 0.93, 0.95};
    constexpr double share[n_kinds] = {1.0, 0.7, 0.2, 0.6, 0.3, 1.0, 0.9};
    Outcomes found;
    for (int kind = 0; kind < n_kinds; ++kind) {
        for (int length = 0; length < n_lengths; ++length) {
            const double chance = same[length] * share[kind];
            found[kind * n_lengths + length] = {prior_weight, prior_weight * chance};
        }
    }
    return found;
}

double Copies::log_chance(const Guess & guess) const {
    const Outcome & outcome = outcomes_[guess.kind * n_lengths + length_class(guess.match)];
    return std::log(outcome.taken / outcome.tried);
}

// What followed a state last, and in place of it what the target took for it before; other tokens
// that followed. Where nothing did, since its text ended there or goes on at the end of all, a
// shorter end of it may tell. length: of what agrees, which is longer than the state's where a path
// has been added to it.
Copies::Guesses Copies::guesses(int32_t state, int32_t length) const {
    const std::vector<int32_t> & stream = automaton_.stream();
    Guesses found;
    for (int32_t at = state; at > 0; at = automaton_.state(at).link) {
        const SuffixAutomaton::State & here = automaton_.state(at);
        const size_t next = size_t(here.newest + 1);
        if (here.newest < 0 || next >= stream.size() || stream[next] < 0) {
            continue;
        }
        const int32_t match = at == state ? length : here.length;
        found.token = stream[next];
        found.place = place_of(stream, next);
        const auto replacing = replacing_.find(found.place);
        const bool is_replaced = replacing != replacing_.end() && replacing->second != found.token;
        if (is_replaced) {
            int32_t to = at;
            while (to > 0 && automaton_.follow(to, replacing->second) < 0) {
                to = automaton_.state(to).link;
            }
            const int32_t after = automaton_.follow(to, replacing->second);
            const int32_t agrees = to == at ? match : automaton_.state(to).length;
            found.all[found.n++] = {replacing->second, match, std::max(after, 0),
                                    after < 0 ? 0 : agrees + 1, Kind::replacing};
        }
        Guess & last = found.all[found.n++];
        int n_edges = 0;
        for (int32_t e = here.first; e >= 0 && n_edges < most_edges; e = automaton_.edge(e).next) {
            const SuffixAutomaton::Edge & edge = automaton_.edge(e);
            ++n_edges;
            const bool is_there = is_replaced && edge.token == replacing->second;
            if (edge.token != found.token && edge.token >= 0 && !is_there &&
                found.n < most_of_end) {
                found.all[found.n++] = {edge.token, match, edge.to, match + 1, Kind::other};
            }
        }
        const Kind kind = is_replaced            ? Kind::replaced
                          : here.newest < begin_ ? Kind::older
                          : n_edges > 1          ? Kind::newest
                                                 : Kind::same;
        last = {found.token, match, automaton_.follow(at, found.token), match + 1, kind};
        break;
    }
    return found;
}

// Of two guesses of one token the likelier one stays.
void Copies::add(const Guess & guess, Guesses & found) const {
    const auto end = found.all.begin() + found.n;
    const auto same = std::find_if(found.all.begin(), end,
                                   [&](const Guess & other) { return other.token == guess.token; });
    if (same != end) {
        *same = log_chance(guess) > log_chance(*same) ? guess : *same;
    } else if (found.n < most_guesses) {
        found.all[size_t(found.n++)] = guess;
    }
}

int32_t Copies::match_here() const {
    int32_t at = automaton_.match();
    while (at > 0 && automaton_.state(at).newest < begin_) {
        at = automaton_.state(at).link;
    }
    return at;
}

// After the target has left a copy: the place near that where most of what came since agrees, and
// how many tokens do. Nothing need agree where only one token has come: it stands for another.
Copies::Place Copies::resumption() const {
    const std::vector<int32_t> & stream = automaton_.stream();
    const int32_t size = int32_t(stream.size()), n_since = size - since_;
    Place best{n_since == 1 ? left_ + 1 : 0, 0};
    const auto look_at = [&](int32_t next) {
        int32_t n = 0;
        while (n < std::min(n_since, next) &&
               stream[size_t(next - 1 - n)] == stream[size_t(size - 1 - n)]) {
            ++n;
        }
        if (n > best.n) {
            best = {next, n};
        }
    };
    for (int32_t next = left_; next < std::min(left_ + most_ahead, since_); ++next) {
        look_at(next);
    }
    for (int32_t next = left_ - 1; next > std::max(left_ - most_back, 0); --next) {
        look_at(next);
    }
    return best;
}

// What followed the longest end of all and the longest one that stands in this text, and how a copy
// that was left goes on.
Copies::Guesses Copies::guesses() const {
    const std::vector<int32_t> & stream = automaton_.stream();
    const int32_t match = automaton_.match(), here = match_here();
    Guesses found = guesses(match, automaton_.state(match).length);
    if (here != match && here > 0) {
        const Guesses present = guesses(here, automaton_.state(here).length);
        if (present.n > 0) { // what is replaced are places of this text
            found.token = present.token, found.place = present.place;
        }
        for (int i = 0; i < present.n; ++i) {
            if (present.all[size_t(i)].kind != Kind::other) {
                add(present.all[size_t(i)], found);
            }
        }
    }
    const Place copy = left_ < 0 ? copy_ : resumption();
    const size_t next = size_t(copy.next);
    if (copy.next > 0 && copy.n < most_resumed && next < stream.size() && stream[next] >= 0) {
        add({stream[next], copy.n, automaton_.prefix(next), copy.n + 1, Kind::resumed}, found);
    }
    return found;
}

// The copy goes on, is left, or begins.
void Copies::follow(int32_t token) {
    const std::vector<int32_t> & stream = automaton_.stream();
    const auto is_next = [&](int32_t next) {
        return size_t(next) < stream.size() && stream[size_t(next)] == token;
    };
    if (copy_.next > 0 && left_ < 0) {
        if (is_next(copy_.next)) {
            ++copy_.next, ++copy_.n;
            return;
        }
        left_ = copy_.next, since_ = int32_t(stream.size());
    }
    const SuffixAutomaton::State & match = automaton_.state(match_here());
    const int32_t least = copy_.next > 0 ? least_elsewhere : least_copy;
    if (match.length + 1 >= least && is_next(match.newest + 1)) {
        copy_ = {match.newest + 2, match.length + 1};
        left_ = -1;
    }
}

// Takes up a copy that was left where some tokens agree, or gives it up.
void Copies::resume() {
    const Place found = resumption();
    if (found.n >= least_resumed) {
        copy_ = found;
        left_ = -1;
    } else if (int32_t(size()) - since_ > most_ahead) {
        copy_ = {};
        left_ = -1;
    }
}

void Copies::learn(int32_t token) {
    const Guesses found = guesses();
    follow(token);
    if (found.n == 0) {
        return;
    }
    const double keep = 1.0 - 1.0 / memory;
    static const Outcomes first = initial();
    for (int i = 0; i < found.n; ++i) {
        const Guess & guess = found.all[size_t(i)];
        const size_t place = size_t(guess.kind * n_lengths + length_class(guess.match));
        Outcome & outcome = outcomes_[place];
        outcome.tried = keep * outcome.tried + (1.0 - keep) * first[place].tried + 1.0;
        outcome.taken = keep * outcome.taken + (1.0 - keep) * first[place].taken +
                        (guess.token == token ? 1.0 : 0.0);
    }
    if (found.token == token) {
        replacing_.erase(found.place);
    } else {
        replacing_[found.place] = token;
    }
}

size_t Copies::bytes() const {
    return automaton_.bytes() + replacing_.size() * sizeof(*replacing_.begin());
}

void Copies::append(const int32_t * tokens, size_t n, bool is_chosen) {
    for (size_t i = 0; i < n; ++i) {
        if (size() >= n_most_) {
            forget();
        }
        if (is_chosen) {
            learn(tokens[i]);
        }
        automaton_.append(tokens[i]);
        if (!is_chosen) {
            copy_ = {};
            left_ = -1;
        } else if (left_ >= 0) {
            resume();
        }
    }
}

void Copies::separate() {
    if (size() > 0) {
        const int32_t separator = -1 - n_separators_++; // none is like another: no match has one
        append(&separator, 1, false);
    }
    begin_ = int32_t(size());
}

void Copies::forget() {
    const std::vector<int32_t> & stream = automaton_.stream();
    const std::vector<int32_t> kept(stream.end() - std::ptrdiff_t(stream.size() / 2), stream.end());
    begin_ = std::max(begin_ - int32_t(stream.size() - kept.size()), 0);
    automaton_.clear();
    replacing_.clear();
    copy_ = {};
    left_ = -1;
    for (const int32_t token : kept) {
        automaton_.append(token);
    }
}

std::vector<std::vector<Copies::Node>> Copies::propose(const std::vector<Asked> & asked,
                                                       const Worth & worth) {
    struct Open {
        double log_chance;
        int32_t text, parent, token, state, length, depth;
        bool operator<(const Open & other) const {
            if (log_chance != other.log_chance) {
                return log_chance < other.log_chance;
            }
            return text != other.text ? text > other.text : parent > other.parent;
        }
    };
    Pick pick(worth, 0.0);
    std::priority_queue<Open> open;
    const auto expand = [&](const Guesses & found, double log_path, int32_t text, int32_t parent,
                            int32_t depth) {
        for (int i = 0; i < found.n; ++i) {
            const Guess & guess = found.all[size_t(i)];
            const double log_chance = log_path + asked[size_t(text)].text->log_chance(guess);
            open.push(
                {log_chance, text, parent, guess.token, guess.state, guess.length, depth + 1});
        }
    };
    for (size_t i = 0; i < asked.size(); ++i) {
        const Asked & of = asked[i];
        if (of.text->automaton_.match() != 0 && of.n_positions > 0 && of.n_nodes > 0) {
            expand(of.text->guesses(), 0.0, int32_t(i), 0, 0);
        }
    }
    struct Found {
        Node node;
        int32_t text;
        bool is_chain;
    };
    std::vector<Found> found;
    std::vector<int32_t> counts(asked.size(), 0), ends(asked.size(), 0);
    while (!open.empty()) {
        const Open node = open.top();
        open.pop();
        const double chance = std::exp(node.log_chance);
        if (!pick.is_open(chance)) {
            break;
        }
        const size_t text = size_t(node.text);
        if (size_t(counts[text]) == asked[text].n_nodes) {
            continue;
        }
        const int32_t number = ++counts[text];
        const bool is_chain = node.parent == ends[text];
        if (is_chain) {
            ends[text] = number;
        }
        found.push_back(
            {{node.token, node.parent, node.depth, node.log_chance}, node.text, is_chain});
        pick.add(chance, is_chain);
        if (size_t(node.depth) < asked[text].n_positions) {
            expand(asked[text].text->guesses(node.state, node.length), node.log_chance, node.text,
                   number, node.depth);
        }
    }
    std::vector<std::vector<Node>> trees(asked.size());
    size_t left = pick.n();
    for (const Found & one : found) {
        if (left == 0) {
            break;
        }
        if (!pick.is_tree() && !one.is_chain) {
            continue;
        }
        std::vector<Node> & tree = trees[size_t(one.text)];
        if (tree.empty()) {
            tree.push_back({asked[size_t(one.text)].text->automaton_.stream().back(), -1, 0, 0.0});
        }
        tree.push_back(one.node);
        if (!pick.is_tree()) {
            tree.back().parent = int32_t(tree.size()) - 2;
        }
        --left;
    }
    return trees;
}

} // namespace dfl
