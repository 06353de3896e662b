/* Proof of life on another platform: opens a model through the ABI alone, decodes a prompt, and prints what can be compared with
 * another machine's output: the most likely tokens, and some logits of the prompt's last token.
 *   prove [model.gguf | stub:] [prompt]
 * When something is refused it prints the code and the library's words, and exits with 3. */
#include <pylloyal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_STEPS = 24, MAX_PROMPT = 512, N_SHOWN = 4 };

static void check(int32_t code, const char * what) {
    if (code == PYL_OK) return;
    printf("refused %s %d: %s\n", what, (int)code, pyl_error_last()->message);
    exit(3);
}

static void print(int32_t (*call)(pyl_text **), const char * name) {
    pyl_text * text;
    check(call(&text), name);
    printf("%s %s\n", name, pyl_text_data(text));
    fflush(stdout); /* what comes next may die */
    pyl_text_free(text);
}

int main(int argc, char ** argv) {
    const char * path = argc > 1 ? argv[1] : "stub:";
    const char * prompt = argc > 2 ? argv[2] : "The quick brown fox jumps over the lazy dog";
    if (pyl_abi_version() != PYL_ABI_VERSION) return printf("the library and the header do not match\n"), 2;
    print(pyl_build_info, "build");
    print(pyl_devices, "devices");

    pyl_model * model;
    pyl_store * store;
    pyl_store_params params;
    pyl_store_params_init(&params, sizeof params);
    params.n_ctx = 256;
    check(pyl_model_open(&model, path, strlen(path), NULL), "pyl_model_open");
    check(pyl_store_open(&store, model, &params), "pyl_store_open");

    int32_t tokens[MAX_PROMPT], drawn[N_STEPS];
    size_t n_tokens;
    check(pyl_tokenize(model, prompt, strlen(prompt), PYL_TOKENIZE_ADD_SPECIAL, tokens, MAX_PROMPT, &n_tokens), "pyl_tokenize");

    pyl_branch branch;
    pyl_sampling greedy;
    pyl_sampling_init(&greedy, sizeof greedy);
    greedy.temperature = 0;
    check(pyl_branch_create(store, &branch, 0, &greedy, NULL), "pyl_branch_create");
    pyl_run run = {sizeof run, (uint32_t)n_tokens, branch, tokens, 0, 0};
    check(pyl_prefill_n(store, &run, 1, 0, NULL), "pyl_prefill_n");

    pyl_logits_view view = {0};
    view.struct_size = sizeof view;
    check(pyl_branch_logits(store, branch, &view), "pyl_branch_logits");
    printf("logits");
    for (uint32_t i = 0; i < N_SHOWN && i < view.n_vocab; i++) printf(" %.6f", (double)view.data[i]);
    printf("\n");

    pyl_lane lane = {0};
    lane.struct_size = sizeof lane, lane.branch = branch;
    pyl_tick tick = {sizeof tick, N_STEPS, NULL, 0, 0, 0, 0, 0, NULL, 0};
    check(pyl_tick_n(store, &tick, &lane, 1, drawn), "pyl_tick_n");
    printf("tokens");
    for (uint32_t i = 0; i < lane.n_tokens; i++) printf(" %d", (int)drawn[i]);
    printf("\n");
    pyl_store_free(store);
    pyl_model_free(model);
    return 0;
}
