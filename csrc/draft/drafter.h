// A drafter's weights, checked against the target they were trained for, and the table of the kinds
// of drafters. Adding one: a file and a row in table.cpp.
#pragma once

#include "arch/model.h"
#include "dflash.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace dfl {

class Drafter;
class DraftModel;
struct DraftHost;

struct DraftHparams {
    Hparams hp;
    // Hidden states of the target that it reads. i: the residual stream that enters layer i, the
    // output of the layer before it (Hugging Face's target_layer_ids + 1); n_layer: what leaves the
    // last layer; n_layer + 1: the same after the final norm.
    std::vector<int64_t> taps;
    int64_t block_size = 16; // rows of a draft at most, the last token among them
    int32_t mask_token = -1; // -1: it takes none
    bool sees_all = false;   // reads every position, even beyond EngineParams::draft_window
};

struct DraftKind {
    bool (*reads)(const GgufFile & file);
    // Reads the metadata; throws DFL_STATUS_FILE naming the key. n_target_layers: of the target.
    DraftHparams (*read)(const GgufFile & file, int64_t n_target_layers);
    // Declares every tensor of the file it needs.
    void (*bind)(WeightLoader & loader, const DraftHparams & draft);
    // Allocates the drafter's K/V in an engine.
    std::unique_ptr<DraftModel> (*attach)(const std::shared_ptr<const Drafter> & drafter,
                                          const DraftHost & host);
};

const std::vector<const DraftKind *> & draft_kinds();

class Drafter {
  public:
    // Throws DFL_STATUS_FILE or DFL_STATUS_UNSUPPORTED naming what does not fit the target.
    Drafter(const std::string & path, const std::shared_ptr<const Model> & model,
            const ModelParams & params);

    const GgufFile & file() const { return file_; }
    const DraftKind & kind() const { return kind_; }
    const DraftHparams & draft() const { return draft_; }
    const Hparams & hparams() const { return draft_.hp; }
    // Rows of one sequence's draft at most, its last token among them.
    int64_t max_block() const { return std::min<int64_t>(draft_.block_size, DFL_MAX_VERIFY); }
    const Weights & weights() const { return *weights_; }
    // Returns true if the drafter was checked against this very model.
    bool fits(const std::shared_ptr<const Model> & model) const { return target_.lock() == model; }
    // Returns the drafter's head, or the target's where its file has none.
    const Linear & head(const Model & target) const;
    // Target token of a row of the head.
    int32_t token(int64_t row) const;
    // Embeddings of the block's tokens as it wants them: dst [n_embd, n].
    void embed(const Model & target, const int32_t * tokens, int64_t n, float * dst) const;

  private:
    GgufFile file_;
    const DraftKind & kind_;
    std::weak_ptr<const Model> target_;
    DraftHparams draft_;
    std::unique_ptr<Weights> weights_;
};

} // namespace dfl
