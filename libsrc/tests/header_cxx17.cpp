// The header from C++17: twice, with every function visible under its C name.
#include "pylloyal.h"
#include "pylloyal.h"

#include <type_traits>

static_assert(__cplusplus >= 201703L && __cplusplus < 202002L, "this file is compiled as C++17 on purpose");
static_assert(std::is_standard_layout_v<pyl_error> && std::is_trivial_v<pyl_store_params>, "structs of the ABI are plain data");
static_assert(std::is_same_v<pyl_branch, uint64_t>, "a branch is an integer");

int main() {
    using Any = void (*)();
    const Any functions[] = {
        reinterpret_cast<Any>(&pyl_abi_version), reinterpret_cast<Any>(&pyl_model_open), reinterpret_cast<Any>(&pyl_store_open), reinterpret_cast<Any>(&pyl_prefill_n),
        reinterpret_cast<Any>(&pyl_tick_n),      reinterpret_cast<Any>(&pyl_error_last), reinterpret_cast<Any>(&pyl_store_free), reinterpret_cast<Any>(&pyl_text_free),
    };
    for (const Any function : functions) {
        if (!function) return 1;
    }
    pyl_sampling sampling{};
    pyl_sampling_init(&sampling, sizeof sampling);
    return pyl_abi_version() == PYL_ABI_VERSION && sampling.struct_size == sizeof sampling ? 0 : 1;
}
