/* Three continuations of one prompt, decoded together: the prompt's cells are shared, and one call runs all the steps.
 *   embed [model.gguf] [prompt]        with no model, the built-in stub: real bookkeeping, nonsense text */
#include <pylloyal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_BRANCHES = 3, N_STEPS = 8, MAX_PROMPT = 512 };

/* Every call that can fail returns a code; pyl_error_last() has the words and the numbers. */
static void check(int32_t code, const char * what) {
    if (code == PYL_OK) return;
    fprintf(stderr, "%s failed (%d): %s\n", what, (int)code, pyl_error_last()->message);
    exit(1);
}

int main(int argc, char ** argv) {
    const char * path = argc > 1 ? argv[1] : "stub:";
    const char * prompt = argc > 2 ? argv[2] : "Once upon a time";
    if (pyl_abi_version() != PYL_ABI_VERSION) return fprintf(stderr, "the library and the header do not match\n"), 1;

    pyl_model * model;
    pyl_store * store;
    pyl_store_params params;
    pyl_store_params_init(&params, sizeof params);
    params.n_ctx = 1024;
    check(pyl_model_open(&model, path, strlen(path), NULL), "pyl_model_open");
    check(pyl_store_open(&store, model, &params), "pyl_store_open");

    int32_t tokens[MAX_PROMPT];
    size_t n_tokens;
    check(pyl_tokenize(model, prompt, strlen(prompt), PYL_TOKENIZE_ADD_SPECIAL, tokens, MAX_PROMPT, &n_tokens), "pyl_tokenize");

    pyl_branch root, branches[N_BRANCHES];
    check(pyl_branch_create(store, &root, 0, NULL, NULL), "pyl_branch_create");
    pyl_run run = {sizeof run, (uint32_t)n_tokens, root, tokens, 0, 0};
    check(pyl_prefill_n(store, &run, 1, 0, NULL), "pyl_prefill_n");
    const uint64_t seeds[N_BRANCHES] = {1, 2, 3};
    check(pyl_branch_fork_n(store, root, branches, N_BRANCHES, seeds, 0), "pyl_branch_fork_n");

    int32_t drawn[N_BRANCHES][N_STEPS];
    pyl_lane lanes[N_BRANCHES] = {{0}};
    pyl_tick tick = {sizeof tick, N_STEPS, NULL, 0, 0, 0, 0, 0, NULL, 0};
    for (int i = 0; i < N_BRANCHES; i++) lanes[i].struct_size = sizeof lanes[i], lanes[i].branch = branches[i];
    check(pyl_tick_n(store, &tick, lanes, N_BRANCHES, drawn[0]), "pyl_tick_n");

    for (int i = 0; i < N_BRANCHES; i++) {
        pyl_text * text;
        check(pyl_detokenize(model, drawn[i], lanes[i].n_tokens, 0, &text), "pyl_detokenize");
        printf("%d (%u tokens%s): %s", i + 1, (unsigned)lanes[i].n_tokens, lanes[i].finish == PYL_FINISH_EOG ? ", ended" : "", prompt);
        fwrite(pyl_text_data(text), 1, pyl_text_size(text), stdout);
        printf("\n");
        pyl_text_free(text);
    }

    pyl_pressure pressure = {0};
    pressure.struct_size = sizeof pressure;
    check(pyl_store_pressure(store, &pressure), "pyl_store_pressure");
    printf("%u of %u cells, %u of %u branches, %u dispatches\n", (unsigned)pressure.cells_used, (unsigned)pressure.n_ctx, (unsigned)pressure.leases_used,
           (unsigned)(pressure.leases_used + pressure.leases_remaining), (unsigned)pressure.n_dispatches);
    pyl_store_free(store);
    pyl_model_free(model);
    return 0;
}
