// Prefix: attention rows of every group of layers, recurrent states and the drafter's rows of the
// first tokens of a sequence, kept for others that begin like it.
//
// Blocks of a group that shares pages stay in its cells, which the prefix holds; Engine::offload()
// moves them to the host when others want the cells. All else is copied. Prefixes of one sequence
// share their full blocks.
#pragma once

#include "cache/kv_block.h"
#include "engine/engine.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace dfl {

// States of recurrent layers after a token.
class PrefixState {
  public:
    PrefixState(RawBytes bytes, uint64_t & host_bytes);
    ~PrefixState() { host_bytes_ -= bytes_.size(); }
    PrefixState(const PrefixState &) = delete; // PrefixState counts its bytes
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
    // A part of it as files have it: `name` is one of the engine's.
    struct Part {
        std::string name;
        ggml_type type;
        int64_t ne[2];
        uint64_t bytes;
        size_t cache, tensor; // of attention rows
    };

    // blocks: of each cache of the engine, in the order of positions, up to the last token; state:
    // NULL without recurrent layers.
    Prefix(std::shared_ptr<Engine> engine, std::vector<int32_t> tokens,
           std::vector<CacheBlocks> blocks, std::shared_ptr<PrefixState> state);
    // Makes a prefix to be filled in by write(), with so many rows of each cache.
    Prefix(std::shared_ptr<Engine> engine, std::vector<int32_t> tokens,
           const std::vector<int64_t> & n_rows);
    ~Prefix() { keep_in_cells(false); }
    Prefix(const Prefix &) = delete; // blocks count their prefixes
    Prefix & operator=(const Prefix &) = delete;

    const Engine & engine() const { return *engine_; }
    const std::vector<int32_t> & tokens() const { return tokens_; }
    int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
    const std::vector<CacheBlocks> & blocks() const { return blocks_; }
    const PrefixState * state() const { return state_.get(); }
    // Number of rows that the prefix has of a cache.
    int64_t n_rows(size_t cache) const;
    // Positions that the drafter remembers, up to the last token.
    int64_t n_draft() const;

    // Number of free cells that a sequence takes to attach the first n tokens.
    int64_t cells_needed(int64_t n) const;
    // Keeps its blocks from being offloaded, or no longer; at first it does not.
    void keep_in_cells(bool keeps);

    const std::vector<Part> & parts() const { return parts_; }
    void read(size_t part, uint8_t * to) const;
    // Fills in a part.
    void write(size_t part, const uint8_t * from);

  private:
    void find_parts();
    // Bytes of a part of the state.
    uint8_t * state_bytes(const Part & part) const;

    std::shared_ptr<Engine> engine_; // outlives the blocks
    std::vector<int32_t> tokens_;
    std::vector<CacheBlocks> blocks_;
    bool keeps_in_cells_ = false;
    std::shared_ptr<PrefixState> state_;
    std::vector<Part> parts_;
};

} // namespace dfl
