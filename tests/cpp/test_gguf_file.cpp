// GgufFile and Model on damaged bytes: an Error or a model that works, never anything else.
#include "check.h"
#include "gguf_file.h"
#include "gguf_schema.h"
#include "session.h"
#include "tiny_model.h"

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
    CHECK(file.integer(schema::KEY_BLOCK_COUNT) == 2);
    CHECK(!file.integer(schema::KEY_EXPERT_COUNT));
    CHECK(file.real(schema::KEY_ATTENTION_LAYER_NORM_RMS_EPSILON).value() < 2e-5);
    CHECK(
        (*file.integers(schema::KEY_ROPE_DIMENSION_SECTIONS) == std::vector<int64_t>{2, 1, 1, 0}));
    CHECK(file.tensor("blk.0.attn_norm.weight")->ne[0] == 32);
    CHECK(file.tensor("blk.7.attn_norm.weight") == nullptr);
    CHECK(contains(error_of([&] { file.text(schema::KEY_BLOCK_COUNT); }), "expected a string"));
    CHECK(contains(error_of([&] { file.integers(schema::KEY_BLOCK_COUNT); }), "expected an array"));
    CHECK(contains(error_of([&] { file.need_integer(schema::KEY_BLOCK_COUNT, 3, 9); }),
                   "qwen35.block_count is 2, expected 3 to 9"));
}

// Every way out but a clean one fails under the sanitizers.
bool try_model(const std::string & path) {
    const std::string error = error_of([&] {
        SessionParams params;
        params.n_ctx = 32;
        params.n_ubatch = 3;
        params.n_threads = 1;
        Session session(std::make_shared<Model>(path, on_cpu()), params);
        const int32_t tokens[] = {0, 1, 2, 3};
        session.prefill(tokens, 4, nullptr, nullptr);
        session.argmax(0);
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

void damaged(const std::string & path, const std::string & bytes, size_t header, unsigned seed) {
    std::mt19937 random(seed);
    std::string copy = bytes;
    for (unsigned n = 1 + random() % 3; n > 0; --n) {
        const size_t at = random() % header;
        const char patterns[] = {0, 1, 2, 8, char(0x7f), char(0x80), char(0xff)};
        std::fill_n(copy.begin() + at, std::min<size_t>(1 + random() % 8, header - at),
                    patterns[random() % sizeof patterns]);
    }
    write_all(path, copy);
    try_model(path);
}

} // namespace

int main() {
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    TemporaryFolder folder;
    const std::string whole = folder.file("whole.gguf"), broken = folder.file("broken.gguf");
    for (auto write : {write_tiny_llama, write_tiny_qwen35}) {
        write(whole);
        CHECK(try_model(whole));
        const std::string bytes = read_all(whole);
        // What precedes the data: its offset is where the first tensor lies.
        const GgufFile file(whole);
        const char * data = static_cast<const char *>(file.tensor_data(schema::TENSOR_TOKEN_EMBD));
        truncated(broken, bytes);
        for (unsigned seed = 0; seed < 400; ++seed) {
            damaged(broken, bytes, data - file.mapping().data(), seed);
        }
    }
    reads_what_was_written(whole);
}
