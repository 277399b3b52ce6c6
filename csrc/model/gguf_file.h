// A model in GGUF, in one file or several: typed metadata, tensor table, and mapped tensor data.
#pragma once

#include "model/gguf_parts.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace dfl {

class GgufFile {
  public:
    // Opens the only file or the first part. Throws DFL_STATUS_FILE on incomplete or invalid GGUF.
    explicit GgufFile(const std::string & path);

    const std::string & path() const { return path_; }
    const std::string & arch() const { return arch_; }

    // Returns a metadata key with "%s" replaced by the architecture.
    std::string key(const char * pattern) const;

    bool has(const char * pattern) const { return find(pattern) >= 0; }
    // True if a key holds an array; some keys hold one value or an array with one per layer.
    bool is_array(const char * pattern) const;

    // Return the value of a key; empty if the key is absent. Throw if the value has another type.
    std::optional<int64_t> integer(const char * pattern) const;
    std::optional<double> real(const char * pattern) const;
    std::optional<bool> boolean(const char * pattern) const;
    std::optional<std::string> text(const char * pattern) const;
    std::optional<std::vector<int64_t>> integers(const char * pattern) const;
    std::optional<int64_t> array_length(const char * pattern) const;

    // A metadata key of the file's architecture that no code has read.
    struct Unread {
        std::string key;
        std::vector<double> numbers; // values of the key; empty for text
        std::string text;            // value as text for error messages
    };
    std::vector<Unread> unread() const;

    // Returns the first index at which two arrays of strings (or their lengths) differ, or -1.
    int64_t first_difference(const GgufFile & other, const char * pattern) const;

    // Return the value of a key; throw if it is absent or outside [low, high].
    int64_t need_integer(const char * pattern, int64_t low, int64_t high) const;
    double need_real(const char * pattern) const;
    // Returns the n_layer values of a key that holds one value for all layers, or an array.
    std::vector<int64_t> need_per_layer(const char * pattern, int64_t n_layer, int64_t low,
                                        int64_t high) const;

    // Returns type and shape of a tensor, or NULL if the file has no such tensor.
    const ggml_tensor * tensor(const std::string & name) const;
    // Return the data of a tensor, and the mapping that holds them; the file must have the tensor.
    const void * tensor_data(const std::string & name) const;
    const FileMapping & mapping_of(const std::string & name) const;
    // True if the bytes of the named tensors follow each other without gaps.
    bool are_adjacent(const std::vector<std::string> & names) const;
    int64_t tensor_count() const { return static_cast<int64_t>(names_.size()); }
    const std::string & tensor_name(int64_t index) const { return names_[index]; }

  private:
    int64_t find(const char * pattern) const;
    [[noreturn]] void wrong_type(int64_t id, const char * expected) const;

    struct Stored {
        const ggml_tensor * meta;
        const char * data;
        const GgufPart * part;
    };

    std::string path_;
    std::vector<std::unique_ptr<const GgufPart>> parts_;
    const gguf_context * gguf_;
    std::vector<std::string> names_;
    std::unordered_map<std::string, Stored> tensors_;
    std::string arch_;
    mutable std::vector<std::atomic<bool>> keys_read_;
};

} // namespace dfl
