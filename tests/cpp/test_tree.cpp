// Trees from the inside: every size, and the form of recurrent layers for devices without the
// fused operation.
#include "session.h"

#include "check.h"
#include "tiny_model.h"

#include <algorithm>
#include <cmath>
#include <random>

using namespace dfl;

namespace {

using Logits = std::vector<float>;
using Nodes = std::vector<int32_t>;

struct Random {
    std::mt19937 engine{5};
    int below(int n) { return static_cast<int>(engine() % n); }
    Nodes tokens(int n) {
        Nodes values(n);
        for (int32_t & value : values) {
            value = below(TINY_VOCAB);
        }
        return values;
    }
    Nodes parents(int n) {
        Nodes values(n, -1);
        for (int i = 1; i < n; ++i) {
            values[i] = std::max(below(i), below(i));
        }
        return values;
    }
};

Session make(const std::shared_ptr<const Model> & model, bool stock) {
    SessionParams params;
    params.n_ctx = 512;
    params.n_ubatch = 150;
    params.n_threads = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.stock_delta_rule = stock;
    return Session(model, params);
}

Logits row(const Session & session, int64_t index) {
    Logits logits(TINY_VOCAB);
    session.logits(index, logits.data());
    return logits;
}

Logits next(Session & session, const Nodes & tokens) {
    session.prefill(tokens.data(), tokens.size(), nullptr, nullptr);
    return row(session, 0);
}

bool equal(const Logits & a, const Logits & b) {
    float largest = 0, range = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        largest = std::fmax(largest, std::fabs(a[i] - b[i]));
        range = std::fmax(range, std::fabs(b[i]));
    }
    return largest <= 1e-4f * range; // observed: 1e-6
}

Nodes path_to(const Nodes & parents, int node) {
    Nodes path;
    for (; node >= 0; node = parents[node]) {
        path.insert(path.begin(), node);
    }
    return path;
}

// Trees of 1 to 64 nodes in turn, each committed along some path, as one prefill has it.
void every_size(const std::shared_ptr<const Model> & model, bool stock) {
    Random random;
    Session session = make(model, stock);
    session.reserve_verify(64);
    Nodes timeline = random.tokens(9);
    session.prefill(timeline.data(), timeline.size(), nullptr, nullptr);
    for (int n = 1; n <= 64; ++n) {
        const Nodes tokens = random.tokens(n), parents = random.parents(n);
        session.verify(tokens.data(), parents.data(), n);
        CHECK(session.n_out_rows() == n);
        for (int i = 0; i < n; ++i) {
            CHECK(std::isfinite(row(session, i)[0]));
        }
        Nodes path = path_to(parents, random.below(n));
        path.resize(random.below(static_cast<int>(path.size()) + 1));
        session.commit_path(path.data(), path.size());
        for (const int32_t node : path) {
            timeline.push_back(tokens[node]);
        }
        CHECK(session.position() == static_cast<int64_t>(timeline.size()));
    }
    Session fresh = make(model, false);
    timeline.push_back(3);
    CHECK(equal(next(session, {3}), next(fresh, timeline)));
}

// Prefill over several chunks, single tokens, chains, trees and what they commit.
void stock_operations_do_the_same(const std::shared_ptr<const Model> & model) {
    Random random;
    Session fused = make(model, false), stock = make(model, true);
    for (Session * session : {&fused, &stock}) {
        session->reserve_verify(20);
    }
    for (const int n : {1, 5, 64, 65, 150}) {
        const Nodes tokens = random.tokens(n);
        CHECK(equal(next(stock, tokens), next(fused, tokens)));
        const Nodes nodes = random.tokens(20), parents = random.parents(20);
        for (const int32_t * shape : {parents.data(), static_cast<const int32_t *>(nullptr)}) {
            const Nodes path = shape ? path_to(parents, 19) : Nodes{0, 1, 2, 3, 4, 5};
            for (Session * session : {&fused, &stock}) {
                session->verify(nodes.data(), shape, 20);
            }
            for (int i = 0; i < 20; ++i) {
                CHECK(equal(row(stock, i), row(fused, i)));
            }
            for (Session * session : {&fused, &stock}) {
                session->commit_path(path.data(), path.size());
            }
        }
    }
    CHECK(equal(next(stock, {7}), next(fused, {7})));
}

} // namespace

int main() {
    TemporaryFolder folder;
    const std::string path = folder.file("tiny.gguf");
    for (auto write : {write_tiny_llama, write_tiny_qwen35}) {
        write(path);
        const auto model = std::make_shared<const Model>(path, ModelParams{0, {}, nullptr});
        every_size(model, false);
        if (model->hparams().n_recurrent() > 0) {
            every_size(model, true);
            stock_operations_do_the_same(model);
        }
    }
}
