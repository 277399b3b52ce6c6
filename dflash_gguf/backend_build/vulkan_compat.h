// Declares VK_EXT_layer_settings for ggml's Vulkan backend, because vulkan.hpp before 1.3.272
// (Debian 12) lacks this extension. Vulkan loaders ignore structures that they do not know.
#pragma once

#ifdef __cplusplus
#include <cstdint>
#include <vector>
#include <vulkan/vulkan_core.h>

#ifndef VK_EXT_layer_settings
namespace vk {

enum class LayerSettingTypeEXT : int32_t { eBool32 = 0 };

struct LayerSettingEXT {
    const char * layer;
    const char * name;
    LayerSettingTypeEXT type;
    uint32_t count;
    const void * values;
};

struct LayerSettingsCreateInfoEXT {
    int32_t type = 1000496000; // Vulkan's VK_STRUCTURE_TYPE_LAYER_SETTINGS_CREATE_INFO_EXT
    const void * next = nullptr;
    uint32_t count;
    const LayerSettingEXT * settings;

    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & all)
        : count(static_cast<uint32_t>(all.size())), settings(all.data()) {}
};

} // namespace vk
#endif
#endif
