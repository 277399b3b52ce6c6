#include "session.h"

#include "error.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace dfl {

static constexpr int32_t SEQUENCE = 0; // this timeline's name in the caches

static int64_t pad(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static SessionParams checked(SessionParams params) {
    DFL_CHECK(params.n_ctx >= 1 && params.n_ctx <= (1 << 24), DFL_STATUS_ARGUMENT,
              "n_ctx is %lld, expected 1 to %d", (long long)params.n_ctx, 1 << 24);
    DFL_CHECK(params.n_ubatch >= 1 && params.n_ubatch <= 65536, DFL_STATUS_ARGUMENT,
              "n_ubatch is %lld, expected 1 to 65536", (long long)params.n_ubatch);
    DFL_CHECK(params.n_threads >= 0 && params.n_threads <= 1024, DFL_STATUS_ARGUMENT,
              "n_threads is %d, expected 0 to 1024", params.n_threads);
    params.n_ubatch = std::min(params.n_ubatch, params.n_ctx);
    return params;
}

Session::Session(std::shared_ptr<const Model> model, const SessionParams & params)
    : model_(std::move(model)), params_(checked(params)),
      backend_(model_->on_gpu(), params_.n_threads, {}),
      kv_(model_->hparams(), backend_, params_.type_k, params_.type_v, pad(params_.n_ctx, 256)),
      recurrent_(model_->hparams(), backend_, 1), graphs_(*model_, backend_, kv_, recurrent_) {
    tokens_.reserve(params_.n_ctx);
    // The largest graph reserves the arena, so that memory runs out here or not at all.
    graphs_.get({params_.n_ubatch, 1, 0, kv_.cells().size(), 1});
}

void Session::check_tokens(const int32_t * tokens, int64_t n) const {
    DFL_CHECK(n >= 1, DFL_STATUS_ARGUMENT, "there are no tokens to run");
    DFL_CHECK(n <= n_ctx() - position(), DFL_STATUS_ARGUMENT,
              "%lld tokens after %lld do not fit into a context of %lld", (long long)n,
              (long long)position(), (long long)n_ctx());
    for (int64_t i = 0; i < n; ++i) {
        DFL_CHECK(tokens[i] >= 0 && tokens[i] < model_->hparams().n_vocab, DFL_STATUS_ARGUMENT,
                  "token id %d is outside the vocabulary of %lld", tokens[i],
                  (long long)model_->hparams().n_vocab);
    }
}

// Steps grow with the context, so that a long answer does not rebuild its graph every few rounds.
int64_t Session::bucket(int64_t cells) const {
    int64_t step = 256;
    while (step * 16 < cells) {
        step *= 2;
    }
    return std::min(pad(cells, step), kv_.cells().size());
}

void Session::set_inputs(LiveGraph & live, const int32_t * tokens,
                         const std::vector<int64_t> & cells) {
    const int64_t n = live.shape.n_rows;
    const auto first = static_cast<int32_t>(position());
    const GraphInputs & in = live.in;
    write_input<float>(in.embd, [&](float * data) { model_->embed(tokens, n, data); });
    if (in.positions != nullptr) {
        write_input<int32_t>(in.positions, [&](int32_t * data) {
            // M-RoPE: time, height and width are the position for text, the fourth is 0.
            for (int64_t i = 0; i < ggml_nelements(in.positions); ++i) {
                data[i] = i < 3 * n ? first + static_cast<int32_t>(i % n) : 0;
            }
        });
        write_input<int64_t>(in.cells,
                             [&](int64_t * data) { std::copy(cells.begin(), cells.end(), data); });
    }
    for (const Mask & mask : in.masks) {
        write_input<ggml_fp16_t>(mask.tensor, [&](ggml_fp16_t * data) {
            for (int64_t i = 0; i < n; ++i) {
                kv_.cells().mask_row(SEQUENCE, first + static_cast<int32_t>(i), mask.window,
                                     data + i * live.shape.n_kv, live.shape.n_kv);
            }
        });
    }
    if (in.out_rows != nullptr) {
        write_input<int32_t>(in.out_rows,
                             [&](int32_t * data) { data[0] = static_cast<int32_t>(n - 1); });
    }
}

LiveGraph & Session::forward(const int32_t * tokens, int64_t n, int64_t n_out) {
    last_ = nullptr;
    CellTable & table = kv_.cells();
    const std::vector<int64_t> cells = table.find_free(n);
    for (int64_t i = 0; i < n; ++i) {
        table.own(cells[i], SEQUENCE, static_cast<int32_t>(position() + i));
    }
    bool computing = false;
    try {
        LiveGraph & live = graphs_.get({n, 1, SEQUENCE, bucket(table.high()), n_out});
        set_inputs(live, tokens, cells);
        computing = true;
        backend_.compute(live.graph);
        tokens_.insert(tokens_.end(), tokens, tokens + n);
        return live;
    } catch (...) {
        for (const int64_t cell : cells) {
            table.release(cell);
        }
        if (computing && model_->hparams().n_recurrent() > 0) {
            reset(); // a pass that died half way has advanced some layers' states
        }
        throw;
    }
}

void Session::prefill(const int32_t * tokens, int64_t n, float * all_logits,
                      const PrefillProgress & progress) {
    check_tokens(tokens, n);
    const int64_t n_vocab = model_->hparams().n_vocab;
    int64_t step = params_.n_ubatch;
    if (all_logits != nullptr) {
        // A row for every token of a large vocabulary would dwarf the rest of the arena.
        step = std::min(step, std::max<int64_t>(1, (int64_t(256) << 20) / (4 * n_vocab)));
    }
    for (int64_t done = 0; done < n;) {
        const int64_t rows = std::min(step, n - done);
        const bool last = done + rows == n;
        const int64_t n_out = all_logits != nullptr ? rows : last ? 1 : 0;
        LiveGraph & live = forward(tokens + done, rows, n_out);
        if (all_logits != nullptr) {
            ggml_backend_tensor_get(live.logits, all_logits + done * n_vocab, 0,
                                    ggml_nbytes(live.logits));
        }
        done += rows;
        if (last) {
            last_ = &live;
            last_row_ = n_out - 1;
        }
        DFL_CHECK(!progress || !progress(done, n) || last, DFL_STATUS_CANCELLED,
                  "cancelled after %lld of %lld tokens", (long long)done, (long long)n);
    }
}

// Index of the first largest value. Sixteen running maxima let the compiler use vector registers.
static int64_t first_largest(const float * x, int64_t n) {
    constexpr int64_t lanes = 16;
    float best[lanes];
    std::fill(best, best + lanes, -INFINITY);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        for (int64_t j = 0; j < lanes; ++j) {
            best[j] = x[i + j] > best[j] ? x[i + j] : best[j];
        }
    }
    float top = *std::max_element(best, best + lanes);
    for (; i < n; ++i) {
        top = x[i] > top ? x[i] : top;
    }
    return std::find(x, x + n, top) - x;
}

