/* The header as strict C99: twice, by itself, with its functions' types spelled out once by hand. */
#include "pylloyal.h"
#include "pylloyal.h"

#if !defined(__STDC_VERSION__) || __STDC_VERSION__ != 199901L
#error "this file is compiled as C99 on purpose"
#endif

int main(void) {
    int32_t (*version)(void) = pyl_abi_version;
    int32_t (*open_model)(pyl_model **, const char *, size_t, const pyl_model_params *) = pyl_model_open;
    int32_t (*open_store)(pyl_store **, const pyl_model *, const pyl_store_params *) = pyl_store_open;
    int32_t (*fork_n)(pyl_store *, pyl_branch, pyl_branch *, size_t, const uint64_t *, uint32_t) = pyl_branch_fork_n;
    int32_t (*prefill)(pyl_store *, pyl_run *, size_t, uint32_t, uint32_t *) = pyl_prefill_n;
    int32_t (*tick)(pyl_store *, pyl_tick *, pyl_lane *, size_t, int32_t *) = pyl_tick_n;
    const pyl_error * (*last)(void) = pyl_error_last;
    if (!open_model || !open_store || !fork_n || !prefill || !tick || !last) return 1;
    return version() == PYL_ABI_VERSION ? 0 : 1;
}
