#include "select.h"

#include "cpu/row_kernel.h"

#include <algorithm>
#include <cmath>

namespace dfl {

int64_t first_largest(const float * x, int64_t n) { return cpu::row_kernel()->first_largest(x, n); }

void append_best(const float * x, int64_t n, int64_t k, std::vector<Candidate> & out) {
    if (k == 1) {
        const int64_t top = std::min(first_largest(x, n), n - 1);
        out.push_back({static_cast<int32_t>(top), x[top]});
        return;
    }
    std::vector<Candidate> heap; // the worst kept candidate is in front
    heap.reserve(k + 1);
    for (int64_t i = 0; i < n; ++i) {
        if ((int64_t)heap.size() < k || !(x[i] <= heap.front().logit)) {
            heap.push_back({static_cast<int32_t>(i), x[i]});
            std::push_heap(heap.begin(), heap.end(), is_better);
            if ((int64_t)heap.size() > k) {
                std::pop_heap(heap.begin(), heap.end(), is_better);
                heap.pop_back();
            }
        }
    }
    std::sort(heap.begin(), heap.end(), is_better);
    out.insert(out.end(), heap.begin(), heap.end());
}

} // namespace dfl
