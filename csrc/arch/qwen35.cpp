// Qwen3.5, Qwen3.6 and Qwen3-Next, dense or with experts: Gated DeltaNet and gated attention.
#include "arch/arch.h"
#include "error.h"
#include "gguf_schema.h"
#include "layers/attention.h"
#include "layers/delta_net.h"

namespace dfl {

static void read_recurrent(const GgufFile & file, Hparams & hp) {
    RecurrentShape & shape = hp.recurrent;
    shape.d_conv = file.need_integer(schema::KEY_SSM_CONV_KERNEL, 2, 16);
    shape.d_state = file.need_integer(schema::KEY_SSM_STATE_SIZE, 1, 1024);
    shape.n_k_heads = file.need_integer(schema::KEY_SSM_GROUP_COUNT, 1, 4096);
    shape.n_v_heads = file.need_integer(schema::KEY_SSM_TIME_STEP_RANK, 1, 4096);
    const int64_t inner = file.need_integer(schema::KEY_SSM_INNER_SIZE, 1, 1 << 24);
    DFL_CHECK(shape.n_v_heads % shape.n_k_heads == 0 && inner == shape.d_state * shape.n_v_heads,
              DFL_STATUS_FILE,
              "%s: ssm.time_step_rank is %lld, ssm.state_size %lld, ssm.group_count %lld and "
              "ssm.inner_size %lld; expected inner_size = time_step_rank * state_size, and a "
              "time_step_rank that group_count divides",
              file.path().c_str(), (long long)shape.n_v_heads, (long long)shape.d_state,
              (long long)shape.n_k_heads, (long long)inner);

    const auto marked = file.integers(schema::KEY_ATTENTION_RECURRENT_LAYERS);
    DFL_CHECK(!marked || (int64_t)marked->size() >= hp.n_layer(), DFL_STATUS_FILE,
              "%s: metadata key %s has %zu values for %lld layers", file.path().c_str(),
              file.key(schema::KEY_ATTENTION_RECURRENT_LAYERS).c_str(), marked ? marked->size() : 0,
              (long long)hp.n_layer());
    const int64_t interval = file.integer(schema::KEY_FULL_ATTENTION_INTERVAL).value_or(4);
    DFL_CHECK(interval > 0, DFL_STATUS_FILE, "%s: metadata key %s is %lld, expected 1 or more",
              file.path().c_str(), file.key(schema::KEY_FULL_ATTENTION_INTERVAL).c_str(),
              (long long)interval);
    for (int64_t il = 0; il < hp.n_layer(); ++il) {
        hp.layers[il].recurrent = marked ? (*marked)[il] != 0 : (il + 1) % interval != 0;
    }
}

static Hparams read(const GgufFile & file) {
    Hparams hp = read_common_hparams(file, {GGML_ROPE_TYPE_IMROPE});
    const auto sections = file.integers(schema::KEY_ROPE_DIMENSION_SECTIONS);
    DFL_CHECK(sections && sections->size() >= 3 && sections->size() <= 4, DFL_STATUS_FILE,
              "%s: metadata key %s must hold three or four rope sections", file.path().c_str(),
              file.key(schema::KEY_ROPE_DIMENSION_SECTIONS).c_str());
    read_rope_sections(file, hp);
    read_recurrent(file, hp);
    return hp;
}

static Hparams read_moe(const GgufFile & file) {
    Hparams hp = read(file);
    hp.experts = read_expert_shape(file, /*shared =*/true);
    return hp;
}

// Qwen3-Next has rope without sections, and its files store a key head's value heads side by side.
static Hparams read_next(const GgufFile & file) {
    Hparams hp = read_common_hparams(file, {GGML_ROPE_TYPE_NEOX});
    read_recurrent(file, hp);
    hp.recurrent.grouped = true;
    hp.experts = read_expert_shape(file, /*shared =*/true);
    return hp;
}

static void bind_delta_net(WeightLoader & loader, int il) {
    const int64_t n_embd = loader.hparams().n_embd;
    const RecurrentShape & shape = loader.hparams().recurrent;
    const int64_t inner = shape.d_state * shape.n_v_heads;
    DeltaNetWeights & w = loader.weights().layers[il].delta;
    w.qkv = loader.linear(schema::TENSOR_ATTN_QKV, il, n_embd, shape.conv_channels());
    w.gate = loader.linear(schema::TENSOR_ATTN_GATE, il, n_embd, inner);
    w.conv = loader.matrix(schema::TENSOR_SSM_CONV1D, il, {shape.d_conv, shape.conv_channels()},
                           GGML_OP_SSM_CONV);
    w.dt_bias = loader.vector(schema::TENSOR_SSM_DT_BIAS, il, shape.n_v_heads);
    w.a = loader.vector(schema::TENSOR_SSM_A, il, shape.n_v_heads);
    if (shape.grouped) {
        w.beta_alpha =
            loader.linear(schema::TENSOR_SSM_BETA_ALPHA, il, n_embd, 2 * shape.n_v_heads);
    } else {
        w.beta = loader.linear(schema::TENSOR_SSM_BETA, il, n_embd, shape.n_v_heads);
        w.alpha = loader.linear(schema::TENSOR_SSM_ALPHA, il, n_embd, shape.n_v_heads);
    }
    w.norm = loader.vector(schema::TENSOR_SSM_NORM, il, shape.d_state);
    w.output = loader.linear(schema::TENSOR_SSM_OUT, il, inner, n_embd);
}

static void bind_mixer(WeightLoader & loader, int il) {
    const LayerShape & shape = loader.hparams().layers[il];
    if (shape.recurrent) {
        bind_delta_net(loader, il);
    } else {
        loader.attention(il, 2 * shape.head_dim * shape.n_head);
    }
}

static void bind(WeightLoader & loader) {
    BlockOptions options;
    options.head_norms = true;
    options.ffn_norm = schema::TENSOR_POST_ATTENTION_NORM;
    options.bind_mixer = bind_mixer;
    bind_decoder(loader, options);
}

static ggml_tensor * build(GraphContext & g) {
    return build_decoder(g,
                         {mixer_sublayer([](GraphContext & g, int il, const SubLayerInput & in) {
                              return g.hp.layers[il].recurrent ? delta_net(g, il, in.x, in.add)
                                                               : gated_attention(g, il, in);
                          }),
                          feed_forward_sublayer()},
                         g.weights.output);
}

extern const Arch QWEN35 = {schema::ARCH_QWEN35, read, bind, build};
extern const Arch QWEN35MOE = {schema::ARCH_QWEN35MOE, read_moe, bind, build};
extern const Arch QWEN3NEXT = {schema::ARCH_QWEN3NEXT, read_next, bind, build};

} // namespace dfl
