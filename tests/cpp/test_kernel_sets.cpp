// Instruction sets that DFLASH_CPU allows, and the kernels chosen from them.
//
//     test_kernel_sets [NAME]      NAME: the set expected to be best on this CPU
#include "check.h"
#include "cpu/isa/kernels.h"
#include "error.h"

#include <cstdlib>
#include <string>
#include <vector>

using namespace dfl;

namespace {

std::vector<std::string> names_with(const char * wanted) {
    setenv("DFLASH_CPU", wanted, 1);
    return cpu::kernel_set_names();
}

} // namespace

int main(int argc, char ** argv) {
    unsetenv("DFLASH_CPU");
    const std::vector<std::string> all = cpu::kernel_set_names();
    CHECK(!all.empty() && all.back() == "portable");
    CHECK(argc == 1 || all.front() == argv[1]);
    CHECK(cpu::kernels().size() == all.size());
    const cpu::RowKernel * best = nullptr;
    for (const cpu::Kernels & set : cpu::kernels()) {
        best = best != nullptr ? best : set.rows;
    }
    CHECK(best != nullptr && cpu::row_kernel() == best);

    for (size_t i = 0; i < all.size(); ++i) {
        CHECK(names_with(all[i].c_str()) == std::vector<std::string>(all.begin() + i, all.end()));
    }
    CHECK(names_with("") == all);
    std::string sentence;
    try {
        names_with("sse9");
    } catch (const Error & error) {
        sentence = error.what();
    }
    CHECK(sentence.rfind(
              "DFLASH_CPU is \"sse9\"; unset it, or set it to an instruction set of this CPU: ",
              0) == 0);
    return 0;
}
