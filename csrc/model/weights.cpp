#include "model/weights.h"

#include "device/devices.h"
#include "error.h"
#include "gguf_schema.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace dfl {

// Fewest tokens of a list of drafted tokens: trees rank as many candidates of each position
// (N_RANKED in dflash_gguf/speculative/proposers/dflash.py).
static constexpr int64_t MIN_HEAD_TOKENS = 32;

std::string tensor_name(const char * pattern, int block) {
    char name[GGML_MAX_NAME * 2];
    // Patterns are safe formats: constants of gguf_schema.h with at most one %d.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    std::snprintf(name, sizeof name, pattern, block);
#pragma GCC diagnostic pop
    return name;
}

static std::string companion(const std::string & weight, const char * suffix) {
    const size_t dot = weight.rfind(".weight");
    return dot == std::string::npos ? weight + suffix : weight.substr(0, dot) + suffix;
}

static std::string shape_text(const int64_t * ne, int n) {
    std::string text = "[";
    for (int i = 0; i < n; ++i) {
        text += (i != 0 ? ", " : "") + std::to_string(ne[i]);
    }
    return text + "]";
}

// True if ggml can multiply with the type: floating point, or quantised and convertible to float.
static bool is_multipliable(ggml_type type) {
    if (type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16) {
        return true;
    }
    return ggml_is_quantized(type) && type != GGML_TYPE_Q8_1 &&
           ggml_get_type_traits(type)->to_float != nullptr;
}

// Writes scaled rows of an embedding table [width, n_vocab].
static void read_rows(const void * table, ggml_type type, int64_t width, float scale,
                      const int32_t * tokens, int64_t n, float * dst) {
    const size_t row_size = ggml_row_size(type, width);
    for (int64_t i = 0; i < n; ++i) {
        const char * row = static_cast<const char *>(table) + tokens[i] * row_size;
        if (i > 0 && tokens[i] == tokens[i - 1]) { // copies the row of a repeated token (padding)
            std::memcpy(dst + i * width, dst + (i - 1) * width, width * sizeof(float));
        } else if (type == GGML_TYPE_F32) {
            std::memcpy(dst + i * width, row, row_size);
        } else {
            ggml_get_type_traits(type)->to_float(row, dst + i * width, width);
        }
    }
    if (scale != 1.0f) {
        std::for_each(dst, dst + n * width, [&](float & x) { x *= scale; });
    }
}

void embed_rows(const Weights & w, int64_t n_embd, float scale, const int32_t * tokens, int64_t n,
                float * dst) {
    read_rows(w.token_embd, w.token_embd_type, n_embd, scale, tokens, n, dst);
}

void embed_per_layer(const Weights & w, const Hparams & hp, const int32_t * tokens, int64_t n,
                     float * dst) {
    const float scale = std::sqrt(static_cast<float>(hp.n_per_layer));
    read_rows(w.per_layer_embd, w.per_layer_embd_type, hp.n_per_layer * hp.n_layer(), scale, tokens,
              n, dst);
}

WeightLoader::WeightLoader(const GgufFile & file, const Hparams & hp, Devices & devices,
                           int first_block)
    : file_(file), hp_(hp), devices_(devices), first_block_(first_block), owned_(new Weights),
      weights_(*owned_) {
    weights_.layers.resize(hp.n_layer());
}

WeightLoader::~WeightLoader() = default;

std::string WeightLoader::name_of(const char * pattern, int il) const {
    return tensor_name(pattern, first_block_ + il);
}

