/* A prompt forked, a picture questioned, a plan and a decode refused, everything given back: what the programs beside this one do
 * in other languages, with the same tokens.
 *   consumer MODEL.gguf MMPROJ.gguf
 *   cc consumer.c $(pkg-config --cflags --libs pylloyal) */
#include <pylloyal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_STEPS = 8, MAX_TOKENS = 64, SIDE = 48 };

static const char * const question = "<|im_start|>user\nWhat colour is the shape?<|im_end|>\n<|im_start|>assistant\n";
static const char * const picture_questions[2] = {"What colour is the shape?<|im_end|>\n<|im_start|>assistant\n", "Where is the shape?<|im_end|>\n<|im_start|>assistant\n"};

/* What to give back, whatever happens: handles are tokens, freeing one that is NULL is refused and harmless. */
static pyl_model * model;
static pyl_projector * projector;
static pyl_store * store;
static pyl_prompt * prompt;

static uint32_t give_back(void) {
    pyl_prompt_free(prompt);
    pyl_store_free(store);
    pyl_projector_free(projector);
    pyl_model_free(model);
    pyl_live live = {0};
    live.struct_size = sizeof live;
    pyl_live_objects(&live);
    return live.models + live.weights + live.stores + live.contexts + live.branches + live.grammars + live.texts + live.embedders + live.projectors + live.prompts;
}

static void check(int32_t code, const char * what) {
    if (code == PYL_OK) return;
    const pyl_error * const e = pyl_error_last();
    fprintf(stderr, "%s failed: code %d, state %d, need %lld, have %lld: %s\n", what, (int)e->code, (int)e->state, (long long)e->need, (long long)e->have, e->message);
    give_back();
    exit(1);
}

/* ------------------------------------------------------------------------------------- the calls, each in one place -- */

static uint32_t tokens_of(const char * text, int32_t * tokens) {
    size_t n = 0;
    check(pyl_tokenize(model, text, strlen(text), PYL_TOKENIZE_PARSE_SPECIAL, tokens, MAX_TOKENS, &n), "pyl_tokenize");
    return (uint32_t)n;
}

static pyl_sampling sampling_of(float temperature) {
    pyl_sampling s;
    pyl_sampling_init(&s, sizeof s);
    s.temperature = temperature, s.top_k = 0, s.top_p = 1, s.min_p = 0;
    return s;
}

static pyl_branch new_root(float temperature) {
    const pyl_sampling s = sampling_of(temperature);
    pyl_branch root = 0;
    check(pyl_branch_create(store, &root, 0, &s, NULL), "pyl_branch_create");
    return root;
}

static void fork_branch(pyl_branch source, pyl_branch * out, size_t n, const uint64_t * seeds) { check(pyl_branch_fork_n(store, source, out, n, seeds, 0), "pyl_branch_fork_n"); }

static int32_t read_tokens(pyl_branch branch, const int32_t * tokens, uint32_t n) {
    pyl_run run = {0};
    run.struct_size = sizeof run, run.branch = branch, run.tokens = tokens, run.n_tokens = n;
    return pyl_prefill_n(store, &run, 1, 0, NULL);
}

/* All branches at once, a row of tokens for each. */
static void speak(const pyl_branch * branches, size_t n, const char * const * names, int with_text) {
    int32_t drawn[4][N_STEPS];
    pyl_lane lanes[4] = {{0}};
    pyl_tick tick = {0};
    tick.struct_size = sizeof tick, tick.n_steps = N_STEPS;
    for (size_t i = 0; i < n; i++) lanes[i].struct_size = sizeof lanes[i], lanes[i].branch = branches[i];
    check(pyl_tick_n(store, &tick, lanes, n, drawn[0]), "pyl_tick_n");
    for (size_t i = 0; i < n; i++) {
        printf("%s", names[i]);
        if (with_text) {
            pyl_text * text = NULL;
            check(pyl_detokenize(model, drawn[i], lanes[i].n_tokens, 0, &text), "pyl_detokenize");
            printf(" '%.*s'", (int)pyl_text_size(text), pyl_text_data(text));
            pyl_text_free(text);
        }
        for (uint32_t k = 0; k < lanes[i].n_tokens; k++) printf(" %d", (int)drawn[i][k]);
        if (lanes[i].finish == PYL_FINISH_EOG) printf(" end");
        printf("\n");
    }
}

/* ----------------------------------------------------------------------------------------------------------- the story -- */

static void fork_a_prompt(void) {
    static const uint64_t seeds[3] = {1, 2, 3};
    static const char * const names[3] = {"sampled 1", "sampled 2", "sampled 3"};
    static const char * const greedy_name = "greedy";
    int32_t tokens[MAX_TOKENS];
    pyl_branch forks[3], greedy;
    const pyl_branch root = new_root(4.0f);
    check(read_tokens(root, tokens, tokens_of(question, tokens)), "pyl_prefill_n");
    fork_branch(root, forks, 3, seeds);
    fork_branch(root, &greedy, 1, NULL);
    const pyl_sampling most_likely = sampling_of(0);
    check(pyl_branch_set_sampling(store, greedy, &most_likely), "pyl_branch_set_sampling");
    speak(&greedy, 1, &greedy_name, 0);
    speak(forks, 3, names, 0);
    check(pyl_branch_prune_subtree(store, root), "pyl_branch_prune_subtree");
}

