#include "model/gguf_parts.h"

#include "device/log_capture.h"
#include "error.h"
#include "gguf_schema.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace dfl {

FileMapping::FileMapping(const std::string & path) {
    struct stat st;
    DFL_CHECK(stat(path.c_str(), &st) == 0, DFL_STATUS_FILE, "%s: %s", path.c_str(),
              std::strerror(errno));
    DFL_CHECK(S_ISREG(st.st_mode), DFL_STATUS_FILE, "%s: not a file%s", path.c_str(),
              S_ISDIR(st.st_mode) ? " but a folder" : "");
    DFL_CHECK(st.st_size > 0, DFL_STATUS_FILE, "%s: the file is empty", path.c_str());
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    DFL_CHECK(fd >= 0, DFL_STATUS_FILE, "%s: %s", path.c_str(), std::strerror(errno));
    size_ = static_cast<uint64_t>(st.st_size);
    void * mapped = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
    const int error = errno;
    close(fd);
    DFL_CHECK(mapped != MAP_FAILED, DFL_STATUS_MEMORY, "%s: cannot map %llu bytes: %s",
              path.c_str(), (unsigned long long)size_, std::strerror(error));
    data_ = static_cast<char *>(mapped);
}

FileMapping::~FileMapping() {
    if (data_ != nullptr) {
        munmap(data_, size_);
    }
}

void FileMapping::release(const void * first, uint64_t bytes) const {
#ifdef __linux__
    // The kernel's page cache may keep the released pages, so that later reads need no disk.
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = (reinterpret_cast<uintptr_t>(first) + page - 1) / page * page;
    const auto end = (reinterpret_cast<uintptr_t>(first) + bytes) / page * page;
    if (begin < end) {
        madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED);
    }
#else
    (void)first;
    (void)bytes;
#endif
}

GgufPart::GgufPart(const std::string & path) : path(path), mapping(path) {
    DFL_CHECK(mapping.size() >= 24 && std::memcmp(mapping.data(), GGUF_MAGIC, 4) == 0,
              DFL_STATUS_FILE, "%s: not a GGUF file (it does not begin with \"GGUF\")",
              path.c_str());
    LogCapture log;
    ggml_context * tensors = nullptr;
    gguf.reset(gguf_init_from_file(path.c_str(), {/*no_alloc =*/true, /*ctx =*/&tensors}));
    meta.reset(tensors);
    DFL_CHECK(gguf != nullptr, DFL_STATUS_FILE, "%s: damaged or truncated GGUF header: %s",
              path.c_str(), log.reason().c_str());
    const uint64_t begin = gguf_get_data_offset(gguf.get());
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf.get()); ++i) {
        const uint64_t offset = gguf_get_tensor_offset(gguf.get(), i);
        const uint64_t size = gguf_get_tensor_size(gguf.get(), i);
        DFL_CHECK(begin <= mapping.size() && offset <= mapping.size() - begin &&
                      size <= mapping.size() - begin - offset,
                  DFL_STATUS_FILE,
                  "%s: truncated: tensor %s needs bytes up to %llu, the file has %llu",
                  path.c_str(), gguf_get_tensor_name(gguf.get(), i),
                  (unsigned long long)(begin + offset + size), (unsigned long long)mapping.size());
    }
}

std::optional<int64_t> read_integer(gguf_type type, const void * data, size_t i) {
    switch (type) {
    case GGUF_TYPE_UINT8:
        return static_cast<const uint8_t *>(data)[i];
    case GGUF_TYPE_INT8:
        return static_cast<const int8_t *>(data)[i];
    case GGUF_TYPE_BOOL:
        return static_cast<const int8_t *>(data)[i] != 0;
    case GGUF_TYPE_UINT16:
        return static_cast<const uint16_t *>(data)[i];
    case GGUF_TYPE_INT16:
        return static_cast<const int16_t *>(data)[i];
    case GGUF_TYPE_UINT32:
        return static_cast<const uint32_t *>(data)[i];
    case GGUF_TYPE_INT32:
        return static_cast<const int32_t *>(data)[i];
    case GGUF_TYPE_UINT64:
        return static_cast<int64_t>(static_cast<const uint64_t *>(data)[i]);
    case GGUF_TYPE_INT64:
        return static_cast<const int64_t *>(data)[i];
    default:
        return std::nullopt;
    }
}