const ggml_tensor * WeightLoader::checked(const std::string & name, const std::vector<int64_t> & ne,
                                          ggml_op op) const {
    const ggml_tensor * meta = file_.tensor(name);
    DFL_CHECK(meta != nullptr, DFL_STATUS_FILE, "%s: tensor %s is missing", file_.path().c_str(),
              name.c_str());
    bool same = true;
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        same = same && meta->ne[i] == (i < static_cast<int>(ne.size()) ? ne[i] : 1);
    }
    DFL_CHECK(same, DFL_STATUS_FILE, "%s: tensor %s has shape %s, expected %s",
              file_.path().c_str(), name.c_str(), shape_text(meta->ne, ggml_n_dims(meta)).c_str(),
              shape_text(ne.data(), ne.size()).c_str());
    const bool product = op == GGML_OP_MUL_MAT || op == GGML_OP_MUL_MAT_ID;
    DFL_CHECK(product ? is_multipliable(meta->type) : meta->type == GGML_TYPE_F32,
              DFL_STATUS_UNSUPPORTED, "%s: tensor %s is of type %s, expected %s",
              file_.path().c_str(), name.c_str(), ggml_type_name(meta->type),
              product ? "a quantised or float type" : "f32");
    return meta;
}

ggml_tensor * WeightLoader::request(const std::string & name, std::vector<int64_t> ne, ggml_op op) {
    const ggml_tensor * meta = checked(name, ne, op);
    const Place place = choose(meta, op);
    ggml_tensor * tensor = ggml_dup_tensor(context_for(place), meta);
    ggml_set_name(tensor, name.c_str());
    TensorRequest request;
    request.file_names = {name};
    request.tensor = tensor;
    request.mapped = can_map(name, place);
    requests_.push_back(request);
    return tensor;
}

Linear WeightLoader::stacked(const std::vector<Part> & parts, int il, int64_t n_in) {
    std::vector<std::string> names;
    ggml_tensor whole = {};
    for (const Part & part : parts) {
        names.push_back(name_of(part.pattern, il));
        const ggml_tensor * meta = checked(names.back(), {n_in, part.n_out}, GGML_OP_MUL_MAT);
        const bool plain = file_.tensor(companion(names.back(), ".scale")) == nullptr &&
                           file_.tensor(companion(names.back(), ".bias")) == nullptr;
        if (!plain || (names.size() > 1 && meta->type != whole.type)) {
            return {};
        }
        const int64_t rows = names.size() > 1 ? whole.ne[1] : 0;
        whole = *meta;
        whole.ne[1] += rows;
    }
    if (product_for(names[0], whole.type) != nullptr) {
        return {};
    }
    const Place place = choose(&whole, GGML_OP_MUL_MAT);
    TensorRequest request;
    request.mapped = can_map(names[0], place);
    if (request.mapped && !file_.are_adjacent(names)) {
        return {}; // a joined copy would cost the memory that mapping saves
    }
    Linear linear;
    linear.weight = ggml_new_tensor_2d(context_for(place), whole.type, n_in, whole.ne[1]);
    ggml_set_name(linear.weight, names[0].c_str());
    request.tensor = linear.weight;
    request.file_names = std::move(names);
    requests_.push_back(request);
    return linear;
}

bool WeightLoader::has(const char * pattern, int il) const {
    return file_.tensor(name_of(pattern, il)) != nullptr;
}

int64_t WeightLoader::n_rows(const char * name) const {
    const ggml_tensor * found = file_.tensor(name_of(name, 0));
    return found != nullptr ? found->ne[1] : 0;
}

ggml_tensor * WeightLoader::vector(const char * pattern, int il, int64_t n) {
    return request(name_of(pattern, il), {n}, GGML_OP_MUL);
}

ggml_tensor * WeightLoader::computed(const char * name, const std::vector<float> & values) {
    const Backend & backend = devices_.of_weight(name);
    TensorRequest request;
    request.tensor = ggml_new_tensor_1d(context_for({&backend, backend.default_buffer_type()}),
                                        GGML_TYPE_F32, static_cast<int64_t>(values.size()));
    ggml_set_name(request.tensor, name);
    request.values = values;
    requests_.push_back(request);
    return request.tensor;
}

ggml_tensor * WeightLoader::scaled_vector(const char * pattern, int il, int64_t n, float factor) {
    const std::string name = name_of(pattern, il);
    checked(name, {n}, GGML_OP_MUL);
    std::vector<float> values(n);
    std::memcpy(values.data(), file_.tensor_data(name), n * sizeof(float));
    std::for_each(values.begin(), values.end(), [&](float & x) { x *= factor; });
    read_directly_.insert(name);
    return computed(name.c_str(), values);
}

