// One mutable decode timeline: caches, cursor, and the logits of the last pass.
#pragma once

#include "cache.h"
#include "graph.h"
#include "model.h"

#include <functional>
#include <memory>
#include <vector>

namespace dfl {

struct SessionParams {
    int64_t n_ctx = 4096;   // tokens the timeline can hold
    int64_t n_ubatch = 512; // most rows of one pass
    int n_threads = 0;      // 0: default_threads()
    ggml_type type_k = GGML_TYPE_F16;
    ggml_type type_v = GGML_TYPE_F16;
};

// Everything a prefix leaves behind, kept and dropped together. Attention rows stay where they are
// in the session's cells; what a recurrent layer overwrites is copied here.
struct Checkpoint {
    std::vector<int32_t> tokens;
    std::vector<uint8_t> recurrent;
};

// Done and total tokens; true: stop.
using PrefillProgress = std::function<bool(int64_t done, int64_t total)>;

class Session {
  public:
    Session(std::shared_ptr<const Model> model, const SessionParams & params);
    Session(const Session &) = delete; // its parts point to each other
    Session & operator=(const Session &) = delete;

    const Model & model() const { return *model_; }
    int64_t n_ctx() const { return params_.n_ctx; }
    int64_t position() const { return static_cast<int64_t>(tokens_.size()); }
    int n_threads() const { return backend_.n_threads(); }

    // Appends tokens in micro-batches; afterwards the last one's logits can be read. all_logits, if
    // not NULL, takes every token's: [n_vocab, n]. On an error the timeline ends where the last
    // finished micro-batch put it.
    void prefill(const int32_t * tokens, int64_t n, float * all_logits,
                 const PrefillProgress & progress);

    // Token with the largest logit after the last appended token, lowest id on ties (host devices).
    int32_t argmax() const;
    // Its logits: dst [n_vocab].
    void logits(float * dst) const;

    // Back to position 0.
    void reset();
    Checkpoint take() const;
    // Back to a checkpoint whose tokens this timeline still begins with.
    void restore(const Checkpoint & checkpoint);
    // Whether restore() would work: the timeline begins with the checkpoint's tokens.
    bool holds(const Checkpoint & checkpoint) const;
    // Forgets the tokens from a position on; throws DFL_STATUS_UNSUPPORTED if recurrent layers
    // have overwritten what they knew there.
    void truncate(int64_t position);

    uint64_t kv_bytes() const { return kv_.bytes(); }
    uint64_t recurrent_bytes() const { return recurrent_.bytes(); }
    uint64_t arena_bytes() const { return graphs_.arena_bytes(); }
    int64_t n_graphs_built() const { return graphs_.n_built(); }

  private:
    void check_tokens(const int32_t * tokens, int64_t n) const;
    int64_t bucket(int64_t cells) const;
    // Runs rows for tokens appended at the cursor and moves it. n_out: 0, 1 (the last) or n.
    LiveGraph & forward(const int32_t * tokens, int64_t n, int64_t n_out);
    void set_inputs(LiveGraph & live, const int32_t * tokens, const std::vector<int64_t> & cells);

    std::shared_ptr<const Model> model_;
    SessionParams params_;
    Backend backend_;
    KvCache kv_;
    RecurrentCache recurrent_;
    GraphPool graphs_;
    std::vector<int32_t> tokens_; // the committed timeline
    LiveGraph * last_ = nullptr;  // graph whose logits are readable
    int64_t last_row_ = 0;
};

} // namespace dfl
