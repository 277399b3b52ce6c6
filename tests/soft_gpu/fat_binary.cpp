// The container in which nvcc puts a module's code: a header, then images of PTX and machine code.
#include "error.h"
#include "module.h"

#include <cstring>

namespace soft_gpu {

namespace {

constexpr u32 WRAPPER_MAGIC = 0x466243b1, MAGIC = 0xba55ed50;
constexpr u16 PTX = 1;

struct Wrapper {
    u32 magic, version;
    const u8 * data;
    const void * unused;
};

template <class T>
T read_at(const u8 * at) {
    T value;
    std::memcpy(&value, at, sizeof(T));
    return value;
}

} // namespace

std::string ptx_of_fat_binary(const void * wrapper) {
    const auto & found = *static_cast<const Wrapper *>(wrapper);
    const u8 * header = found.data;
    require(found.magic == WRAPPER_MAGIC && read_at<u32>(header) == MAGIC, "no fat binary");
    const u8 * image = header + read_at<u16>(header + 6);
    const u8 * end = image + read_at<u64>(header + 8);
    while (image < end) {
        const u32 header_bytes = read_at<u32>(image + 4);
        const u64 bytes = read_at<u64>(image + 8);
        if (read_at<u16>(image) == PTX) {
            std::string text(reinterpret_cast<const char *>(image + header_bytes), bytes);
            text.resize(std::strlen(text.c_str()));
            require(text.find(".version") != std::string::npos,
                    "the module's PTX is compressed; build it with "
                    "-DGGML_CUDA_COMPRESSION_MODE=none");
            return text;
        }
        image += header_bytes + bytes;
    }
    throw Error("the module has no PTX; build it for 86-virtual");
}

} // namespace soft_gpu