ggml_tensor * WeightLoader::matrix(const char * pattern, int il, std::initializer_list<int64_t> ne,
                                   ggml_op op) {
    return request(name_of(pattern, il), ne, op);
}

Linear WeightLoader::linear(const char * pattern, int il, int64_t n_in, int64_t n_out, bool plain) {
    const std::string name = name_of(pattern, il);
    const std::string scale = companion(name, ".scale");
    const std::string bias = companion(name, ".bias");
    Linear linear;
    const ggml_tensor * meta = checked(name, {n_in, n_out}, GGML_OP_MUL_MAT);
    PackedMatrix matrix;
    matrix.n_in = n_in;
    matrix.n_out = n_out;
    linear.packed = packed(name, meta->type, matrix);
    if (linear.packed == nullptr) {
        linear.weight = request(name, {n_in, n_out}, GGML_OP_MUL_MAT);
    }
    if (plain) {
        return linear;
    }
    if (file_.tensor(bias) != nullptr) {
        linear.bias = request(bias, {n_out}, GGML_OP_ADD);
    }
    if (file_.tensor(scale) != nullptr) {
        linear.scale = request(scale, {1}, GGML_OP_MUL);
    }
    return linear;
}

Linear WeightLoader::expert_linear(const char * pattern, int il, int64_t n_in, int64_t n_out,
                                   bool packs, int64_t first_row, int64_t file_rows) {
    const std::string name = name_of(pattern, il);
    const std::string scale = companion(name, ".scale");
    const std::string bias = companion(name, ".bias");
    const int64_t n_experts = hp_.experts.n_expert;
    Linear linear;
    if (packs) {
        PackedMatrix matrix;
        matrix.n_in = n_in;
        matrix.n_out = n_out;
        matrix.n_experts = n_experts;
        matrix.first_row = first_row;
        matrix.file_rows = file_rows;
        const ggml_tensor * meta =
            checked(name, {n_in, matrix.n_file_rows(), n_experts}, GGML_OP_MUL_MAT_ID);
        linear.packed = packed(name, meta->type, matrix);
    } else {
        linear.weight = request(name, {n_in, n_out, n_experts}, GGML_OP_MUL_MAT_ID);
    }
    if (file_rows == 0 && file_.tensor(bias) != nullptr) {
        linear.bias = request(bias, {n_out, n_experts}, GGML_OP_ADD_ID);
    }
    if (file_.tensor(scale) != nullptr && first_row == 0) {
        linear.scale = request(scale, {n_experts}, GGML_OP_MUL);
    }
    return linear;
}

bool WeightLoader::packs_experts(int il) const {
    const auto product = [&](const char * pattern) -> const cpu::PackedProduct * {
        const std::string name = name_of(pattern, il);
        const ggml_tensor * meta = file_.tensor(name);
        const cpu::PackedProduct * found =
            meta != nullptr ? product_for(name, meta->type) : nullptr;
        return found != nullptr && found->packed_size(meta->ne[0], meta->ne[1]) > 0 ? found
                                                                                    : nullptr;
    };
    const bool fused = has(schema::TENSOR_FFN_GATE_UP_EXPS, il);
    const cpu::PackedProduct * gate =
        product(fused ? schema::TENSOR_FFN_GATE_UP_EXPS : schema::TENSOR_FFN_GATE_EXPS);
    const cpu::PackedProduct * up = fused ? gate : product(schema::TENSOR_FFN_UP_EXPS);
    return gate != nullptr && up != nullptr && product(schema::TENSOR_FFN_DOWN_EXPS) != nullptr &&
           gate->quantize_row == up->quantize_row;
}

void WeightLoader::token_embeddings(const char * pattern) {
    const std::string name = name_of(pattern, 0);
    const ggml_tensor * embd = checked(name, {hp_.n_embd, hp_.n_vocab}, GGML_OP_MUL_MAT);
    weights_.token_embd = file_.tensor_data(name);
    weights_.token_embd_type = embd->type;
    weights_.embedding_bytes = ggml_nbytes(embd);
    read_directly_.insert(name);
}

