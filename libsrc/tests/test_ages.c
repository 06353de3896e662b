/* A program compiled with another header than the library's: an older one (structs without their last fields), a newer one
 * (structs with one more), the frozen one, or the library's own. tools/abi_ages.py writes the headers; the build says with
 * AGE which it is. What the header promises under "What stays as it is" is what is asserted. Prints what it drew: the same at any age. */
#include <pylloyal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OLDER 1
#define OWN 2
#define NEWER 3

static int n_failed;

static int that(int ok, int line, const char * what) {
    if (!ok) n_failed++, fprintf(stderr, "%d: not so: %s\n", line, what);
    return ok;
}
#define CHECK(condition) that(!!(condition), __LINE__, #condition)
static void succeeded(int32_t code, int line, const char * what) {
    if (!that(code == PYL_OK, line, what)) fprintf(stderr, "    code %d\n", (int)code); /* the older header has no message */
}
#define OK(call) succeeded((call), __LINE__, #call)

/* Size of a struct in the library, by its own account. */
static uint32_t size_in_library(const char * name) {
    pyl_text * text = NULL;
    char key[64];
    unsigned size = 0;
    OK(pyl_abi_layout(&text));
    snprintf(key, sizeof key, "\"%s\":{\"size\":", name);
    const char * at = strstr(pyl_text_data(text), key);
    if (CHECK(at != NULL)) size = (unsigned)strtoul(at + strlen(key), NULL, 10);
    pyl_text_free(text);
    return size;
}

/* `n` structs, and memory behind them that nobody may touch; under a sanitiser the heap says so too. */
#define ALLOWED(T, n) ((T *)allowed(sizeof(T), (n)))
static void * allowed(size_t size, size_t n) {
    unsigned char * const memory = (unsigned char *)malloc(size * n + 64);
    if (!memory) exit(2);
    memset(memory, 0, size * n);
    memset(memory + size * n, 0xA5, 64);
    for (size_t i = 0; i < n; i++) {
        const uint32_t struct_size = (uint32_t)size;
        memcpy(memory + i * size, &struct_size, sizeof struct_size);
    }
    return memory;
}
static void untouched(void * structs, size_t size, size_t n, int line) {
    const unsigned char * const behind = (const unsigned char *)structs + size * n;
    for (int i = 0; i < 64; i++) {
        if (behind[i] != 0xA5 && that(0, line, "nothing was written behind the structs")) break;
        if (behind[i] != 0xA5) break;
    }
    free(structs);
}
#define DONE(structs, n) untouched((structs), sizeof *(structs), (n), __LINE__)

/* A call with a struct: an older or equal one is taken; a newer one is refused with both sizes, and then taken as far as the library goes. */
#if AGE == NEWER
#  define WITH(structs, call)                                                                        \
      do {                                                                                           \
          CHECK((call) == PYL_E_INVALID);                                                            \
          const pyl_error * const last = pyl_error_last();                                           \
          CHECK(last->state == PYL_STATE_UNCHANGED && last->need == (int64_t)sizeof *(structs) && last->have < last->need); \
          (structs)->struct_size = (uint32_t)last->have;                                             \
          OK(call);                                                                                  \
      } while (0)
#else
#  define WITH(structs, call) OK(call)
#endif

/* The calls whose parameters are not what this test is about, in one place. */
static int32_t make_root(pyl_store * store, pyl_branch * out, const pyl_sampling * sampling) { return pyl_branch_create(store, out, 0, sampling, NULL); }
static int32_t fork_two(pyl_store * store, pyl_branch source, pyl_branch * out) {
    static const uint64_t seeds[2] = {11, 12};
    return pyl_branch_fork_n(store, source, out, 2, seeds, 0);
}

static void sizes_are_of_the_age(void) {
#define SIZE(T) CHECK(AGE == OLDER ? sizeof(T) < size_in_library(#T) : AGE == NEWER ? sizeof(T) > size_in_library(#T) : sizeof(T) <= size_in_library(#T))
    SIZE(pyl_error);
    SIZE(pyl_live);
    SIZE(pyl_model_params);
    SIZE(pyl_model_info);
    SIZE(pyl_store_params);
    SIZE(pyl_pressure);
    SIZE(pyl_sampling);
    SIZE(pyl_grammar);
    SIZE(pyl_metrics);
    SIZE(pyl_branch_info);
    SIZE(pyl_run);
    SIZE(pyl_lane);
    SIZE(pyl_tick);
    SIZE(pyl_logits_view);
    SIZE(pyl_distribution);
    SIZE(pyl_projector_params);
    SIZE(pyl_projector_info);
    SIZE(pyl_part);
    SIZE(pyl_quote);
    SIZE(pyl_item);
    SIZE(pyl_embedder_params);
    SIZE(pyl_embedder_info);
}

