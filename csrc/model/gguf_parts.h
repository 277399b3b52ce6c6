// The files a model lies in: one, or several where it was split. Each is mapped, its header read
// and its tensors known to be complete.
#pragma once

#include <cstdint>
#include <ggml-cpp.h>
#include <gguf.h>
#include <memory>
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

struct GgufPart {
    // Throws DFL_STATUS_FILE on anything but a complete, well-formed GGUF file.
    explicit GgufPart(const std::string & path);

    const char * tensor_data(int64_t index) const {
        return mapping.data() + gguf_get_data_offset(gguf.get()) +
               gguf_get_tensor_offset(gguf.get(), index);
    }

    std::string path;
    FileMapping mapping;
    gguf_context_ptr gguf;
    ggml_context_ptr meta; // type and shape of every tensor
};

// The file at path, followed by the others if it is the first of a split model (metadata split.no,
// split.count and split.tensors.count, names "...-00001-of-00003.gguf"; the first part holds the
// metadata of all). Throws DFL_STATUS_FILE unless every part is there and belongs to the others.
std::vector<std::unique_ptr<const GgufPart>> open_parts(const std::string & path);

// Element i of a value of a whole number's type, or a bool; empty for other types.
std::optional<int64_t> read_integer(gguf_type type, const void * data, size_t i);

} // namespace dfl
