// A drafter's weights, checked against the target they were trained for. Immutable, shareable.
#pragma once

#include "arch/model.h"
#include "draft/dflash_model.h"

#include <memory>
#include <string>

namespace dfl {

class Drafter {
  public:
    // Throws DFL_STATUS_FILE or DFL_STATUS_UNSUPPORTED naming what does not fit the target.
    Drafter(const std::string & path, const std::shared_ptr<const Model> & model,
            const ModelParams & params);

    const GgufFile & file() const { return file_; }
    const DraftHparams & draft() const { return draft_; }
    const Hparams & hparams() const { return draft_.hp; }
    const Weights & weights() const { return *weights_; }
    // Whether it was checked against this very model.
    bool fits(const std::shared_ptr<const Model> & model) const { return target_.lock() == model; }
    // Its own head, or the target's.
    const Linear & head(const Model & target) const;
    // Target token of a row of the head.
    int32_t token(int64_t row) const;
    // Embeddings of the block's tokens as it wants them: dst [n_embd, n].
    void embed(const Model & target, const int32_t * tokens, int64_t n, float * dst) const;

  private:
    GgufFile file_;
    std::weak_ptr<const Model> target_;
    DraftHparams draft_;
    std::unique_ptr<Weights> weights_;
};

} // namespace dfl