int main(void) {
    CHECK(pyl_abi_version() == PYL_ABI_VERSION);
    sizes_are_of_the_age();

    pyl_model_params * const mp = ALLOWED(pyl_model_params, 1);
    pyl_model * model = NULL;
    pyl_model_params_init(mp, sizeof *mp);
    CHECK(mp->struct_size == sizeof *mp && mp->use_mmap == 1);
    WITH(mp, pyl_model_open(&model, "stub:n_vocab=300", 16, mp));
    DONE(mp, 1);

    pyl_model_info * const mi = ALLOWED(pyl_model_info, 1);
    WITH(mi, pyl_model_describe(model, mi));
    CHECK(mi->n_vocab == 300);
    DONE(mi, 1);

    pyl_store_params * const sp = ALLOWED(pyl_store_params, 1);
    pyl_store * store = NULL;
    pyl_store_params_init(sp, sizeof *sp);
    CHECK(sp->struct_size == sizeof *sp && sp->swa_full == 1 && sp->kv_unified == 1);
    sp->n_ctx = 128, sp->n_batch = 32;
    WITH(sp, pyl_store_open(&store, model, sp));
    DONE(sp, 1);

    pyl_sampling * const sampling = ALLOWED(pyl_sampling, 1);
    pyl_branch root = 0, kids[2] = {0, 0};
    pyl_sampling_init(sampling, sizeof *sampling);
    CHECK(sampling->struct_size == sizeof *sampling && sampling->top_k == 40);
    sampling->temperature = 1.5f, sampling->top_k = 0, sampling->top_p = 1, sampling->min_p = 0;
    WITH(sampling, make_root(store, &root, sampling));
    OK(pyl_branch_set_sampling(store, root, sampling));
    DONE(sampling, 1);
    pyl_sampling * const now = ALLOWED(pyl_sampling, 1);
    WITH(now, pyl_branch_get_sampling(store, root, now));
    CHECK(now->temperature == 1.5f && now->top_k == 0);
    DONE(now, 1);

    static const char rules[] = "root ::= \"abc\"";
    pyl_grammar * const grammar = ALLOWED(pyl_grammar, 1);
    grammar->text = rules, grammar->n_text = sizeof rules - 1;
    WITH(grammar, pyl_branch_set_grammar(store, root, grammar));
    OK(pyl_branch_set_grammar(store, root, NULL));
    DONE(grammar, 1);

    static const int32_t prompt[] = {'o', 'n', 'c', 'e', ' ', 'u', 'p', 'o', 'n'};
    pyl_run * const first = ALLOWED(pyl_run, 1);
    first->branch = root, first->tokens = prompt, first->n_tokens = 9;
    WITH(first, pyl_prefill_n(store, first, 1, 0, NULL));
    DONE(first, 1);
    OK(fork_two(store, root, kids));

    /* Arrays lie as far apart as their structs are long. A newer program can pass them one by one alone. */
    pyl_run * const runs = ALLOWED(pyl_run, 2);
    for (int i = 0; i < 2; i++) runs[i].branch = kids[i], runs[i].tokens = prompt + i, runs[i].n_tokens = (uint32_t)i + 2;
#if AGE == NEWER
    CHECK(pyl_prefill_n(store, runs, 2, 0, NULL) == PYL_E_INVALID && pyl_error_last()->index == 0);
    for (int i = 0; i < 2; i++) WITH(&runs[i], pyl_prefill_n(store, &runs[i], 1, 0, NULL));
#else
    OK(pyl_prefill_n(store, runs, 2, 0, NULL));
    runs[1].struct_size -= 4;
    CHECK(pyl_prefill_n(store, runs, 2, 0, NULL) == PYL_E_INVALID && pyl_error_last()->index == 1);
#endif
    DONE(runs, 2);
    for (int i = 0; i < 2; i++) {
        pyl_branch_info * const info = ALLOWED(pyl_branch_info, 1);
        WITH(info, pyl_branch_describe(store, kids[i], info));
        CHECK(info->position == 11 + i && info->cells_own == (uint32_t)i + 2 && info->parent == root);
        DONE(info, 1);
    }

    enum { N_STEPS = 6 };
    int32_t drawn[2][N_STEPS];
    memset(drawn, -1, sizeof drawn);
    OK(pyl_branch_set_metrics(store, kids[0], PYL_METRICS_MODEL));
    pyl_tick * const tick = ALLOWED(pyl_tick, 1);
    pyl_lane * const lanes = ALLOWED(pyl_lane, 2);
    tick->n_steps = N_STEPS;
    for (int i = 0; i < 2; i++) lanes[i].branch = kids[i], lanes[i].max_tokens = (uint32_t)(N_STEPS - i);
#if AGE == NEWER
    CHECK(pyl_tick_n(store, tick, lanes, 2, drawn[0]) == PYL_E_INVALID && pyl_error_last()->need == (int64_t)sizeof *tick);
    tick->struct_size = (uint32_t)pyl_error_last()->have;
    for (int i = 0; i < 2; i++) WITH(&lanes[i], pyl_tick_n(store, tick, &lanes[i], 1, drawn[i]));
#else
    OK(pyl_tick_n(store, tick, lanes, 2, drawn[0]));
    CHECK(tick->n_ticks == N_STEPS);
#endif
    for (int i = 0; i < 2; i++) {
        CHECK(lanes[i].branch == kids[i] && lanes[i].n_tokens == (uint32_t)(N_STEPS - i) && lanes[i].finish == PYL_FINISH_LENGTH);
        for (uint32_t k = 0; k < lanes[i].n_tokens; k++) printf("%d ", (int)drawn[i][k]);
    }
    printf("\n");
    DONE(lanes, 2);
    DONE(tick, 1);

#if AGE == OWN
    /* Runs that a tick takes along lie as far apart as their own struct_size says, whatever that of the tick. */
    struct old_run {
        uint32_t struct_size, n_tokens;
        pyl_branch branch;
        const int32_t * tokens;
    } * const old = ALLOWED(struct old_run, 2);
    pyl_branch listeners[2] = {0, 0};
    pyl_tick beside = {0};
    pyl_lane speaker = {0};
    for (int i = 0; i < 2; i++) {
        OK(make_root(store, &listeners[i], NULL));
        old[i].branch = listeners[i], old[i].tokens = prompt, old[i].n_tokens = (uint32_t)i + 2;
    }
    beside.struct_size = sizeof beside, beside.n_steps = 1, beside.runs = (pyl_run *)(void *)old, beside.n_runs = 2;
    speaker.struct_size = sizeof speaker, speaker.branch = kids[1];
    old[1].struct_size = 20;
    CHECK(pyl_tick_n(store, &beside, &speaker, 1, drawn[0]) == PYL_E_INVALID && pyl_error_last()->index == 2); /* counted after the lanes */
    old[1].struct_size = sizeof old[1];
    OK(pyl_tick_n(store, &beside, &speaker, 1, drawn[0]));
    CHECK(beside.runs == (pyl_run *)(void *)old && beside.n_dispatches == 1);
    for (int i = 0; i < 2; i++) {
        pyl_branch_info info = {0};
        info.struct_size = sizeof info;
        OK(pyl_branch_describe(store, listeners[i], &info));
        CHECK(info.position == 2 + i && info.has_logits == 1 && old[i].n_tokens == (uint32_t)i + 2 && old[i].tokens == prompt);
    }
    OK(pyl_branch_prune_n(store, listeners, 2));
    const uint32_t more = speaker.n_tokens;
    DONE(old, 2);
#else
    const uint32_t more = 0;
#endif

    pyl_metrics * const metrics = ALLOWED(pyl_metrics, 1);
    WITH(metrics, pyl_branch_get_metrics(store, kids[0], metrics));
    CHECK(metrics->n_tokens == N_STEPS && metrics->model_surprisal > 0);
    DONE(metrics, 1);
    pyl_logits_view * const view = ALLOWED(pyl_logits_view, 1);
    WITH(view, pyl_branch_logits(store, kids[0], view));
    CHECK(view->n_vocab == 300 && view->data != NULL);
    DONE(view, 1);
    pyl_distribution * const distribution = ALLOWED(pyl_distribution, 1);
    WITH(distribution, pyl_branch_distribution(store, kids[0], distribution));
    CHECK(distribution->entropy > 0);
    DONE(distribution, 1);

    pyl_projector_params * const pp = ALLOWED(pyl_projector_params, 1);
    pyl_projector * projector = NULL;
    pyl_projector_params_init(pp, sizeof *pp);
    CHECK(pp->struct_size == sizeof *pp);
    WITH(pp, pyl_projector_open(&projector, model, "stub:", 5, pp));
    DONE(pp, 1);
    pyl_projector_info * const pi = ALLOWED(pyl_projector_info, 1);
    WITH(pi, pyl_projector_describe(projector, pi));
    CHECK(pi->n_embd > 0);
    DONE(pi, 1);

    pyl_part * const parts = ALLOWED(pyl_part, 2);
    pyl_prompt * prompts[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) parts[i].kind = PYL_PART_TEXT, parts[i].text = i ? "xyz" : "ab", parts[i].n = (size_t)i + 2;
#if AGE == NEWER
    CHECK(pyl_prompt_make(&prompts[0], model, projector, parts, 2, 0) == PYL_E_INVALID && pyl_error_last()->index == 0);
    for (int i = 0; i < 2; i++) WITH(&parts[i], pyl_prompt_make(&prompts[i], model, projector, &parts[i], 1, 0));
    const uint32_t n_cells[2] = {2, 3};
#else
    OK(pyl_prompt_make(&prompts[0], model, projector, parts, 2, 0));
    OK(pyl_prompt_make(&prompts[1], model, projector, parts + 1, 1, 0));
    const uint32_t n_cells[2] = {5, 3};
#endif
    DONE(parts, 2);
    pyl_item * const items = ALLOWED(pyl_item, 2);
    for (int i = 0; i < 2; i++) {
        pyl_quote * const quote = ALLOWED(pyl_quote, 1);
        WITH(quote, pyl_prompt_quote(prompts[i], quote));
        CHECK(quote->n_cells == n_cells[i] && quote->n_segments == 1);
        DONE(quote, 1);
        items[i].branch = kids[i], items[i].prompt = prompts[i];
    }
#if AGE == NEWER
    CHECK(pyl_decode_prompts_n(store, items, 2) == PYL_E_INVALID);
    for (int i = 0; i < 2; i++) WITH(&items[i], pyl_decode_prompts_n(store, &items[i], 1));
#else
    OK(pyl_decode_prompts_n(store, items, 2));
#endif
    for (int i = 0; i < 2; i++) CHECK(items[i].code == PYL_OK && items[i].n_segments_landed == 1 && items[i].message == NULL && items[i].branch == kids[i]);
    DONE(items, 2);

    /* What a struct of the library's own tells is read as far as both know it. */
    pyl_run * const unfit = ALLOWED(pyl_run, 1);
    static int32_t many[500];
    unfit->branch = kids[0], unfit->tokens = many, unfit->n_tokens = 500;
#if AGE == NEWER
    unfit->struct_size = size_in_library("pyl_run");
#endif
    CHECK(pyl_prefill_n(store, unfit, 1, 0, NULL) == PYL_E_CONTEXT);
    CHECK(pyl_error_last()->code == PYL_E_CONTEXT && pyl_error_last()->need == 500 && pyl_error_last()->struct_size == size_in_library("pyl_error"));
    DONE(unfit, 1);

    pyl_pressure * const pressure = ALLOWED(pyl_pressure, 1);
    WITH(pressure, pyl_store_pressure(store, pressure));
    CHECK(pressure->cells_used == 9 + 2 + 3 + 6 + 5 + more + n_cells[0] + n_cells[1] && pressure->leases_used == 3);
    DONE(pressure, 1);

    pyl_embedder_params * const ep = ALLOWED(pyl_embedder_params, 1);
    pyl_embedder * embedder = NULL;
    pyl_embedder_params_init(ep, sizeof *ep);
    CHECK(ep->struct_size == sizeof *ep);
    ep->n_ctx = 77;
    WITH(ep, pyl_embedder_open(&embedder, model, ep));
    DONE(ep, 1);
    pyl_embedder_info * const ei = ALLOWED(pyl_embedder_info, 1);
    WITH(ei, pyl_embedder_describe(embedder, ei));
    CHECK(ei->n_ctx == 77);
    DONE(ei, 1);

    OK(pyl_embedder_free(embedder));
    for (int i = 0; i < 2; i++) OK(pyl_prompt_free(prompts[i]));
    OK(pyl_projector_free(projector));
    OK(pyl_store_free(store));
    OK(pyl_model_free(model));
    pyl_live * const live = ALLOWED(pyl_live, 1);
    WITH(live, pyl_live_objects(live));
    CHECK(live->models + live->weights + live->stores + live->contexts + live->branches + live->grammars + live->texts + live->embedders + live->projectors == 0);
    DONE(live, 1);
    return n_failed ? 1 : 0;
}
