// SuffixIndex compared with a search of the whole text, over random streams.
#include "speculative/suffix_index.h"

#include "check.h"

#include <cstdio>
#include <random>

using namespace dfl;

namespace {

using Tokens = std::vector<int32_t>;

bool ends_at(const Tokens & text, size_t place, size_t length) {
    for (size_t i = 0; i < length; ++i) {
        if (text[place - i] != text[text.size() - 1 - i]) {
            return false;
        }
    }
    return true;
}

// Returns the length of the longest suffix that occurs earlier in the text.
size_t longest_match(const Tokens & text) {
    size_t longest = 0;
    for (size_t place = 0; place + 1 < text.size(); ++place) {
        while (longest <= place && ends_at(text, place, longest + 1)) {
            ++longest;
        }
    }
    return longest;
}

void finds_the_longest_match(int n_kinds) {
    std::mt19937 random(static_cast<unsigned>(n_kinds));
    SuffixIndex index(4096);
    Tokens text;
    for (int i = 0; i < 400; ++i) {
        text.push_back(static_cast<int32_t>(random() % unsigned(n_kinds)));
        index.append(&text.back(), 1, i % 3 == 0);
        CHECK(size_t(index.match_length()) == longest_match(text));
        const auto found = SuffixIndex::propose({{&index, 5, 16}}, dfl::BreakEven{})[0];
        const size_t n = found.size();
        CHECK(n <= 17 && n != 1 && (n > 1) == (index.match_length() > 0));
        CHECK(n == 0 || (found[0].parent == -1 && found[0].token == text.back()));
        for (size_t node = 1; node < n; ++node) {
            const size_t parent = size_t(found[node].parent);
            CHECK(parent < node && found[node].token >= 0 && found[node].log_prob <= 0.0);
            CHECK(found[node].depth == found[parent].depth + 1 && found[node].depth <= 5);
        }
    }
}

void forgets_and_separates() {
    std::mt19937 random(9);
    SuffixIndex index(64);
    for (int i = 0; i < 2000; ++i) {
        const int32_t token = static_cast<int32_t>(random() % 7);
        index.append(&token, 1, true);
        if (i % 31 == 0) {
            index.separate();
        }
        CHECK(index.size() <= 64);
    }
}

} // namespace

int main() {
    for (const int n_kinds : {1, 2, 3, 11}) {
        finds_the_longest_match(n_kinds);
    }
    forgets_and_separates();
    std::puts("index: ok");
    return 0;
}
