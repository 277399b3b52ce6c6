// One GGUF file: typed metadata, the tensor table, and the mapped tensor data.
#pragma once

#include <atomic>
#include <cstdint>
#include <ggml-cpp.h>
#include <gguf.h>
#include <optional>
#include <string>
#include <vector>

namespace dfl {

// A read-only memory mapping of a whole file.
class FileMapping {
  public:
    explicit FileMapping(const std::string & path);
    ~FileMapping();
    FileMapping(const FileMapping &) = delete;
    FileMapping & operator=(const FileMapping &) = delete;

    char * data() const { return data_; }
    uint64_t size() const { return size_; }
    // Gives back the memory of pages that lie in these bytes; they can still be read.
    void release(const void * first, uint64_t bytes) const;

  private:
    char * data_ = nullptr;
    uint64_t size_ = 0;
};

class GgufFile {
  public:
    // Throws DFL_STATUS_FILE on anything but a complete, well-formed GGUF file.
    explicit GgufFile(const std::string & path);

    const std::string & path() const { return path_; }
    const std::string & arch() const { return arch_; }
    const FileMapping & mapping() const { return mapping_; }

    // A key with its "%s" replaced by the architecture.
    std::string key(const char * pattern) const;

    bool has(const char * pattern) const { return find(pattern) >= 0; }

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
    const void * tensor_data(const std::string & name) const;
    // Whether each tensor's bytes begin where those of the one before end.
    bool are_adjacent(const std::vector<std::string> & names) const;
    int64_t tensor_count() const { return gguf_get_n_tensors(gguf_.get()); }
    std::string tensor_name(int64_t index) const {
        return gguf_get_tensor_name(gguf_.get(), index);
    }

  private:
    int64_t find(const char * pattern) const;
    [[noreturn]] void wrong_type(int64_t id, const char * expected) const;
    void check_tensor_data() const;

    std::string path_;
    FileMapping mapping_;
    gguf_context_ptr gguf_;
    ggml_context_ptr meta_;
    std::string arch_;
    mutable std::vector<std::atomic<bool>> asked_; // by the index of the key
};

} // namespace dfl