static void question_a_picture(void) {
    static uint8_t rgb[SIDE][SIDE][3]; /* a blue square at the top right, on white */
    static const uint8_t blue[3] = {50, 80, 220};
    static const char * const names[2] = {"colour", "where"};
    memset(rgb, 245, sizeof rgb);
    for (int y = 2; y < 14; y++) {
        for (int x = 34; x < 46; x++) memcpy(rgb[y][x], blue, 3);
    }
    pyl_part parts[2] = {{0}};
    parts[0].struct_size = parts[1].struct_size = sizeof parts[0];
    parts[0].kind = PYL_PART_TEXT, parts[0].text = "<|im_start|>user\n", parts[0].n = strlen(parts[0].text), parts[0].flags = PYL_TOKENIZE_PARSE_SPECIAL;
    parts[1].kind = PYL_PART_IMAGE, parts[1].rgb = rgb[0][0], parts[1].width = SIDE, parts[1].height = SIDE;
    check(pyl_prompt_make(&prompt, model, projector, parts, 2, 0), "pyl_prompt_make");
    pyl_quote quote = {0};
    quote.struct_size = sizeof quote;
    check(pyl_prompt_quote(prompt, &quote), "pyl_prompt_quote");
    printf("picture %u cells %u positions\n", (unsigned)quote.n_cells, (unsigned)quote.n_pos);

    const pyl_branch root = new_root(0);
    pyl_item item = {0};
    item.struct_size = sizeof item, item.branch = root, item.prompt = prompt;
    const int32_t code = pyl_decode_prompts_n(store, &item, 1);
    pyl_text_free(item.message);
    check(code, "pyl_decode_prompts_n");
    pyl_branch forks[2];
    fork_branch(root, forks, 2, NULL);
    for (int i = 0; i < 2; i++) {
        int32_t tokens[MAX_TOKENS];
        check(read_tokens(forks[i], tokens, tokens_of(picture_questions[i], tokens)), "pyl_prefill_n");
    }
    speak(forks, 2, names, 1);
    check(pyl_branch_prune_n(store, forks, 2), "pyl_branch_prune_n"); /* the picture's cells stay: the root has them */
}

/* A million cells, and what they would take, before anything is allocated. */
static void refuse_a_plan(const char * path) {
    static const long long allowed = 64 << 20;
    pyl_store_params params;
    pyl_text * text = NULL;
    pyl_store_params_init(&params, sizeof params);
    params.n_ctx = 1 << 20;
    check(pyl_dry_run(&text, path, strlen(path), NULL, &params), "pyl_dry_run");
    const char * const at = strstr(pyl_text_data(text), "\"context_bytes\":");
    const long long need = at ? strtoll(strchr(at, ':') + 1, NULL, 10) : -1;
    pyl_text_free(text);
    printf("plan %s: %lld bytes of cells, %lld allowed\n", need > allowed ? "refused" : "taken", need, allowed);
}

/* More tokens than cells: refused before anything runs, with the numbers, and nothing has changed. */
static void refuse_a_decode(void) {
    static int32_t many[600];
    pyl_pressure before = {0}, after = {0};
    before.struct_size = after.struct_size = sizeof before;
    const pyl_branch root = new_root(0);
    check(pyl_store_pressure(store, &before), "pyl_store_pressure");
    const int32_t code = read_tokens(root, many, 600);
    const pyl_error * const e = pyl_error_last();
    printf("decode refused: code %d state %d need %lld have %lld\n", (int)code, (int)e->state, (long long)e->need, (long long)e->have);
    check(pyl_store_pressure(store, &after), "pyl_store_pressure");
    if (code != PYL_E_CONTEXT || after.cells_used != before.cells_used || after.cells_remaining != (uint32_t)e->have) printf("which is not so\n");
}

int main(int argc, char ** argv) {
    if (argc != 3) return fprintf(stderr, "consumer MODEL.gguf MMPROJ.gguf\n"), 2;
    if (pyl_abi_version() != PYL_ABI_VERSION) return fprintf(stderr, "the library and the header do not match\n"), 1;
    pyl_store_params params;
    pyl_projector_params encoder;
    pyl_store_params_init(&params, sizeof params);
    pyl_projector_params_init(&encoder, sizeof encoder);
    params.n_ctx = 512, params.n_branches = 8, params.n_threads = 1, encoder.n_threads = 1;
    check(pyl_model_open(&model, argv[1], strlen(argv[1]), NULL), "pyl_model_open");
    check(pyl_projector_open(&projector, model, argv[2], strlen(argv[2]), &encoder), "pyl_projector_open");
    check(pyl_store_open(&store, model, &params), "pyl_store_open");
    fork_a_prompt();
    question_a_picture();
    refuse_a_plan(argv[1]);
    refuse_a_decode();
    const uint32_t n_left = give_back();
    printf("left behind: %u\n", (unsigned)n_left);
    return n_left ? 1 : 0;
}
