#include "model/gguf_file.h"

#include "error.h"
#include "gguf_schema.h"

#include <algorithm>
#include <cstring>

namespace dfl {

GgufFile::GgufFile(const std::string & path)
    : path_(path), parts_(open_parts(path)), gguf_(parts_[0]->gguf.get()),
      keys_read_(gguf_get_n_kv(gguf_)) {
    for (const auto & part : parts_) {
        const gguf_context * gguf = part->gguf.get();
        for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
            const std::string name = gguf_get_tensor_name(gguf, i);
            const ggml_tensor * meta = ggml_get_tensor(part->meta.get(), name.c_str());
            const auto inserted =
                tensors_.emplace(name, Stored{meta, part->tensor_data(i), part.get()});
            DFL_CHECK(inserted.second, DFL_STATUS_FILE, "%s: tensor %s is also in %s",
                      part->path.c_str(), name.c_str(), inserted.first->second.part->path.c_str());
            names_.push_back(name);
        }
    }
    const auto arch = text(schema::KEY_GENERAL_ARCHITECTURE);
    DFL_CHECK(arch && !arch->empty() && arch->size() <= 64, DFL_STATUS_FILE,
              "%s: metadata key general.architecture is missing, empty or over 64 characters",
              path.c_str());
    arch_ = *arch;
}

std::string GgufFile::key(const char * pattern) const {
    std::string name = pattern;
    const size_t at = name.find("%s");
    return at == std::string::npos ? name : name.replace(at, 2, arch_);
}

int64_t GgufFile::find(const char * pattern) const {
    const int64_t id = gguf_find_key(gguf_, key(pattern).c_str());
    if (id >= 0) {
        keys_read_[id].store(true, std::memory_order_relaxed);
    }
    return id;
}

void GgufFile::wrong_type(int64_t id, const char * expected) const {
    throw Error(DFL_STATUS_FILE, format("%s: metadata key %s is of type %s, expected %s",
                                        path_.c_str(), gguf_get_key(gguf_, id),
                                        gguf_type_name(gguf_get_kv_type(gguf_, id)), expected));
}

static bool is_plain(gguf_type type) { return type != GGUF_TYPE_STRING && type != GGUF_TYPE_ARRAY; }

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

// Makes text of a possibly damaged file fit for one line of an error message.
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
    std::vector<Unread> unread;
    for (size_t id = 0; id < keys_read_.size(); ++id) {
        const std::string name = gguf_get_key(gguf_, id);
        if (name.compare(0, arch_.size() + 1, arch_ + ".") == 0 && !keys_read_[id]) {
            unread.push_back(value_of(gguf_, id));
        }
    }
    return unread;
}

std::optional<int64_t> GgufFile::integer(const char * pattern) const {
    const int64_t id = find(pattern);
    if (id < 0) {
        return std::nullopt;
    }
    const gguf_type type = gguf_get_kv_type(gguf_, id);
    std::optional<int64_t> value;
    if (is_plain(type)) {
        value = read_integer(type, gguf_get_val_data(gguf_, id), 0);
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
    switch (gguf_get_kv_type(gguf_, id)) {
    case GGUF_TYPE_FLOAT32:
        return gguf_get_val_f32(gguf_, id);
    case GGUF_TYPE_FLOAT64:
        return gguf_get_val_f64(gguf_, id);
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
    if (gguf_get_kv_type(gguf_, id) != GGUF_TYPE_STRING) {
        wrong_type(id, "a string");
    }
    return gguf_get_val_str(gguf_, id);
}

bool GgufFile::is_array(const char * pattern) const {
    const int64_t id = find(pattern);
    return id >= 0 && gguf_get_kv_type(gguf_, id) == GGUF_TYPE_ARRAY;
}

std::optional<std::vector<int64_t>> GgufFile::integers(const char * pattern) const {
    const int64_t id = find(pattern);
    if (id < 0) {
        return std::nullopt;
    }
    if (gguf_get_kv_type(gguf_, id) != GGUF_TYPE_ARRAY || !is_plain(gguf_get_arr_type(gguf_, id))) {
        wrong_type(id, "an array of integers");
    }
    const gguf_type type = gguf_get_arr_type(gguf_, id);
    std::vector<int64_t> values(gguf_get_arr_n(gguf_, id));
    for (size_t i = 0; i < values.size(); ++i) {
        const auto value = read_integer(type, gguf_get_arr_data(gguf_, id), i);
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
    if (gguf_get_kv_type(gguf_, id) != GGUF_TYPE_ARRAY) {
        wrong_type(id, "an array");
    }
    return static_cast<int64_t>(gguf_get_arr_n(gguf_, id));
}

int64_t GgufFile::first_difference(const GgufFile & other, const char * pattern) const {
    const int64_t ids[] = {find(pattern), other.find(pattern)};
    const GgufFile * files[] = {this, &other};
    for (int i = 0; i < 2; ++i) {
        if (gguf_get_kv_type(files[i]->gguf_, ids[i]) != GGUF_TYPE_ARRAY ||
            gguf_get_arr_type(files[i]->gguf_, ids[i]) != GGUF_TYPE_STRING) {
            files[i]->wrong_type(ids[i], "an array of strings");
        }
    }
    const size_t n = gguf_get_arr_n(gguf_, ids[0]);
    const size_t m = gguf_get_arr_n(other.gguf_, ids[1]);
    for (size_t i = 0; i < n && i < m; ++i) {
        if (std::strcmp(gguf_get_arr_str(gguf_, ids[0], i),
                        gguf_get_arr_str(other.gguf_, ids[1], i)) != 0) {
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
    if (!is_array(pattern)) {
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
    const auto stored = tensors_.find(name);
    return stored != tensors_.end() ? stored->second.meta : nullptr;
}

const void * GgufFile::tensor_data(const std::string & name) const {
    return tensors_.at(name).data;
}

const FileMapping & GgufFile::mapping_of(const std::string & name) const {
    return tensors_.at(name).part->mapping;
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
