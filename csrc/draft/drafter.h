// A drafter's weights, and the kinds of drafters: a kind is a file and a row in table.cpp.
#pragma once

#include "arch/model.h"
#include "dflash.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace dfl {

class Drafter;
class DraftModel;
struct DraftHost;

struct DraftHparams {
    Hparams hp;
    int first_block = 0; // block of the file that is layer 0 of hp
    // Hidden states of the target that the drafter reads. i: the residual stream that enters layer
    // i (Hugging Face's target_layer_ids + 1); n_layer: the last layer's output; n_layer + 1: this
    // output after the final norm.
    std::vector<int64_t> taps;
    int64_t block_size = 16; // largest number of rows of a draft, last_token included; 0: no pass
    int32_t mask_token = -1; // id of the mask token; -1: none
    bool sees_all = false;   // True if the drafter attends beyond EngineParams::draft_window
    // Number of a prompt's last tokens from which the drafter has K/V.
    int64_t prompt_window = std::numeric_limits<int64_t>::max();
    // Number of lowest tokens in a reduced head; 0: all, or those of the file's map.
    int64_t n_head_tokens = 0;
    std::vector<int64_t> end_tokens; // tokens that every reduced head has, in ascending order
};

// A kind of drafter: functions that recognise, read and run its files.
struct DraftKind {
    const char * name;
    bool (*reads)(const GgufFile & file);
    // Reads the metadata. Throws DFL_STATUS_FILE with the name of the wrong key.
    DraftHparams (*read)(const GgufFile & file, const Model & target);
    void (*bind)(WeightLoader & loader, const DraftHparams & draft);
    // Allocates the drafter's K/V in an engine. NULL: no pass runs the drafter (block_size is 0).
    std::unique_ptr<DraftModel> (*attach)(const std::shared_ptr<const Drafter> & drafter,
                                          const DraftHost & host);
};

const std::vector<const DraftKind *> & draft_kinds();
// Returns the kind that reads a file, or NULL.
const DraftKind * find_draft_kind(const GgufFile & file);

class Drafter {
  public:
    // Throws DFL_STATUS_FILE or DFL_STATUS_UNSUPPORTED if the file does not fit the target.
    Drafter(const std::string & path, const std::shared_ptr<const Model> & model,
            const ModelParams & params);

    const GgufFile & file() const { return file_; }
    const DraftKind & kind() const { return kind_; }
    const DraftHparams & draft() const { return draft_; }
    const Hparams & hparams() const { return draft_.hp; }
    int64_t max_block() const { return std::min<int64_t>(draft_.block_size, DFL_MAX_VERIFY); }
    const Weights & weights() const { return *weights_; }
    // True if weights and K/V are on the CPU beside another device.
    bool is_on_cpu() const { return is_on_cpu_; }
    // True if the drafter was loaded for this model object.
    bool fits(const std::shared_ptr<const Model> & model) const { return target_.lock() == model; }
    // Returns the drafter's own output head, or the target's if the file has none.
    const Linear & head(const Model & target) const;
    // Returns the target's token id for a row of the drafter's output head.
    int32_t token(int64_t row) const;
    // Returns the scale of embeddings that DraftChoices::Scale::SQRT chooses: the target's own, or
    // sqrt(n_embd) if the target does not scale.
    float sqrt_scale() const { return sqrt_scale_; }
    // True if the target scales its embeddings and the drafter's file has no scale.
    bool scale_is_open() const { return scale_is_open_; }
    // Writes the embeddings of tokens times scale to dst, [n_embd, n].
    void embed(const Model & target, float scale, const int32_t * tokens, int64_t n,
               float * dst) const;

  private:
    void choose(const DraftChoices & choices, const Hparams & target);

    GgufFile file_;
    const DraftKind & kind_;
    std::weak_ptr<const Model> target_;
    DraftHparams draft_;
    float sqrt_scale_ = 1.0f;
    bool scale_is_open_ = false;
    bool is_on_cpu_ = false;
    std::unique_ptr<Weights> weights_;
};

} // namespace dfl