void WeightLoader::per_layer_inputs() {
    const char * name = schema::TENSOR_PER_LAYER_TOKEN_EMBD;
    const int64_t width = hp_.n_per_layer * hp_.n_layer();
    const ggml_tensor * table = checked(name, {width, hp_.n_vocab}, GGML_OP_MUL_MAT);
    weights_.per_layer_embd = file_.tensor_data(name);
    weights_.per_layer_embd_type = table->type;
    weights_.embedding_bytes += ggml_nbytes(table);
    read_directly_.insert(name);
    weights_.per_layer_projection =
        linear(schema::TENSOR_PER_LAYER_MODEL_PROJ, 0, hp_.n_embd, width);
    weights_.per_layer_projection_norm =
        vector(schema::TENSOR_PER_LAYER_PROJ_NORM, 0, hp_.n_per_layer);
    for (int64_t il = 0; il < hp_.n_layer(); ++il) {
        LayerWeights & layer = weights_.layers[il];
        layer.per_layer.gate =
            linear(schema::TENSOR_PER_LAYER_INP_GATE, il, hp_.n_embd, hp_.n_per_layer);
        layer.per_layer.projection =
            linear(schema::TENSOR_PER_LAYER_PROJ, il, hp_.n_per_layer, hp_.n_embd);
        layer.per_layer_norm = vector(schema::TENSOR_PER_LAYER_POST_NORM, il, hp_.n_embd);
    }
}

void WeightLoader::ignore(const char * pattern, int il) {
    read_directly_.insert(name_of(pattern, il));
}

void WeightLoader::shared_tensors() {
    token_embeddings(schema::TENSOR_TOKEN_EMBD);
    weights_.output_norm = vector(schema::TENSOR_OUTPUT_NORM, 0, hp_.n_embd);
    const bool tied = !has(schema::TENSOR_OUTPUT, 0);
    weights_.output = linear(tied ? schema::TENSOR_TOKEN_EMBD : schema::TENSOR_OUTPUT, 0,
                             hp_.n_embd, hp_.n_vocab);
    rope_factors();
}

void WeightLoader::rope_factors() {
    const bool stored = has(schema::TENSOR_ROPE_FREQS, 0);
    if (stored) {
        read_directly_.insert(schema::TENSOR_ROPE_FREQS); // unused rope factors are no error
    }
    // Tensors of rope factors by their values; the empty key stands for the file's own factors.
    std::map<std::vector<float>, ggml_tensor *> loaded;
    for (int64_t il = 0; il < hp_.n_layer(); ++il) {
        const RopeShape & rope = hp_.layers[il].rope;
        const bool reads = stored && rope.takes_factors;
        if (hp_.layers[il].recurrent || (!reads && rope.factors.empty())) {
            continue;
        }
        DFL_CHECK(!reads || rope.factors.empty(), DFL_STATUS_UNSUPPORTED,
                  "%s: tensor %s is not supported with YaRN whose bounds are not rounded",
                  file_.path().c_str(), schema::TENSOR_ROPE_FREQS);
        ggml_tensor *& factors = loaded[rope.factors];
        if (reads) {
            checked(schema::TENSOR_ROPE_FREQS, {rope.n_dims / 2}, GGML_OP_MUL);
        }
        if (factors == nullptr) {
            factors = reads ? vector(schema::TENSOR_ROPE_FREQS, 0, rope.n_dims / 2)
                            : computed("yarn_factors", rope.factors);
        }
        weights_.layers[il].attn.rope_factors = factors;
    }
}