int32_t Session::argmax() const {
    DFL_CHECK(last_ != nullptr, DFL_STATUS_ARGUMENT, "no token was run yet");
    int32_t id = 0;
    const int64_t n_vocab = model_->hparams().n_vocab;
    if (last_->argmax != nullptr) {
        ggml_backend_tensor_get(last_->argmax, &id, last_row_ * sizeof id, sizeof id);
    } else {
        const float * rows = static_cast<const float *>(last_->logits->data);
        id = static_cast<int32_t>(first_largest(rows + last_row_ * n_vocab, n_vocab));
    }
    DFL_CHECK(id >= 0 && id < n_vocab, DFL_STATUS_COMPUTE,
              "the logits after token %lld are not finite numbers", (long long)position() - 1);
    return id;
}

void Session::logits(float * dst) const {
    DFL_CHECK(last_ != nullptr, DFL_STATUS_ARGUMENT, "no token was run yet");
    const size_t size = model_->hparams().n_vocab * sizeof(float);
    ggml_backend_tensor_get(last_->logits, dst, last_row_ * size, size);
}

void Session::reset() {
    kv_.cells().release_from(SEQUENCE, 0);
    recurrent_.clear(SEQUENCE);
    tokens_.clear();
    last_ = nullptr;
}

Checkpoint Session::take() const { return {tokens_, recurrent_.save(SEQUENCE)}; }

bool Session::holds(const Checkpoint & checkpoint) const {
    return checkpoint.tokens.size() <= tokens_.size() &&
           std::equal(checkpoint.tokens.begin(), checkpoint.tokens.end(), tokens_.begin());
}

void Session::restore(const Checkpoint & checkpoint) {
    DFL_CHECK(holds(checkpoint), DFL_STATUS_ARGUMENT,
              "the checkpoint of %zu tokens is not a beginning of this session's %lld tokens",
              checkpoint.tokens.size(), (long long)position());
    recurrent_.load(SEQUENCE, checkpoint.recurrent);
    kv_.cells().release_from(SEQUENCE, static_cast<int32_t>(checkpoint.tokens.size()));
    tokens_.resize(checkpoint.tokens.size());
    last_ = nullptr;
}

void Session::truncate(int64_t position) {
    DFL_CHECK(position >= 0 && position <= this->position(), DFL_STATUS_ARGUMENT,
              "position %lld: the session holds %lld tokens", (long long)position,
              (long long)this->position());
    if (position == this->position()) {
        return;
    }
    if (position == 0) {
        reset();
        return;
    }
    DFL_CHECK(model_->hparams().n_recurrent() == 0, DFL_STATUS_UNSUPPORTED,
              "a model with recurrent layers goes back only to a checkpoint, not to position %lld",
              (long long)position);
    kv_.cells().release_from(SEQUENCE, static_cast<int32_t>(position));
    tokens_.resize(position);
    last_ = nullptr;
}

} // namespace dfl
