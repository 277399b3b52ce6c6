// Verify trees of every size, with each form of recurrent layers.
#include "engine/sequence.h"
#include "layers/cpu_ops/scan_delta_net.h"

#include "check.h"
#include "models.h"
#include "passes.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
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
            value = below(N_VOCAB);
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

Sequence make(const std::shared_ptr<const Model> & model, DeltaForm form, int64_t n_ctx = 512) {
    EngineParams params;
    params.n_ctx = n_ctx;
    params.n_ubatch = 450;
    params.n_threads = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.delta_form = form;
    return Sequence(std::make_shared<Engine>(model, params));
}

Logits row(Sequence & sequence, int64_t index) {
    Logits logits(N_VOCAB);
    sequence.logits({index}, logits.data());
    return logits;
}

Logits next(Sequence & sequence, const Nodes & tokens) {
    prefill(sequence, tokens.data(), tokens.size());
    return row(sequence, 0);
}

bool equal(const Logits & a, const Logits & b) {
    float largest = 0, range = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        largest = std::fmax(largest, std::fabs(a[i] - b[i]));
        range = std::fmax(range, std::fabs(b[i]));
    }
    return largest <= 1e-4f * range; // observed difference: 1e-6 of the range
}

Nodes path_to(const Nodes & parents, int node) {
    Nodes path;
    for (; node >= 0; node = parents[node]) {
        path.insert(path.begin(), node);
    }
    return path;
}

// Trees of 1 to 64 nodes, each with a committed path, give the logits of one prefill.
void every_size(const std::shared_ptr<const Model> & model, DeltaForm form) {
    Random random;
    Sequence sequence = make(model, form);
    sequence.engine().reserve_verify(64);
    Nodes timeline = random.tokens(9);
    prefill(sequence, timeline.data(), timeline.size());
    for (int n = 1; n <= 64; ++n) {
        const Nodes tokens = random.tokens(n), parents = random.parents(n);
        verify(sequence, tokens.data(), parents.data(), n);
        CHECK(sequence.n_out_rows() == n);
        for (int i = 0; i < n; ++i) {
            CHECK(std::isfinite(row(sequence, i)[0]));
        }
        Nodes path = path_to(parents, random.below(n));
        path.resize(random.below(static_cast<int>(path.size()) + 1));
        commit(sequence, path.data(), path.size());
        for (const int32_t node : path) {
            timeline.push_back(tokens[node]);
        }
        CHECK(sequence.position() == static_cast<int64_t>(timeline.size()));
    }
    Sequence fresh = make(model, DeltaForm::OWN);
    timeline.push_back(3);
    CHECK(equal(next(sequence, {3}), next(fresh, timeline)));
}

void the_last_cells(const std::shared_ptr<const Model> & model) {
    Random random;
    const Nodes prompt = random.tokens(250), tokens = random.tokens(6);
    const Nodes parents = {-1, 0, 0, 1, 1, 4}, path = {0, 1, 4, 5};
    Sequence full = make(model, DeltaForm::OWN, 256), roomy = make(model, DeltaForm::OWN);
    for (Sequence * sequence : {&full, &roomy}) {
        sequence->engine().reserve_verify(6);
        prefill(*sequence, prompt.data(), prompt.size());
        verify(*sequence, tokens.data(), parents.data(), 6);
    }
    for (int i = 0; i < 6; ++i) {
        CHECK(equal(row(full, i), row(roomy, i)));
    }
    CHECK(contains(error_of([&] { row(roomy, 6); }), "these logits are gone"));
    for (Sequence * sequence : {&full, &roomy}) {
        commit(*sequence, path.data(), path.size());
    }
    CHECK(equal(next(full, {3, 4}), next(roomy, {3, 4})));
    CHECK(contains(error_of([&] { verify(full, tokens.data(), parents.data(), 6); }),
                   "6 tokens after 256 do not fit into a context of 256"));
}

