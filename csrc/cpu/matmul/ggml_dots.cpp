// Products by ggml's dot product, one row with one output at a time: the order of a sum does not
// depend on the number of rows. For types without kernels here, and for weights that stay in place.
#include "cpu/matmul/rows_in_place.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <vector>

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

namespace dfl::cpu {

namespace {

using TraitsOf = decltype(&ggml_get_type_traits_cpu);

// Finds ggml_get_type_traits_cpu in the loaded CPU backend, which dflash does not link; or NULL.
TraitsOf find_traits() {
#if !defined(_WIN32)
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (device == nullptr) {
        return nullptr;
    }
    // The address of any function of the backend tells which library the backend is in.
    void * any_function = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device),
                                                            "ggml_backend_set_n_threads");
    Dl_info info;
    if (any_function == nullptr || dladdr(any_function, &info) == 0) {
        return nullptr;
    }
    void * library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) {
        return nullptr;
    }
    void * function = dlsym(library, "ggml_get_type_traits_cpu");
    dlclose(library); // the library stays loaded, because ggml's registry uses it
    return reinterpret_cast<TraitsOf>(function);
#else
    return nullptr;
#endif
}

const ggml_type_traits_cpu * traits_of(ggml_type type) {
    static const TraitsOf traits = find_traits();
    return traits != nullptr ? traits(type) : nullptr;
}

bool all_finite(const float * x, int64_t n) {
    int n_not_finite = 0;
    for (int64_t i = 0; i < n; ++i) {
        n_not_finite += !(std::fabs(x[i]) <= FLT_MAX);
    }
    return n_not_finite == 0;
}

// Product by ggml's dot product. INPUTS: a multiple of the block sizes of weights and of x.
template <ggml_type OF, int INPUTS>
struct Dots : RowsInPlace<OF, INPUTS> {
    using RowsInPlace<OF, INPUTS>::TILE;
    // Bytes of x that stay in a core's L2 cache while the weights of all outputs are read.
    static constexpr int64_t CHUNK = 256 * 1024;

    static const ggml_type_traits_cpu & traits() {
        static const ggml_type_traits_cpu * const traits = traits_of(OF);
        return *traits;
    }
    static bool is_available() {
        const ggml_type_traits_cpu * traits = traits_of(OF);
        if (traits == nullptr || traits->vec_dot == nullptr) {
            return false;
        }
        const ggml_type x = traits->vec_dot_type;
        const bool scale_first = x == GGML_TYPE_Q8_0 || x == GGML_TYPE_Q8_1 || x == GGML_TYPE_Q8_K;
        return scale_first && traits_of(x)->from_float != nullptr &&
               INPUTS % ggml_blck_size(OF) == 0 && INPUTS % ggml_blck_size(x) == 0;
    }

    static size_t quantized_row_size(int64_t n_in) {
        return ggml_row_size(traits().vec_dot_type, n_in);
    }
    static void quantize_row(const float * x, int64_t n_in, void * dst) {
        traits_of(traits().vec_dot_type)->from_float(x, dst, n_in);
        if (!all_finite(x, n_in)) {                // ggml quantises NaN to arbitrary numbers
            std::memset(dst, 0xff, sizeof(float)); // sets the row's first scale to NaN, F16 or F32
        }
    }

    static void multiply(const void * packed, int64_t n_in, int64_t n_out, const void * x,
                         int64_t n_rows, int64_t first_tile, int64_t last_tile, float * dst,
                         int64_t dst_stride) {
        const auto * weights = static_cast<const char *>(packed);
        const auto * rows = static_cast<const char *>(x);
        const auto size = static_cast<int64_t>(ggml_row_size(OF, n_in));
        const auto x_size = static_cast<int64_t>(quantized_row_size(n_in));
        const int64_t last_out = std::min(last_tile * TILE, n_out);
        const int64_t chunk = std::max<int64_t>(CHUNK / x_size, 1);
        const ggml_vec_dot_t dot = traits().vec_dot;
        for (int64_t first = 0; first < n_rows; first += chunk) {
            const int64_t last = std::min(first + chunk, n_rows);
            for (int64_t o = first_tile * TILE; o < last_out; ++o) {
                for (int64_t r = first; r < last; ++r) {
                    dot(static_cast<int>(n_in), dst + r * dst_stride + o, 0, weights + o * size, 0,
                        rows + r * x_size, 0, 1);
                }
            }
        }
    }
};

struct GgmlProduct {
    bool (*here)();
    PackedProduct product;
};

template <ggml_type OF, int INPUTS>
constexpr GgmlProduct ggml_product() {
    return {Dots<OF, INPUTS>::is_available, product_of<Dots<OF, INPUTS>>("ggml")};
}

constexpr GgmlProduct GGML_PRODUCTS[] = {
    ggml_product<GGML_TYPE_Q4_0, 32>(),     ggml_product<GGML_TYPE_Q4_1, 32>(),
    ggml_product<GGML_TYPE_Q5_0, 32>(),     ggml_product<GGML_TYPE_Q5_1, 32>(),
    ggml_product<GGML_TYPE_Q8_0, 32>(),     ggml_product<GGML_TYPE_Q2_K, 256>(),
    ggml_product<GGML_TYPE_Q3_K, 256>(),    ggml_product<GGML_TYPE_Q4_K, 256>(),
    ggml_product<GGML_TYPE_Q5_K, 256>(),    ggml_product<GGML_TYPE_Q6_K, 256>(),
    ggml_product<GGML_TYPE_IQ1_S, 256>(),   ggml_product<GGML_TYPE_IQ1_M, 256>(),
    ggml_product<GGML_TYPE_IQ2_XXS, 256>(), ggml_product<GGML_TYPE_IQ2_XS, 256>(),
    ggml_product<GGML_TYPE_IQ2_S, 256>(),   ggml_product<GGML_TYPE_IQ3_XXS, 256>(),
    ggml_product<GGML_TYPE_IQ3_S, 256>(),   ggml_product<GGML_TYPE_IQ4_NL, 32>(),
    ggml_product<GGML_TYPE_IQ4_XS, 256>(),  ggml_product<GGML_TYPE_TQ1_0, 256>(),
    ggml_product<GGML_TYPE_TQ2_0, 256>(),   ggml_product<GGML_TYPE_MXFP4, 32>(),
    ggml_product<GGML_TYPE_NVFP4, 64>(),    ggml_product<GGML_TYPE_Q1_0, 128>(),
    ggml_product<GGML_TYPE_Q2_0, 64>(),
};

} // namespace

PackedProducts ggml_dots() {
    static const std::vector<PackedProduct> products = [] {
        std::vector<PackedProduct> list;
        for (const GgmlProduct & one : GGML_PRODUCTS) {
            if (one.here()) {
                list.push_back(one.product);
            }
        }
        return list;
    }();
    return {products.data(), static_cast<int>(products.size())};
}

} // namespace dfl::cpu
