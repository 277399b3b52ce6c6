// A model in GGUF, in one file or several: typed metadata, the tensor table, and the mapped tensor
// data.
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
    // path: the only file, or the first of several. Throws DFL_STATUS_FILE on anything but
    // complete, well-formed GGUF.
    explicit GgufFile(const std::string & path);

    const std::string & path() const { return path_; }
    const std::string & arch() const { return arch_; }

    // A key with its "%s" replaced by the architecture.
    std::string key(const char * pattern) const;

    bool has(const char * pattern) const { return find(pattern) >= 0; }
    // Of a key that holds one value, or one for each layer.
    bool is_array(const char * pattern) const;

    // Each takes a key pattern. Empty if the key is absent; throws if its type does not fit.
    std::optional<int64_t> integer(const char * pattern) const;
    std::optional<double> real(const char * pattern) const;
    std::optional<bool> boolean(const char * pattern) const;
    std::optional<std::string> text(const char * pattern) const;
    std::optional<std::vector<int64_t>> integers(const char * pattern) const;
    // Number of elements of an array key.
    std::optional<int64_t> array_length(const char * pattern) const;

    // A key of the architecture that nobody has asked for by any of the calls above.
    struct Unread {
        std::string key;
        std::vector<double> numbers; // its value or values; empty for text
        std::string text;            // its value as a message shows it, text in quotes
    };
    std::vector<Unread> unread() const;

    // First index at which two arrays of strings differ (in length: the shorter one's), or -1.
    int64_t first_difference(const GgufFile & other, const char * pattern) const;

    // As above, and throws if the key is absent or outside [low, high].
    int64_t need_integer(const char * pattern, int64_t low, int64_t high) const;
    double need_real(const char * pattern) const;
    // One value for all layers, or an array with one for each of n_layer.
    std::vector<int64_t> need_per_layer(const char * pattern, int64_t n_layer, int64_t low,
                                        int64_t high) const;

    // Type and shape of a tensor; NULL if the file has none of this name.
    const ggml_tensor * tensor(const std::string & name) const;
    // Its bytes, and the mapping they lie in. The file must have it.
    const void * tensor_data(const std::string & name) const;
    const FileMapping & mapping_of(const std::string & name) const;
    // Whether each tensor's bytes begin where those of the one before end.
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
    const gguf_context * gguf_; // the metadata
    std::vector<std::string> names_;
    std::unordered_map<std::string, Stored> tensors_;
    std::string arch_;
    mutable std::vector<std::atomic<bool>> keys_read_; // by the index of the key
};

} // namespace dfl