// Every form of recurrent layers gives the same logits for prefill, steps, chains and trees.
void forms_do_the_same(const std::shared_ptr<const Model> & model, DeltaForm form) {
    Random random;
    Sequence own = make(model, DeltaForm::OWN, 1024), other = make(model, form, 1024);
    for (Sequence * sequence : {&own, &other}) {
        sequence->engine().reserve_verify(20);
    }
    for (const int n : {1, 5, 64, 65, 150, 450}) {
        const Nodes tokens = random.tokens(n);
        CHECK(equal(next(other, tokens), next(own, tokens)));
        const Nodes nodes = random.tokens(20), parents = random.parents(20);
        for (const int32_t * shape : {parents.data(), static_cast<const int32_t *>(nullptr)}) {
            const Nodes path = shape ? path_to(parents, 19) : Nodes{0, 1, 2, 3, 4, 5};
            for (Sequence * sequence : {&own, &other}) {
                verify(*sequence, nodes.data(), shape, 20);
            }
            for (int i = 0; i < 20; ++i) {
                CHECK(equal(row(other, i), row(own, i)));
            }
            for (Sequence * sequence : {&own, &other}) {
                commit(*sequence, path.data(), path.size());
            }
        }
    }
    CHECK(equal(next(other, {7}), next(own, {7})));
}

std::vector<float> state_of(Sequence & sequence) {
    const std::shared_ptr<Prefix> prefix = sequence.snapshot();
    const RawBytes & bytes = prefix->state()->bytes();
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
}

// Decodes the timeline in rounds of up to 8 tokens, as chains or as paths of random 16-node trees.
void decode_in_rounds(Sequence & sequence, const Nodes & timeline, bool trees) {
    Random random;
    sequence.engine().reserve_verify(16);
    for (size_t at = 0; at < timeline.size();) {
        const int n = std::min<int>(1 + random.below(8), static_cast<int>(timeline.size() - at));
        Nodes tokens = random.tokens(16), parents = random.parents(16), path = {0};
        while (static_cast<int>(path.size()) < n) {
            path.push_back(path.back() + 1 + random.below(2));
            parents[path.back()] = path[path.size() - 2];
        }
        for (int i = 0; i < n; ++i) {
            tokens[path[i]] = timeline[at + i];
        }
        if (trees) {
            verify(sequence, tokens.data(), parents.data(), 16);
            commit(sequence, path.data(), n);
        } else {
            Nodes chain(timeline.begin() + at, timeline.begin() + at + n);
            chain.resize(8, 1);
            verify(sequence, chain.data(), nullptr, 8);
            commit(sequence, nullptr, n);
        }
        at += n;
    }
}

// The recurrent state after 2000 tokens in trees is no further from prefill than after chains. Our
// own code gives the bits of prefill.
void states_do_not_drift(const std::shared_ptr<const Model> & model, DeltaForm form) {
    Random random;
    const Nodes timeline = random.tokens(2000);
    Sequence whole = make(model, form, 2304);
    const bool exact = form == DeltaForm::OWN && can_scan_delta_net(model->hparams().recurrent);
    prefill(whole, timeline.data(), timeline.size());
    const std::vector<float> expected = state_of(whole);
    const Logits logits = next(whole, {3});
    double off[2];
    for (const bool trees : {false, true}) {
        Sequence sequence = make(model, form, 2304);
        decode_in_rounds(sequence, timeline, trees);
        const std::vector<float> found = state_of(sequence);
        double error = 0, size = 0;
        for (size_t i = 0; i < found.size(); ++i) {
            error += std::pow(found[i] - expected[i], 2);
            size += std::pow(expected[i], 2);
        }
        off[trees] = std::sqrt(error / size);
        CHECK(equal(next(sequence, {3}), logits));
        CHECK(!exact || off[trees] == 0);
    }
    std::printf("state after 2000 tokens: chains off by %.1e, trees by %.1e\n", off[0], off[1]);
    CHECK(off[1] <= 2 * off[0] + 1e-6);
}

} // namespace

int main() {
    for (const char * name : {"small-llama", "small-qwen35"}) {
        const auto model = std::make_shared<const Model>(model_path(name), on_cpu());
        every_size(model, DeltaForm::OWN);
        the_last_cells(model);
        if (model->hparams().n_recurrent() > 0) {
            for (const DeltaForm form : {DeltaForm::FUSED, DeltaForm::STOCK}) {
                every_size(model, form);
                forms_do_the_same(model, form);
            }
        }
    }
    const auto lasting = std::make_shared<const Model>(model_path("lasting"), on_cpu());
    states_do_not_drift(lasting, DeltaForm::OWN);
    states_do_not_drift(lasting, DeltaForm::FUSED);
}