void WeightLoader::head_map() {
    if (const ggml_tensor * map = file_.tensor(schema::TENSOR_D2T)) {
        DFL_CHECK(map->type == GGML_TYPE_I64 && ggml_n_dims(map) == 1, DFL_STATUS_FILE,
                  "%s: tensor %s is not a list of i64", file_.path().c_str(), schema::TENSOR_D2T);
        const auto * tokens = static_cast<const int64_t *>(file_.tensor_data(schema::TENSOR_D2T));
        weights_.head_tokens.resize(map->ne[0]);
        // Copies the map to the target's tokens, which the file may align too little for int64_t.
        std::memcpy(weights_.head_tokens.data(), tokens, map->ne[0] * sizeof(int64_t));
        for (const int64_t token : weights_.head_tokens) {
            DFL_CHECK(token >= 0 && token < hp_.n_vocab, DFL_STATUS_FILE,
                      "%s: tensor %s names token %lld, the target has %lld tokens",
                      file_.path().c_str(), schema::TENSOR_D2T, (long long)token,
                      (long long)hp_.n_vocab);
        }
        DFL_CHECK(map->ne[0] >= MIN_HEAD_TOKENS, DFL_STATUS_FILE,
                  "%s: tensor %s lists %lld tokens, at least %lld are needed", file_.path().c_str(),
                  schema::TENSOR_D2T, (long long)map->ne[0], (long long)MIN_HEAD_TOKENS);
        read_directly_.insert(schema::TENSOR_D2T);
    }
}

void WeightLoader::reduced_head(const char * pattern) {
    const std::string name = name_of(pattern, 0);
    ggml_tensor part = *checked(name, {hp_.n_embd, hp_.n_vocab}, GGML_OP_MUL_MAT);
    PackedMatrix matrix;
    matrix.n_in = hp_.n_embd;
    matrix.n_out = part.ne[1] = static_cast<int64_t>(weights_.head_tokens.size());
    Linear & head = weights_.output;
    head.packed = packed(name, part.type, matrix);
    if (head.packed == nullptr) {
        TensorRequest request;
        request.file_names = {name};
        request.tensor = head.weight = ggml_new_tensor_2d(
            context_for(choose(&part, GGML_OP_MUL_MAT)), part.type, part.ne[0], part.ne[1]);
        ggml_set_name(head.weight, name.c_str());
        requests_.push_back(request);
    }
    TensorRequest & request = requests_.back();
    request.rows = weights_.head_tokens;
    request.mapped = false;
    if (request.packed != nullptr) {
        request.packed->stride = 0;
    }
    const std::string scale = companion(name, ".scale");
    if (file_.tensor(scale) != nullptr) {
        head.scale = this->request(scale, {1}, GGML_OP_MUL);
    }
}

void WeightLoader::drafter_head() {
    head_map();
    const std::vector<int64_t> & tokens = weights_.head_tokens;
    const int64_t n_rows = tokens.empty() ? hp_.n_vocab : static_cast<int64_t>(tokens.size());
    if (has(schema::TENSOR_OUTPUT, 0)) {
        weights_.output = linear(schema::TENSOR_OUTPUT, 0, hp_.n_embd, n_rows);
    } else if (has(schema::TENSOR_TOKEN_EMBD, 0)) {
        weights_.output = linear(schema::TENSOR_TOKEN_EMBD, 0, hp_.n_embd, hp_.n_vocab);
    }
    DFL_CHECK(weights_.head_tokens.empty() || has(schema::TENSOR_OUTPUT, 0), DFL_STATUS_FILE,
              "%s: tensor %s maps the rows of an output head, which the file lacks",
              file_.path().c_str(), schema::TENSOR_D2T);
}

void WeightLoader::ngram_table() {
    weights_.ngrams = std::make_unique<const NgramTable>(file_, hp_.n_vocab);
    weights_.mapped_bytes += weights_.ngrams->bytes();
    read_directly_.insert(
        {schema::TENSOR_NGRAM_TOKENS, schema::TENSOR_NGRAM_CLASS, schema::TENSOR_NGRAM_PROB});
}

