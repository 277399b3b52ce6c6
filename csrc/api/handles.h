// The structs behind the handles of the C ABI, and helpers of its functions.
#pragma once

#include "dflash.h"

#include "engine/sequence.h"
#include "error.h"

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>

struct dfl_model {
    std::shared_ptr<const dfl::Model> model;
};
struct dfl_drafter {
    std::shared_ptr<const dfl::Drafter> drafter;
};
struct dfl_engine {
    std::shared_ptr<dfl::Engine> engine;
    // True during a call of the engine, or of its sequences and prefixes, which share this flag.
    std::shared_ptr<std::atomic<bool>> is_busy;
};
struct dfl_sequence {
    explicit dfl_sequence(const dfl_engine & of) : sequence(of.engine), is_busy(of.is_busy) {}

    dfl::Sequence sequence;
    std::shared_ptr<std::atomic<bool>> is_busy;
};
struct dfl_prefix {
    std::shared_ptr<dfl::Prefix> prefix;
    std::shared_ptr<std::atomic<bool>> is_busy;
};
struct dfl_sampler {
    dfl::Sampler sampler;
};

namespace dfl {

template <typename... Pointers>
void need(const Pointers *... pointers) {
    const bool all = ((pointers != nullptr) && ...);
    DFL_CHECK(all, DFL_STATUS_ARGUMENT, "a required pointer is NULL");
}

template <size_t N>
void copy_text(char (&to)[N], const std::string & from) {
    std::snprintf(to, N, "%s", from.c_str());
}

// Runs a call that changes an engine, and reports errors as guard() does. Fails while another call
// of the engine runs, so that a progress callback cannot change the engine under a running pass.
template <typename Handle, typename Body>
dfl_status guard_busy(Handle * handle, dfl_error * err, Body && body) noexcept {
    return guard(err, [&] {
        need(handle);
        DFL_CHECK(!handle->is_busy->exchange(true), DFL_STATUS_ARGUMENT,
                  "the engine is busy: an earlier call of it has not returned");
        const auto end = [](std::atomic<bool> * is_busy) { *is_busy = false; };
        const std::unique_ptr<std::atomic<bool>, decltype(end)> call(handle->is_busy.get(), end);
        body();
    });
}

} // namespace dfl
