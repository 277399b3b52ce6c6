// GgufFile and Model with damaged files: loading fails with an Error or gives a working model.
#include "check.h"
#include "engine/sequence.h"
#include "gguf_schema.h"
#include "model/gguf_file.h"
#include "models.h"
#include "passes.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <random>

using namespace dfl;

namespace {

std::string read_all(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

void write_all(const std::string & path, const std::string & bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

void reads_what_was_written(const std::string & path) {
    const GgufFile file(path);
    CHECK(file.arch() == schema::ARCH_QWEN35);
    CHECK(file.integer(schema::KEY_BLOCK_COUNT) == 3);
    CHECK(!file.integer(schema::KEY_EXPERT_COUNT));
    CHECK(file.real(schema::KEY_ATTENTION_LAYER_NORM_RMS_EPSILON).value() < 2e-5);
    CHECK(
        (*file.integers(schema::KEY_ROPE_DIMENSION_SECTIONS) == std::vector<int64_t>{3, 3, 2, 0}));
    CHECK(file.tensor("blk.0.attn_norm.weight")->ne[0] == 100);
    CHECK(file.tensor("blk.7.attn_norm.weight") == nullptr);
    CHECK(contains(error_of([&] { file.text(schema::KEY_BLOCK_COUNT); }), "expected a string"));
    CHECK(contains(error_of([&] { file.integers(schema::KEY_BLOCK_COUNT); }), "expected an array"));
    CHECK(contains(error_of([&] { file.need_integer(schema::KEY_BLOCK_COUNT, 4, 9); }),
                   "qwen35.block_count is 3, expected 4 to 9"));
}

// Returns true if the model loads and runs. The sanitizers fail on anything but an Error.
bool try_model(const std::string & path) {
    const std::string error = error_of([&] {
        EngineParams params;
        params.n_ctx = 32;
        params.n_ubatch = 3;
        params.n_threads = 1;
        Sequence sequence(
            std::make_shared<Engine>(std::make_shared<Model>(path, on_cpu()), params));
        const int32_t tokens[] = {0, 1, 2, 3};
        prefill(sequence, tokens, 4);
        sequence.argmax(0);
    });
    CHECK(!contains(error, "\n"));
    return error.empty();
}

void truncated(const std::string & path, const std::string & bytes) {
    for (size_t size = 0; size < bytes.size(); size += 1 + size / 8) {
        write_all(path, bytes.substr(0, size));
        CHECK(!try_model(path));
    }
}

// Damages the header of the file at `path`, then loads the model by the path `given`.
void damaged(const std::string & path, const std::string & bytes, size_t header, unsigned seed,
             const std::string & given) {
    std::mt19937 random(seed);
    std::string copy = bytes;
    for (unsigned n = 1 + random() % 3; n > 0; --n) {
        const size_t at = random() % header;
        const char patterns[] = {0, 1, 2, 8, char(0x7f), char(0x80), char(0xff)};
        std::fill_n(copy.begin() + at, std::min<size_t>(1 + random() % 8, header - at),
                    patterns[random() % sizeof patterns]);
    }
    write_all(path, copy);
    try_model(given);
}

// Splits a GGUF file into two parts, with all metadata in the first, and returns their paths.
std::vector<std::string> split(const std::string & path, const std::string & prefix) {
    ggml_context * data = nullptr;
    gguf_context_ptr whole(gguf_init_from_file(path.c_str(), {/*no_alloc =*/false, &data}));
    ggml_context_ptr tensors(data);
    const int64_t n = gguf_get_n_tensors(whole.get());
    std::vector<std::string> paths;
    for (int part = 0; part < 2; ++part) {
        gguf_context_ptr gguf(gguf_init_empty());
        if (part == 0) {
            gguf_set_kv(gguf.get(), whole.get());
        }
        gguf_set_val_u16(gguf.get(), schema::KEY_SPLIT_NO, part);
        gguf_set_val_u16(gguf.get(), schema::KEY_SPLIT_COUNT, 2);
        gguf_set_val_i32(gguf.get(), schema::KEY_SPLIT_TENSORS_COUNT, n);
        for (int64_t i = part * n / 2; i < (part + 1) * n / 2; ++i) {
            const char * name = gguf_get_tensor_name(whole.get(), i);
            gguf_add_tensor(gguf.get(), ggml_get_tensor(data, name));
        }
        paths.push_back(prefix + (part == 0 ? "-00001-of-00002.gguf" : "-00002-of-00002.gguf"));
        CHECK(gguf_write_to_file(gguf.get(), paths.back().c_str(), /*only_meta =*/false));
    }
    return paths;
}

void damaged_parts(const std::string & whole, const std::string & prefix) {
    const std::vector<std::string> paths = split(whole, prefix);
    CHECK(try_model(paths[0]));
    CHECK(contains(error_of([&] { GgufFile file(paths[1]); }), "give the first"));
    for (const std::string & path : paths) {
        const std::string bytes = read_all(path);
        const GgufPart part(path);
        const size_t header = gguf_get_data_offset(part.gguf.get());
        for (unsigned seed = 0; seed < 200; ++seed) {
            damaged(path, bytes, header, seed, paths[0]);
        }
        for (size_t size = 0; size < bytes.size(); size += 1 + size / 4) {
            write_all(path, bytes.substr(0, size));
            CHECK(!try_model(paths[0]));
        }
        write_all(path, bytes);
    }
    CHECK(try_model(paths[0]));
}

} // namespace

int main() {
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    const std::string whole = model_path("small-qwen35"), broken = model_path("broken");
    for (const std::string & whole : {model_path("small-llama"), model_path("small-qwen35")}) {
        CHECK(try_model(whole));
        const std::string bytes = read_all(whole);
        // The header ends where the data of the first tensor begins.
        const GgufFile file(whole);
        const char * data = static_cast<const char *>(file.tensor_data(schema::TENSOR_TOKEN_EMBD));
        truncated(broken, bytes);
        for (unsigned seed = 0; seed < 400; ++seed) {
            damaged(broken, bytes, data - file.mapping_of(schema::TENSOR_TOKEN_EMBD).data(), seed,
                    broken);
        }
    }
    reads_what_was_written(whole);
    damaged_parts(whole, models_folder() + "/split");
}