// Returns the integer of a split.* key, or by_default if the key is missing.
static int64_t split_number(const GgufPart & part, const char * key, int64_t by_default) {
    const int64_t id = gguf_find_key(part.gguf.get(), key);
    if (id < 0) {
        return by_default;
    }
    const gguf_type type = gguf_get_kv_type(part.gguf.get(), id);
    const bool plain = type != GGUF_TYPE_STRING && type != GGUF_TYPE_ARRAY;
    const auto value =
        plain ? read_integer(type, gguf_get_val_data(part.gguf.get(), id), 0) : std::nullopt;
    DFL_CHECK(value, DFL_STATUS_FILE, "%s: metadata key %s is of type %s, expected an integer",
              part.path.c_str(), key, gguf_type_name(type));
    return *value;
}

// Returns the end of the file name of part `index` (from 0) of n.
static std::string ending(int64_t index, int64_t n) {
    return format("-%05lld-of-%05lld.gguf", (long long)index + 1, (long long)n);
}

static void check_follows(const GgufPart & part, int64_t index, const GgufPart & first, int64_t n) {
    const int64_t no = split_number(part, schema::KEY_SPLIT_NO, -1);
    const int64_t count = split_number(part, schema::KEY_SPLIT_COUNT, 1);
    DFL_CHECK(no == index && count == n, DFL_STATUS_FILE,
              "%s: its split.no is %lld and its split.count %lld, expected %lld and %lld after %s",
              part.path.c_str(), (long long)no, (long long)count, (long long)index, (long long)n,
              first.path.c_str());
    const int64_t total = split_number(part, schema::KEY_SPLIT_TENSORS_COUNT, -1);
    const int64_t expected = split_number(first, schema::KEY_SPLIT_TENSORS_COUNT, -1);
    DFL_CHECK(total == expected, DFL_STATUS_FILE,
              "%s: part of another model than %s: its split.tensors.count is %lld, expected %lld",
              part.path.c_str(), first.path.c_str(), (long long)total, (long long)expected);
}

std::vector<std::unique_ptr<const GgufPart>> open_parts(const std::string & path) {
    std::vector<std::unique_ptr<const GgufPart>> parts;
    parts.push_back(std::make_unique<GgufPart>(path));
    const GgufPart & first = *parts[0];
    constexpr int64_t max_parts = 65535; // gguf-split stores the number of parts as u16
    const int64_t n = split_number(first, schema::KEY_SPLIT_COUNT, 1);
    DFL_CHECK(n >= 0 && n <= max_parts, DFL_STATUS_FILE,
              "%s: split.count is %lld, expected 0 to %lld", path.c_str(), (long long)n,
              (long long)max_parts);
    if (n <= 1) {
        return parts;
    }
    const int64_t no = split_number(first, schema::KEY_SPLIT_NO, 0);
    DFL_CHECK(
        no == 0, DFL_STATUS_FILE,
        "%s: split.no makes it part %lld of a model in %lld files; give the first, whose name "
        "ends in %s",
        path.c_str(), (long long)no + 1, (long long)n, ending(0, n).c_str());
    const std::string end = ending(0, n);
    DFL_CHECK(path.size() > end.size() &&
                  path.compare(path.size() - end.size(), end.size(), end) == 0,
              DFL_STATUS_FILE,
              "%s: the first of %lld files; its name must end in %s for the others to be found",
              path.c_str(), (long long)n, end.c_str());
    int64_t n_tensors = gguf_get_n_tensors(first.gguf.get());
    for (int64_t i = 1; i < n; ++i) {
        const std::string next = path.substr(0, path.size() - end.size()) + ending(i, n);
        DFL_CHECK(access(next.c_str(), F_OK) == 0, DFL_STATUS_FILE,
                  "%s: part %lld of %lld of %s: %s", next.c_str(), (long long)i + 1, (long long)n,
                  path.c_str(), std::strerror(errno));
        parts.push_back(std::make_unique<GgufPart>(next));
        check_follows(*parts.back(), i, first, n);
        n_tensors += gguf_get_n_tensors(parts.back()->gguf.get());
    }
    const int64_t expected = split_number(first, schema::KEY_SPLIT_TENSORS_COUNT, -1);
    DFL_CHECK(n_tensors == expected, DFL_STATUS_FILE,
              "%s: its %lld parts hold %lld tensors, split.tensors.count is %s", path.c_str(),
              (long long)n, (long long)n_tensors,
              expected < 0 ? "missing" : std::to_string(expected).c_str());
    return parts;
}

} // namespace dfl
