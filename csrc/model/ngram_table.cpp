#include "model/ngram_table.h"

#include "error.h"
#include "gguf_schema.h"
#include "model/gguf_file.h"

#include <algorithm>
#include <cstring>

namespace dfl {

using ShortRow = std::array<uint16_t, NgramTable::MAX_RUN + 1>;

// Returns the data of a tensor [n_columns, n_rows]. n_rows: expected number, or -1 for any; set to
// that of the tensor.
static const char * data_of(const GgufFile & file, const char * name, ggml_type type,
                            int64_t n_columns, int64_t & n_rows) {
    const ggml_tensor * tensor = file.tensor(name);
    DFL_CHECK(tensor != nullptr, DFL_STATUS_FILE, "%s: tensor %s is missing", file.path().c_str(),
              name);
    const int64_t n = n_columns > 1 ? tensor->ne[1] : tensor->ne[0];
    const int64_t expected = n_rows < 0 ? n : n_rows;
    const int64_t ne[2] = {n_columns > 1 ? n_columns : expected, n_columns > 1 ? expected : 1};
    DFL_CHECK(tensor->type == type && tensor->ne[0] == ne[0] && tensor->ne[1] == ne[1] &&
                  ggml_nelements(tensor) == ne[0] * ne[1],
              DFL_STATUS_FILE, "%s: tensor %s is %s [%lld, %lld], expected %s [%lld, %lld]",
              file.path().c_str(), name, ggml_type_name(tensor->type), (long long)tensor->ne[0],
              (long long)tensor->ne[1], ggml_type_name(type), (long long)ne[0], (long long)ne[1]);
    n_rows = n;
    return static_cast<const char *>(file.tensor_data(name));
}

NgramTable::NgramTable(const GgufFile & file, int64_t n_vocab) : n_(-1) {
    const ggml_tensor * tokens = file.tensor(schema::TENSOR_NGRAM_TOKENS);
    const bool is_short = tokens != nullptr && tokens->type == GGML_TYPE_I16;
    row_bytes_ = int64_t(is_short ? sizeof(ShortRow) : sizeof(Row));
    tokens_ = data_of(file, schema::TENSOR_NGRAM_TOKENS, is_short ? GGML_TYPE_I16 : GGML_TYPE_I32,
                      MAX_RUN + 1, n_);
    classes_ = reinterpret_cast<const int8_t *>(
        data_of(file, schema::TENSOR_NGRAM_CLASS, GGML_TYPE_I8, 1, n_));
    int64_t n_classes = N_CLASSES;
    std::memcpy(probs_.data(),
                data_of(file, schema::TENSOR_NGRAM_PROB, GGML_TYPE_F32, 1, n_classes),
                sizeof probs_);
    const char * path = file.path().c_str();
    for (const float prob : probs_) {
        DFL_CHECK(prob > 0.0f && prob < 1.0f, DFL_STATUS_FILE,
                  "%s: tensor %s has the probability %g, expected numbers between 0 and 1", path,
                  schema::TENSOR_NGRAM_PROB, prob);
    }
    Row before = {-1, -1, -1, -1};
    for (int64_t i = 0; i < n_; ++i) {
        const Row now = row(i);
        DFL_CHECK(classes_[i] >= 0 && classes_[i] < N_CLASSES, DFL_STATUS_FILE,
                  "%s: row %lld of tensor %s has class %d, expected 0 to %d", path, (long long)i,
                  schema::TENSOR_NGRAM_CLASS, classes_[i], N_CLASSES - 1);
        for (int k = 0; k <= MAX_RUN; ++k) {
            const int32_t least = k == 0 || k == MAX_RUN ? 0 : -1;
            const bool is_end = k > 0 && k < MAX_RUN && now[size_t(k - 1)] < 0;
            DFL_CHECK(
                is_end ? now[size_t(k)] == -1 : now[size_t(k)] >= least && now[size_t(k)] < n_vocab,
                DFL_STATUS_FILE,
                "%s: row %lld of tensor %s has token %d, the target has tokens 0 to %lld", path,
                (long long)i, schema::TENSOR_NGRAM_TOKENS, now[size_t(k)], (long long)n_vocab - 1);
        }
        DFL_CHECK(!std::lexicographical_compare(now.begin(), now.begin() + MAX_RUN, before.begin(),
                                                before.begin() + MAX_RUN),
                  DFL_STATUS_FILE, "%s: row %lld of tensor %s is not sorted behind the row before",
                  path, (long long)i, schema::TENSOR_NGRAM_TOKENS);
        before = now;
    }
}

NgramTable::Row NgramTable::row(int64_t index) const {
    Row row; // the file may align the rows too little for their integers
    const char * stored = tokens_ + index * row_bytes_;
    if (row_bytes_ == sizeof row) {
        std::memcpy(row.data(), stored, sizeof row);
        return row;
    }
    ShortRow ids;
    std::memcpy(ids.data(), stored, sizeof ids);
    for (size_t k = 0; k < ids.size(); ++k) {
        row[k] = ids[k] == UINT16_MAX ? -1 : ids[k];
    }
    return row;
}

NgramTable::Followers NgramTable::followers(const Run & run) const {
    // Returns the first row in [begin, end) whose token id in the column is >= token.
    const auto first = [&](int64_t begin, int64_t end, size_t column, int32_t token) {
        while (begin < end) {
            const int64_t middle = begin + (end - begin) / 2;
            if (row(middle)[column] < token) {
                begin = middle + 1;
            } else {
                end = middle;
            }
        }
        return begin;
    };
    int64_t begin = 0, end = n_, found = -1;
    for (size_t k = 0; k < MAX_RUN && run[k] >= 0; ++k) {
        begin = first(begin, end, k, run[k]);
        end = first(begin, end, k, run[k] + 1);
        if (begin == end) {
            break;
        }
        if (k + 1 == MAX_RUN || row(begin)[k + 1] < 0) {
            found = begin;
        }
    }
    Followers followers;
    if (found < 0) {
        return followers;
    }
    const Row known = row(found);
    for (int64_t i = found; i < n_ && followers.n < MAX_FOLLOWERS; ++i) {
        const Row now = row(i);
        if (!std::equal(now.begin(), now.begin() + MAX_RUN, known.begin())) {
            break;
        }
        followers.all[size_t(followers.n++)] = {now[MAX_RUN], classes_[i]};
    }
    return followers;
}

} // namespace dfl