void WeightLoader::attention(int il, int64_t q_width) {
    const LayerShape & shape = hp_.layers[il];
    const int64_t kv_width = shape.head_dim * shape.n_head_kv;
    AttentionWeights & attn = weights_.layers[il].attn;
    if (has(schema::TENSOR_ATTN_QKV, il)) {
        attn.qkv = linear(schema::TENSOR_ATTN_QKV, il, hp_.n_embd, q_width + 2 * kv_width);
    } else if (!shape.value_is_key) { // drafters keep Q, K and V apart, to use K and V without Q
        attn.qkv = stacked({{schema::TENSOR_ATTN_Q, q_width},
                            {schema::TENSOR_ATTN_K, kv_width},
                            {schema::TENSOR_ATTN_V, kv_width}},
                           il, hp_.n_embd);
    }
    if (!attn.qkv) {
        attn.q = linear(schema::TENSOR_ATTN_Q, il, hp_.n_embd, q_width);
        attn.k = linear(schema::TENSOR_ATTN_K, il, hp_.n_embd, kv_width);
        if (has(schema::TENSOR_ATTN_V, il) || !hp_.layers[il].value_is_key) {
            attn.v = linear(schema::TENSOR_ATTN_V, il, hp_.n_embd, kv_width);
        }
    }
    attn.output = linear(schema::TENSOR_ATTN_OUTPUT, il, shape.head_dim * shape.n_head, hp_.n_embd);
}

void WeightLoader::feed_forward(int il) {
    const int64_t n_ff = hp_.layers[il].n_ff;
    FeedForwardWeights & ffn = weights_.layers[il].ffn;
    ffn.gate_up =
        stacked({{schema::TENSOR_FFN_GATE, n_ff}, {schema::TENSOR_FFN_UP, n_ff}}, il, hp_.n_embd);
    if (!ffn.gate_up) {
        ffn.gate = linear(schema::TENSOR_FFN_GATE, il, hp_.n_embd, n_ff);
        ffn.up = linear(schema::TENSOR_FFN_UP, il, hp_.n_embd, n_ff);
    }
    ffn.down = linear(schema::TENSOR_FFN_DOWN, il, n_ff, hp_.n_embd);
}

void WeightLoader::experts(int il) {
    const ExpertShape & shape = hp_.experts;
    ExpertWeights & experts = weights_.layers[il].experts;
    if (!experts.router) {
        experts.router = linear(schema::TENSOR_FFN_GATE_INP, il, hp_.n_embd, shape.n_expert);
    }
    const bool packs = packs_experts(il);
    const char * fused = schema::TENSOR_FFN_GATE_UP_EXPS;
    if (!has(fused, il)) {
        experts.gate =
            expert_linear(schema::TENSOR_FFN_GATE_EXPS, il, hp_.n_embd, shape.n_ff, packs);
        experts.up = expert_linear(schema::TENSOR_FFN_UP_EXPS, il, hp_.n_embd, shape.n_ff, packs);
    } else if (packs) {
        experts.gate = expert_linear(fused, il, hp_.n_embd, shape.n_ff, packs, 0, 2 * shape.n_ff);
        experts.up =
            expert_linear(fused, il, hp_.n_embd, shape.n_ff, packs, shape.n_ff, 2 * shape.n_ff);
        experts.up.scale = experts.gate.scale;
    } else {
        experts.gate_up = expert_linear(fused, il, hp_.n_embd, 2 * shape.n_ff, packs);
    }
    experts.down = expert_linear(schema::TENSOR_FFN_DOWN_EXPS, il, shape.n_ff, hp_.n_embd, packs);
    if (shape.n_ff_shared > 0) {
        experts.shared_gate = linear(schema::TENSOR_FFN_GATE_INP_SHEXP, il, hp_.n_embd, 1);
        experts.shared.gate =
            linear(schema::TENSOR_FFN_GATE_SHEXP, il, hp_.n_embd, shape.n_ff_shared);
        experts.shared.up = linear(schema::TENSOR_FFN_UP_SHEXP, il, hp_.n_embd, shape.n_ff_shared);
        experts.shared.down =
            linear(schema::TENSOR_FFN_DOWN_SHEXP, il, shape.n_ff_shared, hp_.n_embd);
    }
}

} // namespace dfl
