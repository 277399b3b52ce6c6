#include "gguf_file.h"

#include "error.h"
#include "gguf_schema.h"
#include "log_capture.h"

#include <algorithm>
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
    // A mapping of a file: the pages stay in the page cache as long as there is room.
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

GgufFile::GgufFile(const std::string & path) : path_(path), mapping_(path) {
    DFL_CHECK(mapping_.size() >= 24 && std::memcmp(mapping_.data(), GGUF_MAGIC, 4) == 0,
              DFL_STATUS_FILE, "%s: not a GGUF file (it does not begin with \"GGUF\")",
              path.c_str());
    {
        LogCapture log;
        ggml_context * meta = nullptr;
        gguf_.reset(gguf_init_from_file(path.c_str(), {/*no_alloc =*/true, /*ctx =*/&meta}));
        meta_.reset(meta);
        DFL_CHECK(gguf_ != nullptr, DFL_STATUS_FILE, "%s: damaged or truncated GGUF header: %s",
                  path.c_str(), log.reason().c_str());
    }
    asked_ = std::vector<std::atomic<bool>>(gguf_get_n_kv(gguf_.get()));
    const auto arch = text(schema::KEY_GENERAL_ARCHITECTURE);
    DFL_CHECK(arch && !arch->empty() && arch->size() <= 64, DFL_STATUS_FILE,
              "%s: no usable general.architecture", path.c_str());
    arch_ = *arch;
    const int64_t parts = integer(schema::KEY_SPLIT_COUNT).value_or(1);
    DFL_CHECK(parts <= 1, DFL_STATUS_UNSUPPORTED,
              "%s: part of a file split into %lld; join the parts with llama-gguf-split --merge",
              path.c_str(), (long long)parts);
    check_tensor_data();
}

void GgufFile::check_tensor_data() const {
    const uint64_t begin = gguf_get_data_offset(gguf_.get());
    for (int64_t i = 0; i < tensor_count(); ++i) {
        const uint64_t offset = gguf_get_tensor_offset(gguf_.get(), i);
        const uint64_t size = gguf_get_tensor_size(gguf_.get(), i);
        DFL_CHECK(begin <= mapping_.size() && offset <= mapping_.size() - begin &&
                      size <= mapping_.size() - begin - offset,
                  DFL_STATUS_FILE,
                  "%s: truncated: tensor %s needs bytes up to %llu, the file has %llu",
                  path_.c_str(), gguf_get_tensor_name(gguf_.get(), i),
                  (unsigned long long)(begin + offset + size), (unsigned long long)mapping_.size());
    }
}

std::string GgufFile::key(const char * pattern) const {
    std::string name = pattern;
    const size_t at = name.find("%s");
    return at == std::string::npos ? name : name.replace(at, 2, arch_);
}

int64_t GgufFile::find(const char * pattern) const {
    const int64_t id = gguf_find_key(gguf_.get(), key(pattern).c_str());
    if (id >= 0 && id < static_cast<int64_t>(asked_.size())) {
        asked_[id].store(true, std::memory_order_relaxed);
    }
    return id;
}

void GgufFile::wrong_type(int64_t id, const char * expected) const {
    throw Error(DFL_STATUS_FILE,
                format("%s: metadata key %s is of type %s, expected %s", path_.c_str(),
                       gguf_get_key(gguf_.get(), id),
                       gguf_type_name(gguf_get_kv_type(gguf_.get(), id)), expected));
}

static bool is_plain(gguf_type type) { return type != GGUF_TYPE_STRING && type != GGUF_TYPE_ARRAY; }

