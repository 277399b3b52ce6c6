#include "model/hparams.h"

#include "error.h"
#include "gguf_schema.h"
#include "model/gguf_file.h"

#include <algorithm>

namespace dfl {

namespace {

// A metadata key of an unsupported feature, and the values that leave the feature off.
struct Neutral {
    const char * key;
    double values[2];
};

constexpr Neutral NEUTRAL[] = {
    {schema::KEY_LOGIT_SCALE, {0, 1}},
    {schema::KEY_RESIDUAL_SCALE, {0, 1}},
    {schema::KEY_EMBEDDING_SCALE, {0, 1}},
    {schema::KEY_ATTN_LOGIT_SOFTCAPPING, {0, 0}},
    {schema::KEY_FINAL_LOGIT_SOFTCAPPING, {0, 0}},
    {schema::KEY_ROUTER_LOGIT_SOFTCAPPING, {0, 0}},
    {schema::KEY_USE_PARALLEL_RESIDUAL, {0, 0}},
    {schema::KEY_HYPER_CONNECTION_COUNT, {0, 0}},
    {schema::KEY_EMBEDDING_LENGTH_PER_LAYER_INPUT, {0, 0}},
    {schema::KEY_FULL_ATTENTION_INTERVAL, {0, 1}},
    {schema::KEY_ATTENTION_MAX_ALIBI_BIAS, {0, 0}},
    {schema::KEY_ATTENTION_CLAMP_KQV, {0, 0}},
    {schema::KEY_ATTENTION_CAUSAL, {1, 1}},
    {schema::KEY_ATTENTION_SLIDING_WINDOW, {0, 0}},
    {schema::KEY_ATTENTION_SHARED_KV_LAYERS, {0, 0}},
    {schema::KEY_ATTENTION_RECURRENT_LAYERS, {0, 0}},
    {schema::KEY_ATTENTION_VALUE_SCALE, {0, 1}},
    {schema::KEY_ATTENTION_OUTPUT_SCALE, {0, 1}},
    {schema::KEY_ATTENTION_TEMPERATURE_LENGTH, {0, 0}},
    {schema::KEY_ATTENTION_TEMPERATURE_SCALE, {0, 0}},
    {schema::KEY_ROPE_DIMENSION_SECTIONS, {0, 0}},
    {schema::KEY_ROPE_SCALING_ALPHA, {0, 1}},
    {schema::KEY_ROPE_SCALING_YARN_LOG_MULTIPLIER, {0, 0}},
    {schema::KEY_EXPERT_COUNT, {0, 0}},
    {schema::KEY_EXPERT_USED_COUNT, {0, 0}},
    {schema::KEY_EXPERT_FEED_FORWARD_LENGTH, {0, 0}},
    {schema::KEY_EXPERT_SHARED_FEED_FORWARD_LENGTH, {0, 0}},
    {schema::KEY_EXPERT_GROUP_COUNT, {0, 1}},
    {schema::KEY_EXPERT_GROUP_USED_COUNT, {0, 1}},
    {schema::KEY_EXPERT_WEIGHTS_SCALE, {0, 1}},
    {schema::KEY_EXPERT_WEIGHTS_NORM, {1, 1}},
    {schema::KEY_EXPERT_GATING_FUNC, {0, 1}}, // gating function 1 is softmax
    {schema::KEY_MOE_EVERY_N_LAYERS, {0, 1}},
    {schema::KEY_INTERLEAVE_MOE_LAYER_STEP, {0, 1}},
    {schema::KEY_LEADING_DENSE_BLOCK_COUNT, {0, 0}},
    {schema::KEY_SWIGLU_CLAMP_EXP, {0, 0}},
    {schema::KEY_SWIGLU_CLAMP_SHEXP, {0, 0}},
    {schema::KEY_SAMPLE_FROM_ANCHOR, {0, 0}},
    {schema::KEY_HAS_CONFIDENCE_HEAD, {0, 0}},
};

// Keys without an effect: sizes that tensors have too, and notes.
constexpr const char * HARMLESS[] = {
    schema::KEY_VOCAB_SIZE,
    schema::KEY_TENSOR_DATA_LAYOUT,
    schema::KEY_POOLING_TYPE, // key of embedding and ranking models
    schema::KEY_CLASSIFIER_POOLING_TYPE,
    schema::KEY_CLASSIFIER_OUTPUT_LABELS,
    schema::KEY_ATTENTION_LAYER_NORM_EPSILON, // key of LayerNorm; all norms here are RMS
    schema::KEY_EXPERT_SHARED_COUNT,
    schema::KEY_ROPE_SCALING_FINETUNED,
    // Keys of sliding layers, which no code reads in models where no layer slides.
    schema::KEY_ATTENTION_SLIDING_WINDOW_PATTERN,
    schema::KEY_ATTENTION_KEY_LENGTH_SWA,
    schema::KEY_ATTENTION_VALUE_LENGTH_SWA,
    schema::KEY_ROPE_DIMENSION_COUNT_SWA,
    schema::KEY_ROPE_FREQ_BASE_SWA,
    schema::KEY_OLD_DFLASH_N_TARGET_LAYERS,
    schema::KEY_OLD_DFLASH_N_TARGET_FEATURES,
};

bool is_harmless(const GgufFile & file, const GgufFile::Unread & entry) {
    const auto is = [&](const char * pattern) { return entry.key == file.key(pattern); };
    const auto all = [&](double a, double b) {
        return !entry.numbers.empty() && std::all_of(entry.numbers.begin(), entry.numbers.end(),
                                                     [&](double x) { return x == a || x == b; });
    };
    for (const char * pattern : HARMLESS) {
        if (is(pattern)) {
            return true;
        }
    }
    for (const Neutral & neutral : NEUTRAL) {
        if (is(neutral.key)) {
            return all(neutral.values[0], neutral.values[1]);
        }
    }
    return is(schema::KEY_HIDDEN_ACTIVATION) && entry.text == "\"silu\"";
}

} // namespace

void check_no_key_skipped(const GgufFile & file) {
    for (const GgufFile::Unread & entry : file.unread()) {
        DFL_CHECK(is_harmless(file, entry), DFL_STATUS_UNSUPPORTED,
                  "%s: metadata key %s is %s, which is not supported and may change the model's "
                  "numbers",
                  file.path().c_str(), entry.key.c_str(), entry.text.c_str());
    }
}

} // namespace dfl
