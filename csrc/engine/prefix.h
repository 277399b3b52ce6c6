// Prefix: K/V rows of the target and the drafters and recurrent states of the first tokens of a
// sequence. Full pages of a K/V group that shares pages stay in its cells until Engine::offload()
// moves them to the host; other rows are copied. Prefixes of one sequence share their full blocks.
#pragma once

#include "cache/kv_block.h"
#include "engine/engine.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace dfl {

// States and convolution inputs of the recurrent layers after the last token of a prefix.
class PrefixState {
  public:
    PrefixState(RawBytes bytes, uint64_t & host_bytes);
    ~PrefixState() { host_bytes_ -= bytes_.size(); }
    PrefixState(const PrefixState &) = delete;
    PrefixState & operator=(const PrefixState &) = delete;

    RawBytes & bytes() { return bytes_; }
    const RawBytes & bytes() const { return bytes_; }

  private:
    RawBytes bytes_;
    uint64_t & host_bytes_;
};

using CacheBlocks = std::vector<std::shared_ptr<KvBlock>>;

class Prefix {
  public:
    // A tensor of a prefix, as it is stored in a file.
    struct Part {
        std::string name;
        ggml_type type;
        int64_t ne[2];
        uint64_t bytes;
        // Indices of K/V group and tensor; recurrent states have the number of groups as `cache`.
        size_t cache, tensor;
    };

    // Creates a prefix. blocks: for each K/V group its blocks, in the order of positions. state:
    // recurrent state, NULL if the model has no recurrent layers.
    Prefix(std::shared_ptr<Engine> engine, std::vector<int32_t> tokens,
           std::vector<CacheBlocks> blocks, std::shared_ptr<PrefixState> state);
    // Creates a prefix with n_rows rows in each K/V group, to be filled in by write(). Blocks that
    // base, a longer prefix of the same text, holds too are shared with it; base may be NULL.
    Prefix(std::shared_ptr<Engine> engine, std::vector<int32_t> tokens,
           const std::vector<int64_t> & n_rows, const Prefix * base);
    // Creates a copy of a prefix to write to a file without the blocks that prefix `base` has too.
    Prefix(const Prefix & of, const Prefix & base);
    ~Prefix() { keep_in_cells(false); }
    Prefix(const Prefix &) = delete;
    Prefix & operator=(const Prefix &) = delete;

    const Engine & engine() const { return *engine_; }
    const std::vector<int32_t> & tokens() const { return tokens_; }
    int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
    const std::vector<CacheBlocks> & blocks() const { return blocks_; }
    const PrefixState * state() const { return state_.get(); }
    // Returns the number of rows in a K/V group.
    int64_t n_rows(size_t cache) const;
    // Returns the number of the prefix's last positions that drafters have K/V of.
    int64_t n_draft() const;

    // Returns the number of free cells that an empty sequence takes to restore the first n tokens.
    int64_t cells_needed(int64_t n) const;
    // Keeps the blocks in cells if `keeps`; by default Engine::offload() may move them to the host.
    void keep_in_cells(bool keeps);

    const std::vector<Part> & parts() const { return parts_; }
    void read(size_t part, uint8_t * to) const;
    void write(size_t part, const uint8_t * from);

  private:
    void find_parts();
    void check_base(const Prefix & base) const;
    uint8_t * state_bytes(const Part & part) const;

    std::shared_ptr<Engine> engine_; // the engine must outlive the blocks
    std::vector<int32_t> tokens_;
    std::vector<CacheBlocks> blocks_;
    // K/V blocks of each K/V group that a file of this prefix holds, without those of a base.
    std::vector<CacheBlocks> own_;
    bool keeps_in_cells_ = false;
    std::shared_ptr<PrefixState> state_;
    std::vector<Part> parts_;
};

} // namespace dfl
