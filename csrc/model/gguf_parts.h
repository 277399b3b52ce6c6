// GGUF files of a model, one or several parts: mapped, and checked to contain all tensor data.
#pragma once

#include <cstdint>
#include <ggml-cpp.h>
#include <gguf.h>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace dfl {

class FileMapping {
  public:
    explicit FileMapping(const std::string & path);
    ~FileMapping();
    FileMapping(const FileMapping &) = delete;
    FileMapping & operator=(const FileMapping &) = delete;

    char * data() const { return data_; }
    uint64_t size() const { return size_; }
    // Lets the system reuse the memory of mapped bytes; later reads take them from the file again.
    void release(const void * first, uint64_t bytes) const;

  private:
    char * data_ = nullptr;
    uint64_t size_ = 0;
};

struct GgufPart {
    // Throws DFL_STATUS_FILE on incomplete or invalid GGUF.
    explicit GgufPart(const std::string & path);

    const char * tensor_data(int64_t index) const {
        return mapping.data() + gguf_get_data_offset(gguf.get()) +
               gguf_get_tensor_offset(gguf.get(), index);
    }

    std::string path;
    FileMapping mapping;
    gguf_context_ptr gguf;
    ggml_context_ptr meta; // type and shape of each tensor
};

// Opens a GGUF file, and the other parts if it is the first of a split model, named like
// "...-00001-of-00003.gguf"; the first part holds all metadata. Throws DFL_STATUS_FILE unless all
// parts exist and belong together (metadata split.no, split.count and split.tensors.count).
std::vector<std::unique_ptr<const GgufPart>> open_parts(const std::string & path);

// Returns element i of integers or booleans at `data`; empty for other types.
std::optional<int64_t> read_integer(gguf_type type, const void * data, size_t i);

} // namespace dfl