static std::optional<int64_t> read_integer(gguf_type type, const void * data, size_t i) {
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

static double read_number(gguf_type type, const void * data, size_t i) {
    switch (type) {
    case GGUF_TYPE_FLOAT32:
        return static_cast<const float *>(data)[i];
    case GGUF_TYPE_FLOAT64:
        return static_cast<const double *>(data)[i];
    default:
        return static_cast<double>(read_integer(type, data, i).value_or(0));
    }
}

// Of a file that may be damaged, within one line of a message.
static std::string printable(const std::string & text) {
    constexpr size_t limit = 64;
    std::string line = text.size() > limit ? text.substr(0, limit) + "..." : text;
    std::replace_if(
        line.begin(), line.end(), [](unsigned char c) { return c < 32 || c > 126; }, '?');
    return line;
}

static GgufFile::Unread value_of(const gguf_context * gguf, int64_t id) {
    GgufFile::Unread value;
    value.key = printable(gguf_get_key(gguf, id));
    gguf_type type = gguf_get_kv_type(gguf, id);
    const bool array = type == GGUF_TYPE_ARRAY;
    if (type == GGUF_TYPE_STRING) {
        value.text = '"' + printable(gguf_get_val_str(gguf, id)) + '"';
        return value;
    }
    const size_t n = array ? gguf_get_arr_n(gguf, id) : 1;
    type = array ? gguf_get_arr_type(gguf, id) : type;
    if (!is_plain(type)) {
        value.text = format("%zu strings", n);
        return value;
    }
    const void * data = array ? gguf_get_arr_data(gguf, id) : gguf_get_val_data(gguf, id);
    for (size_t i = 0; i < n; ++i) {
        value.numbers.push_back(read_number(type, data, i));
    }
    constexpr size_t n_shown = 4;
    for (size_t i = 0; i < std::min(n, n_shown); ++i) {
        value.text += (i != 0 ? ", " : "") + format("%g", value.numbers[i]);
    }
    value.text += n > n_shown ? ", ..." : "";
    value.text = array ? "[" + value.text + "]" : value.text;
    return value;
}

std::vector<GgufFile::Unread> GgufFile::unread() const {
    std::vector<Unread> found;
    for (size_t id = 0; id < asked_.size(); ++id) {
        const std::string name = gguf_get_key(gguf_.get(), id);
        if (name.compare(0, arch_.size() + 1, arch_ + ".") == 0 && !asked_[id]) {
            found.push_back(value_of(gguf_.get(), id));
        }
    }
    return found;
}

std::optional<int64_t> GgufFile::integer(const char * pattern) const {
    const int64_t id = find(pattern);
    if (id < 0) {
        return std::nullopt;
    }
    const gguf_type type = gguf_get_kv_type(gguf_.get(), id);
    std::optional<int64_t> value;
    if (is_plain(type)) {
        value = read_integer(type, gguf_get_val_data(gguf_.get(), id), 0);
    }
    if (!value) {
        wrong_type(id, "an integer");
    }
    return value;
}

std::optional<double> GgufFile::real(const char * pattern) const {
    const int64_t id = find(pattern);
    if (id < 0) {
        return std::nullopt;
    }
    switch (gguf_get_kv_type(gguf_.get(), id)) {
    case GGUF_TYPE_FLOAT32:
        return gguf_get_val_f32(gguf_.get(), id);
    case GGUF_TYPE_FLOAT64:
        return gguf_get_val_f64(gguf_.get(), id);
    default:
        return static_cast<double>(*integer(pattern));
    }
}

std::optional<bool> GgufFile::boolean(const char * pattern) const {
    const auto value = integer(pattern);
    return value ? std::optional<bool>(*value != 0) : std::nullopt;
}

std::optional<std::string> GgufFile::text(const char * pattern) const {
    const int64_t id = find(pattern);
    if (id < 0) {
        return std::nullopt;
    }
    if (gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_STRING) {
        wrong_type(id, "a string");
    }
    return gguf_get_val_str(gguf_.get(), id);
}

std::optional<std::vector<int64_t>> GgufFile::integers(const char * pattern) const {
    const int64_t id = find(pattern);
    if (id < 0) {
        return std::nullopt;
    }
    if (gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_ARRAY ||
        !is_plain(gguf_get_arr_type(gguf_.get(), id))) {
        wrong_type(id, "an array of integers");
    }
    const gguf_type type = gguf_get_arr_type(gguf_.get(), id);
    std::vector<int64_t> values(gguf_get_arr_n(gguf_.get(), id));
    for (size_t i = 0; i < values.size(); ++i) {
        const auto value = read_integer(type, gguf_get_arr_data(gguf_.get(), id), i);
        if (!value) {
            wrong_type(id, "an array of integers");
        }
        values[i] = *value;
    }
    return values;
}

std::optional<int64_t> GgufFile::array_length(const char * pattern) const {
    const int64_t id = find(pattern);
    if (id < 0) {
        return std::nullopt;
    }
    if (gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_ARRAY) {
        wrong_type(id, "an array");
    }
    return static_cast<int64_t>(gguf_get_arr_n(gguf_.get(), id));
}

int64_t GgufFile::first_difference(const GgufFile & other, const char * pattern) const {
    const int64_t ids[] = {find(pattern), other.find(pattern)};
    const GgufFile * files[] = {this, &other};
    for (int i = 0; i < 2; ++i) {
        if (gguf_get_kv_type(files[i]->gguf_.get(), ids[i]) != GGUF_TYPE_ARRAY ||
            gguf_get_arr_type(files[i]->gguf_.get(), ids[i]) != GGUF_TYPE_STRING) {
            files[i]->wrong_type(ids[i], "an array of strings");
        }
    }
    const size_t n = gguf_get_arr_n(gguf_.get(), ids[0]);
    const size_t m = gguf_get_arr_n(other.gguf_.get(), ids[1]);
    for (size_t i = 0; i < n && i < m; ++i) {
        if (std::strcmp(gguf_get_arr_str(gguf_.get(), ids[0], i),
                        gguf_get_arr_str(other.gguf_.get(), ids[1], i)) != 0) {
            return static_cast<int64_t>(i);
        }
    }
    return n == m ? -1 : static_cast<int64_t>(n < m ? n : m);
}

int64_t GgufFile::need_integer(const char * pattern, int64_t low, int64_t high) const {
    const auto value = integer(pattern);
    DFL_CHECK(value, DFL_STATUS_FILE, "%s: metadata key %s is missing", path_.c_str(),
              key(pattern).c_str());
    DFL_CHECK(*value >= low && *value <= high, DFL_STATUS_FILE,
              "%s: metadata key %s is %lld, expected %lld to %lld", path_.c_str(),
              key(pattern).c_str(), (long long)*value, (long long)low, (long long)high);
    return *value;
}

double GgufFile::need_real(const char * pattern) const {
    const auto value = real(pattern);
    DFL_CHECK(value, DFL_STATUS_FILE, "%s: metadata key %s is missing", path_.c_str(),
              key(pattern).c_str());
    return *value;
}

std::vector<int64_t> GgufFile::need_per_layer(const char * pattern, int64_t n_layer, int64_t low,
                                              int64_t high) const {
    const int64_t id = find(pattern);
    if (id < 0 || gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_ARRAY) {
        return std::vector<int64_t>(n_layer, need_integer(pattern, low, high));
    }
    const auto values = *integers(pattern);
    DFL_CHECK(static_cast<int64_t>(values.size()) >= n_layer, DFL_STATUS_FILE,
              "%s: metadata key %s has %zu values, expected one for each of %lld layers",
              path_.c_str(), key(pattern).c_str(), values.size(), (long long)n_layer);
    for (const int64_t value : values) {
        DFL_CHECK(value >= low && value <= high, DFL_STATUS_FILE,
                  "%s: metadata key %s holds %lld, expected %lld to %lld", path_.c_str(),
                  key(pattern).c_str(), (long long)value, (long long)low, (long long)high);
    }
    return std::vector<int64_t>(values.begin(), values.begin() + n_layer);
}

const ggml_tensor * GgufFile::tensor(const std::string & name) const {
    return ggml_get_tensor(meta_.get(), name.c_str());
}

const void * GgufFile::tensor_data(const std::string & name) const {
    const int64_t id = gguf_find_tensor(gguf_.get(), name.c_str());
    return mapping_.data() + gguf_get_data_offset(gguf_.get()) +
           gguf_get_tensor_offset(gguf_.get(), id);
}

bool GgufFile::are_adjacent(const std::vector<std::string> & names) const {
    for (size_t i = 1; i < names.size(); ++i) {
        const auto * before = static_cast<const char *>(tensor_data(names[i - 1]));
        if (before + ggml_nbytes(tensor(names[i - 1])) != tensor_data(names[i])) {
            return false;
        }
    }
    return true;
}

} // namespace dfl
