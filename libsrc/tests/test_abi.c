/* The C ABI as a C program meets it: wrong arguments, struct sizes of other versions, handles after their free, what errors say,
 * and that nothing is left alive at the end. Runs on the stub engine, also in a library built with llama.cpp. */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pylloyal.h"

static int n_done = 0, n_failed = 0;

static int that(int ok, int line, const char * what) {
    n_done++;
    if (!ok && n_failed++ < 100) fprintf(stderr, "%s:%d: FAILED %s\n", __FILE__, line, what);
    return ok;
}

static void same(long long got, long long want, int line, const char * what) {
    if (!that(got == want, line, what)) fprintf(stderr, "    got %lld, want %lld (last error: %s)\n", got, want, pyl_error_last()->message);
}

#define CHECK(ok) that(!!(ok), __LINE__, #ok)
#define IS(want, got) same((long long)(got), (long long)(want), __LINE__, #got " == " #want)
#define OK(call) IS(PYL_OK, call)
#define INVALID(call) IS(PYL_E_INVALID, call)
#define CLOSED(call) IS(PYL_E_CLOSED, call)

#define COUNT(array) (sizeof(array) / sizeof *(array))

static pyl_model * open_model(const char * path) {
    pyl_model * model = NULL;
    OK(pyl_model_open(&model, path, strlen(path), NULL));
    return model;
}

static pyl_store * open_store(const pyl_model * model, uint32_t n_ctx) {
    pyl_store * store = NULL;
    pyl_store_params params;
    pyl_store_params_init(&params, sizeof params);
    params.n_ctx = n_ctx;
    params.n_threads = 1;
    OK(pyl_store_open(&store, model, &params));
    return store;
}

static int32_t set_gbnf(pyl_store * store, pyl_branch branch, const char * text, size_t n, const char * root) {
    const pyl_grammar grammar = {sizeof grammar, PYL_GRAMMAR_GBNF, text, n, root, NULL, 0};
    return pyl_branch_set_grammar(store, branch, &grammar);
}

static int32_t set_chat(pyl_store * store, pyl_branch branch, const char * text, size_t n) {
    const pyl_grammar grammar = {sizeof grammar, PYL_GRAMMAR_CHAT, text, n, NULL, NULL, 0};
    return pyl_branch_set_grammar(store, branch, &grammar);
}

static pyl_branch new_branch(pyl_store * store) {
    pyl_branch out = 0;
    OK(pyl_branch_create(store, &out, 0, NULL, NULL));
    return out;
}

static pyl_run run_of(pyl_branch branch, const int32_t * tokens, uint32_t n) {
    pyl_run run;
    memset(&run, 0, sizeof run);
    run.struct_size = sizeof run, run.branch = branch, run.tokens = tokens, run.n_tokens = n, run.n_landed = 77, run.state = 77;
    return run;
}

static pyl_lane lane_of(pyl_branch branch) {
    pyl_lane lane;
    memset(&lane, 0, sizeof lane);
    lane.struct_size = sizeof lane, lane.branch = branch;
    return lane;
}

static pyl_tick tick_of(uint32_t n_steps) {
    pyl_tick tick;
    memset(&tick, 0, sizeof tick);
    tick.struct_size = sizeof tick, tick.n_steps = n_steps;
    return tick;
}

static pyl_branch_info describe(pyl_store * store, pyl_branch branch) {
    pyl_branch_info info;
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    OK(pyl_branch_describe(store, branch, &info));
    return info;
}

static pyl_pressure pressure_of(const pyl_store * store) {
    pyl_pressure p;
    memset(&p, 0, sizeof p);
    p.struct_size = sizeof p;
    OK(pyl_store_pressure(store, &p));
    return p;
}

static pyl_live live(void) {
    pyl_live out;
    memset(&out, 0, sizeof out);
    out.struct_size = sizeof out;
    OK(pyl_live_objects(&out));
    return out;
}

static void check_nothing_alive(int line) {
    const pyl_live n = live();
    that(n.models + n.weights + n.stores + n.contexts + n.branches + n.grammars + n.texts + n.embedders + n.projectors + n.prompts == 0, line, "nothing is alive");
}

static pyl_part part_of(int32_t kind) {
    pyl_part out;
    memset(&out, 0, sizeof out);
    out.struct_size = sizeof out, out.kind = kind;
    return out;
}

static pyl_item item_of(pyl_branch branch, const pyl_prompt * prompt) {
    pyl_item out;
    memset(&out, 0x55, sizeof out);
    out.struct_size = sizeof out, out.branch = branch, out.prompt = prompt;
    return out;
}

static int contains(const pyl_text * text, const char * part) { return strstr(pyl_text_data(text), part) != NULL; }

static const int32_t hello[5] = {'h', 'e', 'l', 'l', 'o'};

/* ---------------------------------------------------------------------------------------------------------------------- */

static void test_library(void) {
    IS(PYL_ABI_VERSION, pyl_abi_version());
    pyl_text * text = NULL;
    OK(pyl_abi_layout(&text));
    IS(strlen(pyl_text_data(text)), pyl_text_size(text));
    char part[128];
#define SIZE_IS_TOLD(type)                                                           \
    snprintf(part, sizeof part, "\"" #type "\":{\"size\":%u,", (unsigned)sizeof(type)); \
    if (!CHECK(contains(text, part))) fprintf(stderr, "    %s\n", part)
    SIZE_IS_TOLD(pyl_error);
    SIZE_IS_TOLD(pyl_live);
    SIZE_IS_TOLD(pyl_model_params);
    SIZE_IS_TOLD(pyl_model_info);
    SIZE_IS_TOLD(pyl_store_params);
    SIZE_IS_TOLD(pyl_pressure);
    SIZE_IS_TOLD(pyl_sampling);
    SIZE_IS_TOLD(pyl_branch_info);
    SIZE_IS_TOLD(pyl_run);
    SIZE_IS_TOLD(pyl_lane);
    SIZE_IS_TOLD(pyl_tick);
    SIZE_IS_TOLD(pyl_logits_view);
    SIZE_IS_TOLD(pyl_metrics);
    SIZE_IS_TOLD(pyl_distribution);
    SIZE_IS_TOLD(pyl_embedder_params);
    SIZE_IS_TOLD(pyl_embedder_info);
    SIZE_IS_TOLD(pyl_projector_params);
    SIZE_IS_TOLD(pyl_projector_info);
    SIZE_IS_TOLD(pyl_part);
    SIZE_IS_TOLD(pyl_quote);
    SIZE_IS_TOLD(pyl_item);
    snprintf(part, sizeof part, "\"final_token\":[%u,4]", (unsigned)offsetof(pyl_lane, final_token));
    CHECK(contains(text, part));
    snprintf(part, sizeof part, "\"message\":[%u,%u]", (unsigned)offsetof(pyl_error, message), (unsigned)sizeof(char *));
    CHECK(contains(text, part));
    IS(1, live().texts);
    pyl_text_free(text);
    OK(pyl_build_info(&text));
    for (size_t i = 0; i < 7; i++) CHECK(contains(text, (const char *[]){"\"version\":\"", "\"abi_version\":1", "\"engine\":{\"name\":\"", "\"commit\":", "\"backends\":[", "\"cpu_features\":[", "\"cpu_missing\":["}[i]));
    pyl_text_free(text);
    OK(pyl_devices(&text));
    CHECK(pyl_text_data(text)[0] == '[' && pyl_text_data(text)[pyl_text_size(text) - 1] == ']');
    pyl_text_free(text);
    pyl_text_free(NULL);
    IS(0, pyl_text_size(NULL));
    IS(0, strlen(pyl_text_data(NULL)));
    INVALID(pyl_abi_layout(NULL));
    INVALID(pyl_build_info(NULL));
    INVALID(pyl_devices(NULL));
    INVALID(pyl_live_objects(NULL));
}

static int built_with_llama(void) {
    pyl_text * text = NULL;
    OK(pyl_build_info(&text));
    const int out = !contains(text, "\"engine\":{\"name\":\"stub\"");
    pyl_text_free(text);
    return out;
}

static void test_log(void) {
    pyl_text * text = NULL;
    uint64_t dropped = 77;
    OK(pyl_log_drain(&text, &dropped));
    IS(0, dropped);
    pyl_text_free(text);
    OK(pyl_log_drain(&text, &dropped));
    IS(0, pyl_text_size(text)); /* drained: nothing is left */
    pyl_text_free(text);
    INVALID(pyl_log_drain(NULL, &dropped));
    for (int32_t level = 1; level <= 5; level++) OK(pyl_log_level(level));
    INVALID(pyl_log_level(0));
    INVALID(pyl_log_level(6));
    INVALID(pyl_log_level(-1));
    OK(pyl_log_level(3));
}

static void test_model(void) {
    static const char * const good[] = {"stub:", "stub:n_vocab=260", "stub:n_vocab=300;", "stub:n_vocab=301;n_ctx_train=128;fail_at=0;fail_rc=-2;fail_rows=1;spin_us=0"};
    static const char * const bad[] = {"stub:bogus=1", "stub:n_vocab", "stub:n_vocab=", "stub:n_vocab=abc", "stub:n_vocab=300x", "stub:n_vocab= 300", "stub:n_vocab=259", "stub:n_vocab=1000001", "stub:n_vocab=-5",
                                       "stub:=5", "stub:;", "stub:n_vocab=300;;", "stub:N_VOCAB=300", "stub:n_vocab=99999999999999999999", "stub:spin_us=99999999999999999999"};
    for (size_t i = 0; i < COUNT(good); i++) OK(pyl_model_free(open_model(good[i])));
    for (size_t i = 0; i < COUNT(bad); i++) {
        pyl_model * out = (pyl_model *)&out;
        if (pyl_model_open(&out, bad[i], strlen(bad[i]), NULL) != PYL_E_FORMAT) {
            CHECK(0 && "a stub option that makes no sense is PYL_E_FORMAT");
            fprintf(stderr, "    %s\n", bad[i]);
            pyl_model_free(out);
        } else {
            CHECK(out == (pyl_model *)&out); /* untouched on failure */
            CHECK(strlen(pyl_error_last()->message) > 10);
        }
    }
    pyl_model * out = NULL;
    INVALID(pyl_model_open(NULL, "stub:", 5, NULL));
    INVALID(pyl_model_open(&out, NULL, 5, NULL));
    INVALID(pyl_model_open(&out, NULL, 0, NULL));
    INVALID(pyl_model_open(&out, "", 0, NULL));
    INVALID(pyl_model_open(&out, "stub:\0n_vocab=300", 17, NULL));
    IS(built_with_llama() ? PYL_E_IO : PYL_E_UNSUPPORTED, pyl_model_open(&out, "/no/such/model.gguf", 19, NULL));
    CHECK(out == NULL);
    OK(pyl_model_open(&out, "stub:n_vocab=260garbage", 16, NULL)); /* the length counts, not a NUL */

    pyl_model_info info;
    memset(&info, 0xAB, sizeof info);
    info.struct_size = sizeof info;
    OK(pyl_model_describe(out, &info));
    IS(sizeof info, info.struct_size);
    IS(260, info.n_vocab);
    IS(4096, info.n_ctx_train);
    IS(1, info.has_decoder);
    IS(0, info.has_encoder);
    IS(256, info.bos);
    IS(257, info.eos);
    IS(258, info.eot);
    IS(-1, info.pad);
    pyl_text * text = NULL;
    OK(pyl_model_metadata(out, &text));
    CHECK(contains(text, "\"\":") && contains(text, "general.architecture"));
    pyl_text_free(text);

    /* Weights are shared by path and params; handles are not. */
    pyl_model * again = open_model("stub:n_vocab=260");
    pyl_model * other = open_model("stub:n_vocab=261");
    CHECK(again != out);
    IS(3, live().models);
    IS(2, live().weights);
    OK(pyl_model_free(out));
    IS(2, live().weights);
    OK(pyl_model_free(again));
    IS(1, live().weights);
    OK(pyl_model_free(other));
    check_nothing_alive(__LINE__);
}

static void test_vocabulary(const pyl_model * model) {
    int32_t tokens[32];
    size_t n = 77;
    INVALID(pyl_tokenize(model, "hello", 5, 0, NULL, 0, &n)); /* how many? */
    IS(5, n);
    IS(5, pyl_error_last()->need);
    IS(0, pyl_error_last()->have);
    tokens[0] = tokens[4] = -77;
    n = 77;
    INVALID(pyl_tokenize(model, "hello", 5, 0, tokens, 4, &n));
    IS(5, n);
    IS(-77, tokens[0]); /* too short: nothing is written */
    OK(pyl_tokenize(model, "hello", 5, 0, tokens, 5, &n));
    IS(5, n);
    CHECK(memcmp(tokens, hello, sizeof hello) == 0);
    OK(pyl_tokenize(model, NULL, 0, 0, NULL, 0, &n));
    IS(0, n);
    OK(pyl_tokenize(model, "", 0, PYL_TOKENIZE_ADD_SPECIAL, tokens, 32, &n));
    CHECK(n == 1 && tokens[0] == 256);
    OK(pyl_tokenize(model, "a<eos>", 6, 0, tokens, 32, &n));
    IS(6, n); /* inert text */
    OK(pyl_tokenize(model, "a<eos>", 6, PYL_TOKENIZE_PARSE_SPECIAL | PYL_TOKENIZE_ADD_SPECIAL, tokens, 32, &n));
    CHECK(n == 3 && tokens[0] == 256 && tokens[1] == 'a' && tokens[2] == 257);
    IS(PYL_E_FORMAT, pyl_tokenize(model, "a\xff", 2, 0, tokens, 32, &n));
    IS(PYL_E_FORMAT, pyl_tokenize(model, "\xc3", 1, 0, tokens, 32, &n));
    IS(PYL_E_FORMAT, pyl_tokenize(model, "\xed\xa0\x80", 3, 0, tokens, 32, &n)); /* a surrogate */
    OK(pyl_tokenize(model, "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", 9, 0, tokens, 32, &n));
    IS(9, n);
    INVALID(pyl_tokenize(model, "a", 1, 8, tokens, 32, &n));
    INVALID(pyl_tokenize(model, NULL, 1, 0, tokens, 32, &n));
    INVALID(pyl_tokenize(model, "a", 1, 0, NULL, 32, &n));
    INVALID(pyl_tokenize(model, "a", 1, 0, tokens, 32, NULL));
    CLOSED(pyl_tokenize(NULL, "a", 1, 0, tokens, 32, &n));

    pyl_text * text = NULL;
    const int32_t mixed[] = {'a', 0, 256, 257, 0xC3, 299};
    OK(pyl_detokenize(model, mixed, 6, 0, &text));
    CHECK(pyl_text_size(text) == 3 && memcmp(pyl_text_data(text), "a\0\xc3", 4) == 0); /* exact bytes, and a NUL after them */
    pyl_text_free(text);
    OK(pyl_detokenize(model, mixed, 4, PYL_DETOKENIZE_SPECIAL, &text));
    CHECK(pyl_text_size(text) == 12 && memcmp(pyl_text_data(text) + 2, "<bos><eos>", 11) == 0);
    pyl_text_free(text);
    OK(pyl_detokenize(model, NULL, 0, 0, &text));
    IS(0, pyl_text_size(text));
    pyl_text_free(text);
    const int32_t bad[] = {1, 300, -1};
    text = NULL;
    INVALID(pyl_detokenize(model, bad, 3, 0, &text));
    IS(1, pyl_error_last()->index);
    INVALID(pyl_detokenize(model, bad + 2, 1, 0, &text));
    INVALID(pyl_detokenize(model, NULL, 1, 0, &text));
    INVALID(pyl_detokenize(model, mixed, 1, 2, &text));
    INVALID(pyl_detokenize(model, mixed, 1, 0, NULL));
    CLOSED(pyl_detokenize(NULL, mixed, 1, 0, &text));
    CHECK(text == NULL);

    uint32_t flags[6];
    OK(pyl_token_flags(model, mixed, 6, flags));
    IS(PYL_TOKEN_BYTE, flags[0]);
    IS(PYL_TOKEN_CONTROL, flags[2]);
    IS(PYL_TOKEN_CONTROL | PYL_TOKEN_EOG, flags[3]);
    IS(PYL_TOKEN_UNUSED, flags[5]);
    OK(pyl_token_flags(model, NULL, 0, NULL));
    INVALID(pyl_token_flags(model, bad, 3, flags));
    IS(1, pyl_error_last()->index);
    INVALID(pyl_token_flags(model, NULL, 1, flags));
    INVALID(pyl_token_flags(model, mixed, 1, NULL));
    CLOSED(pyl_token_flags(NULL, mixed, 1, flags));

    INVALID(pyl_model_describe(model, NULL));
    INVALID(pyl_model_metadata(model, NULL));
    pyl_model_info info;
    info.struct_size = sizeof info;
    CLOSED(pyl_model_describe(NULL, &info));
    CLOSED(pyl_model_metadata(NULL, &text));
    CLOSED(pyl_model_free(NULL));

    IS(PYL_E_TEMPLATE, pyl_chat_render(model, "{}", 2, &text)); /* the stub has no template */
    INVALID(pyl_chat_render(model, NULL, 2, &text));
    INVALID(pyl_chat_render(model, "{}", 2, NULL));
    CLOSED(pyl_chat_render(NULL, "{}", 2, &text));
    IS(built_with_llama() ? PYL_E_FORMAT : PYL_E_UNSUPPORTED, pyl_chat_parse("not json", 8, &text));
    INVALID(pyl_chat_parse(NULL, 2, &text));
    INVALID(pyl_chat_parse("{}", 2, NULL));
    CHECK(text == NULL);

    const int has_llama = built_with_llama();
    IS(has_llama ? PYL_OK : PYL_E_UNSUPPORTED, pyl_schema_to_gbnf("{}x", 2, &text)); /* the length counts, not a NUL */
    if (has_llama) CHECK(contains(text, "root ::= "));
    pyl_text_free(text);
    text = NULL;
    IS(has_llama ? PYL_E_FORMAT : PYL_E_UNSUPPORTED, pyl_schema_to_gbnf("not json", 8, &text));
    IS(has_llama ? PYL_E_FORMAT : PYL_E_UNSUPPORTED, pyl_schema_to_gbnf(NULL, 0, &text));
    IS(PYL_E_UNSUPPORTED, pyl_schema_to_gbnf("{\"not\":{}}", 10, &text));
    CHECK(strstr(pyl_error_last()->message, has_llama ? "not at #: " : "without llama.cpp") != NULL);
    INVALID(pyl_schema_to_gbnf(NULL, 2, &text));
    INVALID(pyl_schema_to_gbnf("{}", 2, NULL));
    CHECK(text == NULL);

    static const char gbnf[] = "root ::= \"h\xc3\xa9\"";
    const size_t n_gbnf = sizeof gbnf - 1;
    int32_t is_complete = 77;
    OK(pyl_grammar_match(model, gbnf, n_gbnf, NULL, "h\xc3\xa9", 3, &n, &is_complete));
    CHECK(n == 3 && is_complete == 1);
    OK(pyl_grammar_match(model, gbnf, n_gbnf, "root", "h", 1, &n, &is_complete));
    CHECK(n == 1 && is_complete == 0);
    OK(pyl_grammar_match(model, gbnf, n_gbnf, NULL, "h\xc3\xa9!", 4, &n, &is_complete));
    CHECK(n == 3 && is_complete == 0);
    OK(pyl_grammar_match(model, gbnf, n_gbnf, NULL, "x", 1, &n, &is_complete));
    CHECK(n == 0 && is_complete == 0);
    OK(pyl_grammar_match(model, gbnf, n_gbnf, NULL, NULL, 0, &n, &is_complete));
    CHECK(n == 0 && is_complete == 0);
    OK(pyl_grammar_match(model, "root ::= \"\"", 11, NULL, "", 0, &n, &is_complete));
    CHECK(n == 0 && is_complete == 1);
    n = 77, is_complete = 77;
    IS(PYL_E_GRAMMAR, pyl_grammar_match(model, gbnf, n_gbnf, "start", "h", 1, &n, &is_complete));
    IS(PYL_E_GRAMMAR, pyl_grammar_match(model, gbnf, 7, NULL, "h", 1, &n, &is_complete));
    IS(PYL_E_GRAMMAR, pyl_grammar_match(model, NULL, 0, NULL, "h", 1, &n, &is_complete));
    IS(PYL_E_FORMAT, pyl_grammar_match(model, gbnf, n_gbnf, NULL, "h\xc3", 2, &n, &is_complete));
    INVALID(pyl_grammar_match(model, NULL, 1, NULL, "h", 1, &n, &is_complete));
    INVALID(pyl_grammar_match(model, gbnf, n_gbnf, NULL, NULL, 1, &n, &is_complete));
    INVALID(pyl_grammar_match(model, gbnf, n_gbnf, NULL, "h", 1, NULL, &is_complete));
    INVALID(pyl_grammar_match(model, gbnf, n_gbnf, NULL, "h", 1, &n, NULL));
    CLOSED(pyl_grammar_match(NULL, gbnf, n_gbnf, NULL, "h", 1, &n, &is_complete));
    CHECK(n == 77 && is_complete == 77); /* untouched on failure */
    IS(0, live().grammars);
}

static void test_store_open(const pyl_model * model) {
    pyl_store_params p;
    pyl_store_params_init(&p, sizeof p);
    pyl_store_params_init(NULL, sizeof(pyl_store_params));
    IS(sizeof p, p.struct_size);
    IS(1, p.swa_full);
    pyl_store * store = NULL;
    OK(pyl_store_open(&store, model, NULL));
    const pyl_pressure now = pressure_of(store);
    IS(4096, now.n_ctx);
    IS(512, now.n_batch);
    IS(8, now.leases_remaining);
    CHECK(now.n_threads >= 1);
    OK(pyl_store_free(store));
    INVALID(pyl_store_open(NULL, model, NULL));
    store = NULL;
    CLOSED(pyl_store_open(&store, NULL, NULL));
#define REFUSED(...)                         \
    do {                                     \
        pyl_store_params_init(&p, sizeof p);           \
        p.n_ctx = 64;                        \
        __VA_ARGS__;                         \
        INVALID(pyl_store_open(&store, model, &p)); \
    } while (0)
    REFUSED(p.n_branches = 257);
    REFUSED(p.n_branches = UINT32_MAX, p.n_batch = UINT32_MAX);
    REFUSED(p.n_batch = 65537);
    REFUSED(p.n_threads = 513);
    REFUSED(p.n_ctx = 0x80000000u);
    REFUSED(p.flash_attn = 3);
    REFUSED(p.flash_attn = -1);
    REFUSED(p.type_k = PYL_KV_IQ4_NL + 1);
    REFUSED(p.type_k = -1);
    REFUSED(p.type_v = PYL_KV_IQ4_NL + 1);
    REFUSED(p.type_v = -1);
    REFUSED(p.type_v = PYL_KV_Q8_0, p.flash_attn = PYL_FLASH_ATTN_OFF);
    REFUSED(p.n_batch = 7);
    IS(8, pyl_error_last()->need);
    IS(7, pyl_error_last()->have);
    REFUSED(p.struct_size = 0);
    CHECK(store == NULL);
    pyl_store_params_init(&p, sizeof p);
    p.n_ctx = 64, p.n_branches = 256, p.n_batch = 256, p.flash_attn = PYL_FLASH_ATTN_OFF, p.type_k = PYL_KV_F32;
    OK(pyl_store_open(&store, model, &p));
    IS(PYL_FLASH_ATTN_OFF, pressure_of(store).flash_attn);
    IS(256, pressure_of(store).leases_remaining);
    OK(pyl_store_free(store));
    /* A model that declares no context has none to take. */
    pyl_model * bare = open_model("stub:n_ctx_train=0");
    INVALID(pyl_store_open(&store, bare, NULL));
    OK(pyl_model_free(bare));
    /* Vocabulary only: words, but no store. */
    pyl_model_params mp;
    pyl_model_params_init(&mp, sizeof mp);
    IS(1, mp.use_mmap);
    mp.vocab_only = 1;
    OK(pyl_model_open(&bare, "stub:", 5, &mp));
    pyl_store_params_init(&p, sizeof p);
    p.n_ctx = 64;
    store = NULL;
    IS(PYL_E_UNSUPPORTED, pyl_store_open(&store, bare, &p));
    if (store) pyl_store_free(store);
    OK(pyl_model_free(bare));
}

static void test_branches(const pyl_model * model) {
    pyl_store * store = open_store(model, 64);
    pyl_sampling s;
    pyl_sampling_init(&s, sizeof s);
    pyl_sampling_init(NULL, sizeof(pyl_sampling));
    IS(sizeof s, s.struct_size);
    CHECK(s.temperature == 0.8f && s.top_k == 40 && s.top_p == 0.95f && s.min_p == 0.05f && s.typical_p == 1.0f && s.penalty_repeat == 1.0f && s.penalty_frequency == 0.0f && s.penalty_presence == 0.0f);
    IS(PYL_SEED_KEEP, s.seed_mode);
    pyl_branch root = 0, second = 0;
    s.seed_mode = PYL_SEED_SET, s.seed = 42;
    OK(pyl_branch_create(store, &root, 0, &s, NULL));
    OK(pyl_branch_create(store, &second, 100, NULL, NULL));
    CHECK(root != 0 && second != 0 && root != second);
    IS(100, describe(store, second).position);
    pyl_branch out = 4711;
    INVALID(pyl_branch_create(store, &out, -1, NULL, NULL));
    s.temperature = NAN;
    INVALID(pyl_branch_create(store, &out, 0, &s, NULL));
    CHECK(strstr(pyl_error_last()->message, "temperature") != NULL);
    INVALID(pyl_branch_set_sampling(store, root, &s));
    pyl_sampling_init(&s, sizeof s);
    s.seed_mode = 3;
    INVALID(pyl_branch_create(store, &out, 0, &s, NULL));
    INVALID(pyl_branch_set_sampling(store, root, &s));
    IS(4711, out);

    /* Sampling: what is in force, the seed really used, and that a change of settings leaves the stream alone. */
    pyl_sampling now, other;
    memset(&now, 0, sizeof now);
    now.struct_size = other.struct_size = sizeof now;
    OK(pyl_branch_get_sampling(store, root, &now));
    IS(42, now.seed);
    IS(PYL_SEED_SET, now.seed_mode);
    CHECK(now.temperature == 0.8f);
    OK(pyl_branch_get_sampling(store, second, &now));
    pyl_branch third = new_branch(store);
    OK(pyl_branch_get_sampling(store, third, &other));
    CHECK(now.seed != other.seed); /* from the operating system, each its own */
    pyl_run run = run_of(root, hello, 5);
    uint32_t n_dispatches = 77;
    OK(pyl_prefill_n(store, &run, 1, 0, &n_dispatches));
    IS(1, n_dispatches);
    IS(5, run.n_landed);
    int32_t token = -77;
    for (int i = 0; i < 3; i++) OK(pyl_sample_n(store, &root, 1, &token));
    CHECK(token >= 0 && token < 300);
    IS(3, describe(store, root).n_sampled);
    pyl_sampling_init(&s, sizeof s);
    s.temperature = 1.5f, s.seed = 9; /* PYL_SEED_KEEP: the seed field is not looked at */
    OK(pyl_branch_set_sampling(store, root, &s));
    OK(pyl_branch_get_sampling(store, root, &now));
    CHECK(now.temperature == 1.5f && now.seed == 42);
    IS(3, describe(store, root).n_sampled);
    s.seed_mode = PYL_SEED_SET;
    OK(pyl_branch_set_sampling(store, root, &s));
    IS(0, describe(store, root).n_sampled);

    /* Forks, the list and its size query. */
    pyl_branch kids[3] = {0, 0, 0}, list[8];
    const uint64_t seeds[3] = {1, 2, 3};
    OK(pyl_branch_fork_n(store, root, kids, 3, seeds, 0));
    OK(pyl_branch_fork_n(store, root, NULL, 0, NULL, 0));
    size_t n = 77;
    INVALID(pyl_branch_list(store, 0, NULL, 0, &n));
    IS(6, n);
    IS(6, pyl_error_last()->need);
    OK(pyl_branch_list(store, 0, list, 8, &n));
    CHECK(n == 6 && list[0] == root && list[5] == kids[2]);
    OK(pyl_branch_list(store, root, list, 8, &n));
    CHECK(n == 3 && memcmp(list, kids, sizeof kids) == 0);
    OK(pyl_branch_list(store, kids[0], NULL, 0, &n));
    IS(0, n);
    const pyl_branch_info info = describe(store, kids[1]);
    CHECK(info.parent == root && info.cells_inherited == 5 && info.cells_own == 0 && info.position == 5 && info.has_logits && !info.is_poisoned && !info.has_grammar && info.last_token == -1 && info.n_children == 0);
    IS(3, describe(store, root).n_children);

    /* Grammar. */
    OK(set_gbnf(store, kids[0], "root ::= \"hi\"", 13, NULL));
    OK(set_gbnf(store, kids[1], "start ::= \"ho\"", 14, "start"));
    IS(PYL_E_GRAMMAR, set_gbnf(store, kids[0], "bad", 3, NULL));
    IS(1, describe(store, kids[0]).has_grammar);
    IS(2, live().grammars);
    OK(set_gbnf(store, kids[1], NULL, 0, NULL));
    IS(1, live().grammars);

    /* Tick, commit, logits. */
    int32_t rows[2][4];
    memset(rows, 0xAB, sizeof rows);
    pyl_lane lanes[2] = {lane_of(kids[0]), lane_of(kids[1])};
    lanes[1].max_tokens = 2;
    pyl_tick tick = tick_of(4);
    OK(set_gbnf(store, kids[1], "root ::= \"abcdef\"", 17, NULL));
    OK(pyl_tick_n(store, &tick, lanes, 2, rows[0]));
    CHECK(lanes[0].n_tokens == 2 && rows[0][0] == 'h' && rows[0][1] == 'i' && lanes[0].finish == PYL_FINISH_EOG && lanes[0].final_token >= 257);
    CHECK(lanes[1].n_tokens == 2 && rows[1][0] == 'a' && rows[1][1] == 'b' && lanes[1].finish == PYL_FINISH_LENGTH && lanes[1].final_token == -1);
    IS(3, tick.n_ticks);
    IS(2, tick.n_dispatches);
    IS('b', describe(store, kids[1]).last_token);
    pyl_logits_view view;
    memset(&view, 0, sizeof view);
    view.struct_size = sizeof view;
    OK(pyl_branch_logits(store, kids[2], &view));
    IS(300, view.n_vocab);
    IS(pyl_store_epoch(store), view.epoch);
    float before[300];
    memcpy(before, view.data, sizeof before);
    token = 'x';
    OK(pyl_commit_n(store, &root, &token, 1));
    CHECK(pyl_store_epoch(store) != view.epoch);
    OK(pyl_branch_logits(store, kids[2], &view));
    CHECK(memcmp(before, view.data, sizeof before) == 0);
    IS(PYL_E_NO_LOGITS, pyl_branch_logits(store, third, &view));
    IS(PYL_E_NO_LOGITS, pyl_sample_n(store, &third, 1, &token));

    /* Pruning. */
    IS(PYL_E_HAS_CHILDREN, pyl_branch_prune_n(store, &root, 1));
    IS(0, pyl_error_last()->index);
    OK(pyl_branch_prune_n(store, kids, 3));
    OK(pyl_branch_prune_n(store, kids, 3));
    OK(pyl_branch_prune_subtree(store, kids[0]));
    OK(pyl_branch_prune_n(store, NULL, 0));
    IS(PYL_E_STALE, pyl_branch_retain_only(store, kids[0]));
    OK(pyl_branch_retain_only(store, root));
    IS(1, pressure_of(store).leases_used);
    IS(6, pressure_of(store).cells_used);
    OK(pyl_store_free(store));
}

/* Every pointer that may not be NULL, one at a time, everything else being right. */
static void test_null_in_store(const pyl_model * model) {
    pyl_store * store = open_store(model, 64);
    pyl_branch b = new_branch(store), out = 0;
    int32_t token = 'x';
    size_t n = 0;
    pyl_run run = run_of(b, hello, 5);
    OK(pyl_prefill_n(store, &run, 1, 0, NULL));
    run.n_tokens = 1;
    pyl_lane lane = lane_of(b);
    pyl_tick tick = tick_of(1);
    pyl_sampling s;
    pyl_sampling_init(&s, sizeof s);
    pyl_branch_info info;
    info.struct_size = sizeof info;
    pyl_logits_view view;
    view.struct_size = sizeof view;
    pyl_pressure p;
    p.struct_size = sizeof p;
    const pyl_pressure before = pressure_of(store);

    INVALID(pyl_store_pressure(store, NULL));
    INVALID(pyl_branch_set_sampling(store, b, NULL));
    INVALID(pyl_branch_get_sampling(store, b, NULL));
    INVALID(set_gbnf(store, b, NULL, 3, NULL));
    INVALID(pyl_branch_create(store, NULL, 0, NULL, NULL));
    INVALID(pyl_branch_fork_n(store, b, NULL, 1, NULL, 0));
    INVALID(pyl_branch_prune_n(store, NULL, 1));
    INVALID(pyl_branch_describe(store, b, NULL));
    INVALID(pyl_branch_list(store, 0, &out, 1, NULL));
    INVALID(pyl_branch_list(store, 0, NULL, 1, &n));
    INVALID(pyl_prefill_n(store, NULL, 1, 0, NULL));
    run.tokens = NULL;
    INVALID(pyl_prefill_n(store, &run, 1, 0, NULL));
    tick.runs = &run, tick.n_runs = 1;
    INVALID(pyl_tick_n(store, &tick, &lane, 1, &token));
    run.tokens = hello, run.struct_size = 0;
    INVALID(pyl_tick_n(store, &tick, &lane, 1, &token));
    run.struct_size = sizeof run, tick.runs = NULL;
    INVALID(pyl_tick_n(store, &tick, &lane, 1, &token));
    tick.n_runs = 0;
    INVALID(pyl_sample_n(store, NULL, 1, &token));
    INVALID(pyl_sample_n(store, &b, 1, NULL));
    INVALID(pyl_commit_n(store, NULL, &token, 1));
    INVALID(pyl_commit_n(store, &b, NULL, 1));
    INVALID(pyl_tick_n(store, NULL, &lane, 1, &token));
    INVALID(pyl_tick_n(store, &tick, NULL, 1, &token));
    INVALID(pyl_tick_n(store, &tick, &lane, 1, NULL));
    tick.n_stop_tokens = 1;
    INVALID(pyl_tick_n(store, &tick, &lane, 1, &token));
    tick.n_stop_tokens = 0;
    INVALID(pyl_branch_logits(store, b, NULL));
    const int32_t one_token = 65;
    const float one_float = 1.0f;
    uint8_t one_byte = 0;
    pyl_distribution distribution = {0};
    INVALID(pyl_branch_distribution(store, b, NULL));
    INVALID(pyl_branch_distribution(store, b, &distribution)); /* struct_size not set */
    INVALID(pyl_branch_set_logits(store, b, NULL, 1));
    INVALID(pyl_branch_set_logits(store, b, &one_float, 1)); /* not the vocabulary's size */
    INVALID(pyl_branch_merge_logits(store, b, NULL, 1, 1.0f));
    INVALID(pyl_branch_legal_n(store, b, NULL, 1, &one_byte));
    INVALID(pyl_branch_legal_n(store, b, &one_token, 1, NULL));
    INVALID(pyl_branch_set_bias(store, b, PYL_BIAS, NULL, &one_float, 1));
    INVALID(pyl_branch_set_bias(store, b, PYL_BIAS, &one_token, NULL, 1));
    INVALID(pyl_branch_set_bias(store, b, 2, &one_token, &one_float, 1));
    pyl_text * text = NULL;
    const uint8_t bytes[4] = {1, 2, 3, 4};
    const uint32_t lengths[2] = {2, 1};
    float row[300];
    pyl_metrics metrics = {0};
    INVALID(pyl_branch_save(store, b, 0, NULL));
    INVALID(pyl_branch_save(store, b, 2, &text));
    INVALID(pyl_branch_save(store, b, UINT32_MAX, &text));
    IS(PYL_E_STALE, pyl_branch_save(store, 0, 0, &text));
    INVALID(pyl_branch_load(store, NULL, bytes, 4));
    INVALID(pyl_branch_load(store, &out, NULL, 4));
    IS(PYL_E_FORMAT, pyl_branch_load(store, &out, NULL, 0));
    IS(PYL_E_FORMAT, pyl_branch_load(store, &out, bytes, 4));
    INVALID(pyl_saved_describe(bytes, 4, NULL));
    INVALID(pyl_saved_describe(NULL, 4, &text));
    IS(PYL_E_FORMAT, pyl_saved_describe(NULL, 0, &text));
    IS(PYL_E_FORMAT, pyl_saved_describe(bytes, 4, &text));
    CHECK(out == 0 && text == NULL);
    INVALID(pyl_branch_set_metrics(store, b, 4));
    INVALID(pyl_branch_set_metrics(store, b, -1));
    IS(PYL_E_STALE, pyl_branch_set_metrics(store, 0, 0));
    INVALID(pyl_branch_get_metrics(store, b, NULL));
    INVALID(pyl_branch_get_metrics(store, b, &metrics)); /* struct_size not set */
    INVALID(pyl_branch_logits_at(store, b, NULL, 1, row));
    INVALID(pyl_branch_logits_at(store, b, &one_token, 1, NULL));
    INVALID(pyl_branch_priors(store, b, NULL, row, 1, &n, NULL));
    INVALID(pyl_branch_priors(store, b, &token, NULL, 1, &n, NULL));
    INVALID(pyl_branch_priors(store, b, &token, row, 1, NULL, NULL));
    INVALID(pyl_score_n(store, b, NULL, lengths, 2, &one_token, 1, row));
    INVALID(pyl_score_n(store, b, hello, NULL, 2, &one_token, 1, row));
    INVALID(pyl_score_n(store, b, hello, lengths, 2, NULL, 1, row));
    INVALID(pyl_score_n(store, b, hello, lengths, 2, &one_token, 1, NULL));
    INVALID(pyl_branch_reseed_kv(store, b, NULL, 1, NULL));
    INVALID(pyl_branch_reseed_kv(store, b, NULL, 0, NULL));
    IS(PYL_E_STALE, pyl_branch_reseed_kv(store, 0, hello, 1, NULL));
    INVALID(set_chat(store, b, NULL, 5));
    IS(PYL_E_UNSUPPORTED, set_chat(store, b, "{}", 2));
    pyl_grammar grammar = {sizeof grammar, 2, "x", 1, NULL, NULL, 0};
    INVALID(pyl_branch_set_grammar(store, b, &grammar)); /* a kind there is not */
    grammar.kind = PYL_GRAMMAR_CHAT, grammar.root = "root";
    INVALID(pyl_branch_set_grammar(store, b, &grammar)); /* a conversation has no start rule to choose */
    grammar.root = NULL, grammar.triggers = "[]", grammar.n_triggers = 2;
    INVALID(pyl_branch_set_grammar(store, b, &grammar)); /* nor triggers beside its own */
    grammar.kind = PYL_GRAMMAR_GBNF, grammar.triggers = NULL;
    INVALID(pyl_branch_set_grammar(store, b, &grammar));
    grammar.triggers = "[]";
    IS(PYL_E_UNSUPPORTED, pyl_branch_set_grammar(store, b, &grammar)); /* the stub's are never lazy */
    grammar.struct_size = 0;
    INVALID(pyl_branch_set_grammar(store, b, &grammar));
    IS(0, describe(store, b).has_grammar);
    OK(pyl_branch_set_grammar(store, b, NULL));
    IS(PYL_E_DIVERGED, pyl_branch_fast_forward(store, b, b));
    IS(PYL_E_STALE, pyl_branch_fast_forward(store, b, 0));
    OK(pyl_branch_legal_n(store, b, &one_token, 1, &one_byte));
    IS(1, one_byte);
    OK(pyl_branch_legal_n(store, b, NULL, 0, NULL));
    OK(pyl_branch_merge_logits(store, b, NULL, 0, 1.0f));
    OK(pyl_branch_set_bias(store, b, PYL_STEER, NULL, NULL, 0));
    OK(pyl_branch_logits_at(store, b, NULL, 0, NULL));
    n = 77;
    OK(pyl_branch_priors(store, b, NULL, NULL, 0, &n, NULL));
    IS(0, n);
    OK(pyl_score_n(store, b, NULL, NULL, 0, NULL, 0, NULL));
    OK(pyl_branch_set_metrics(store, b, 0));
    const pyl_pressure after = pressure_of(store);
    CHECK(before.cells_used == after.cells_used && before.leases_used == after.leases_used && before.n_dispatches == after.n_dispatches && before.n_tokens_sampled == after.n_tokens_sampled);
    IS(0, describe(store, b).n_sampled);

    /* Nothing of nothing is fine. */
    OK(pyl_prefill_n(store, NULL, 0, 0, NULL));
    OK(pyl_sample_n(store, NULL, 0, NULL));
    OK(pyl_commit_n(store, NULL, NULL, 0));
    OK(pyl_tick_n(store, &tick, NULL, 0, NULL));
    OK(pyl_store_free(store));

    /* No store, a store that never was, and one that is gone: the same answer from everything that takes one. */
    pyl_store * const drained = open_store(model, 64);
    const pyl_branch of_drained = new_branch(drained);
    OK(pyl_store_drain(drained));
    OK(pyl_store_drain(drained));
    pyl_store * const never[] = {NULL, store, (pyl_store *)(uintptr_t)1, (pyl_store *)(uintptr_t)0x1000, (pyl_store *)(uintptr_t)0x7fffffff, (pyl_store *)UINTPTR_MAX, (pyl_store *)(void *)&p, drained};
    for (size_t i = 0; i < COUNT(never); i++) {
        pyl_store * const bad = never[i];
        b = bad == drained ? of_drained : b;
        run.branch = lane.branch = b;
        CLOSED(pyl_store_cancel(bad));
        CLOSED(pyl_store_pressure(bad, &p));
        IS(0, pyl_store_epoch(bad));
        CLOSED(pyl_branch_set_sampling(bad, b, &s));
        CLOSED(pyl_branch_get_sampling(bad, b, &s));
        CLOSED(set_gbnf(bad, b, NULL, 0, NULL));
        CLOSED(pyl_branch_create(bad, &out, 0, NULL, NULL));
        CLOSED(pyl_branch_fork_n(bad, b, &out, 1, NULL, 0));
        CLOSED(pyl_branch_prune_n(bad, &b, 1));
        CLOSED(pyl_branch_prune_subtree(bad, b));
        CLOSED(pyl_branch_retain_only(bad, b));
        CLOSED(pyl_branch_describe(bad, b, &info));
        CLOSED(pyl_branch_list(bad, 0, &out, 1, &n));
        CLOSED(pyl_prefill_n(bad, &run, 1, 0, NULL));
        CLOSED(pyl_sample_n(bad, &b, 1, &token));
        CLOSED(pyl_commit_n(bad, &b, &token, 1));
        CLOSED(pyl_tick_n(bad, &tick, &lane, 1, &token));
        CLOSED(pyl_branch_logits(bad, b, &view));
        distribution.struct_size = sizeof distribution;
        CLOSED(pyl_branch_distribution(bad, b, &distribution));
        CLOSED(pyl_branch_set_logits(bad, b, NULL, 0));
        CLOSED(pyl_branch_merge_logits(bad, b, NULL, 0, 1.0f));
        CLOSED(pyl_branch_legal_n(bad, b, NULL, 0, NULL));
        CLOSED(pyl_branch_set_bias(bad, b, PYL_BIAS, NULL, NULL, 0));
        CLOSED(set_chat(bad, b, "{}", 2));
        CLOSED(pyl_branch_fast_forward(bad, b, b));
        metrics.struct_size = sizeof metrics;
        CLOSED(pyl_branch_save(bad, b, 0, &text));
        CLOSED(pyl_branch_load(bad, &out, bytes, 4));
        CLOSED(pyl_branch_set_metrics(bad, b, 0));
        CLOSED(pyl_branch_get_metrics(bad, b, &metrics));
        CLOSED(pyl_branch_logits_at(bad, b, NULL, 0, NULL));
        CLOSED(pyl_branch_priors(bad, b, NULL, NULL, 0, &n, NULL));
        CLOSED(pyl_score_n(bad, 0, NULL, NULL, 0, NULL, 0, NULL));
        CLOSED(pyl_branch_reseed_kv(bad, b, hello, 1, NULL));
        if (bad == drained) break; /* the handle itself still is one: it is freed below */
        CLOSED(pyl_store_drain(bad));
        CLOSED(pyl_store_free(bad));
    }
    OK(pyl_store_free(drained));
    CLOSED(pyl_store_free(drained));
}

static void test_handles_after_free(void) {
    pyl_model * model = open_model("stub:n_vocab=300");
    pyl_store * store = open_store(model, 64);
    OK(pyl_model_free(model)); /* the store keeps what it needs */
    IS(0, live().models);
    IS(1, live().weights);
    pyl_model * const never[] = {NULL, model, (pyl_model *)(uintptr_t)1, (pyl_model *)(uintptr_t)0x1000, (pyl_model *)UINTPTR_MAX, (pyl_model *)(void *)&store};
    for (size_t i = 0; i < COUNT(never); i++) {
        pyl_model_info info;
        info.struct_size = sizeof info;
        pyl_text * text = NULL;
        pyl_store * other = NULL;
        int32_t token = 'a';
        uint32_t flags;
        size_t n;
        CLOSED(pyl_model_describe(never[i], &info));
        CLOSED(pyl_model_metadata(never[i], &text));
        CLOSED(pyl_tokenize(never[i], "a", 1, 0, &token, 1, &n));
        CLOSED(pyl_detokenize(never[i], &token, 1, 0, &text));
        CLOSED(pyl_token_flags(never[i], &token, 1, &flags));
        CLOSED(pyl_chat_render(never[i], "{}", 2, &text));
        int32_t is_complete;
        CLOSED(pyl_grammar_match(never[i], "root ::= \"a\"", 12, NULL, "a", 1, &n, &is_complete));
        CLOSED(pyl_store_open(&other, never[i], NULL));
        CLOSED(pyl_model_free(never[i]));
    }
    const pyl_branch b = new_branch(store);
    pyl_run run = run_of(b, hello, 5);
    OK(pyl_prefill_n(store, &run, 1, 0, NULL));
    /* Handles are not reused: a store opened now is another one. */
    model = open_model("stub:n_vocab=300");
    pyl_store * const second = open_store(model, 64);
    CHECK(second != store);
    OK(pyl_store_free(store));
    CLOSED(pyl_store_free(store));
    pyl_store * const third = open_store(model, 64);
    CHECK(third != store && third != second);
    OK(pyl_model_free(model));
    CLOSED(pyl_model_free(model));
    /* Nor is one kind taken for another. */
    pyl_pressure p;
    p.struct_size = sizeof p;
    model = open_model("stub:n_vocab=300");
    CLOSED(pyl_store_pressure((const pyl_store *)(const void *)model, &p));
    CLOSED(pyl_store_free((pyl_store *)(void *)model));
    CLOSED(pyl_model_free((pyl_model *)(void *)third));
    OK(pyl_model_free(model));
    OK(pyl_store_free(third));
    OK(pyl_store_free(second));
    check_nothing_alive(__LINE__);
}

/* Out-structs at every smaller size: filled in that far and not a byte further. */
typedef int32_t (*fill)(const void * context, void * out);
static const pyl_model * the_model;
static pyl_store * the_store;
static pyl_branch the_branch;
static int32_t fill_live(const void * c, void * out) { return (void)c, pyl_live_objects((pyl_live *)out); }
static int32_t fill_info(const void * c, void * out) { return (void)c, pyl_model_describe(the_model, (pyl_model_info *)out); }
static int32_t fill_pressure(const void * c, void * out) { return (void)c, pyl_store_pressure(the_store, (pyl_pressure *)out); }
static int32_t fill_sampling(const void * c, void * out) { return (void)c, pyl_branch_get_sampling(the_store, the_branch, (pyl_sampling *)out); }
static int32_t fill_branch(const void * c, void * out) { return (void)c, pyl_branch_describe(the_store, the_branch, (pyl_branch_info *)out); }
static pyl_embedder * the_embedder;
static int32_t fill_metrics(const void * c, void * out) { return (void)c, pyl_branch_get_metrics(the_store, the_branch, (pyl_metrics *)out); }
static int32_t fill_distribution(const void * c, void * out) { return (void)c, pyl_branch_distribution(the_store, the_branch, (pyl_distribution *)out); }
static int32_t fill_embedder(const void * c, void * out) { return (void)c, pyl_embedder_describe(the_embedder, (pyl_embedder_info *)out); }
static pyl_projector * the_projector;
static pyl_prompt * the_prompt;
static int32_t fill_projector(const void * c, void * out) { return (void)c, pyl_projector_describe(the_projector, (pyl_projector_info *)out); }
static int32_t fill_quote(const void * c, void * out) { return (void)c, pyl_prompt_quote(the_prompt, (pyl_quote *)out); }
static int32_t fill_logits(const void * c, void * out) { return (void)c, pyl_branch_logits(the_store, the_branch, (pyl_logits_view *)out); }

/* hole: where the four bytes of padding lie that a struct has before a field of 8 bytes, 0 for none. What is in them is the compiler's affair. */
static void try_sizes_but(fill call, uint32_t full, uint32_t hole, int line) {
    /* Memory of exactly the size that was promised, so that a sanitised build sees one byte too many. */
    unsigned char * const whole = (unsigned char *)malloc(full);
    memset(whole, 0, full);
    memcpy(whole, &full, sizeof full);
    same(call(NULL, whole), PYL_OK, line, "the full struct is filled in");
    for (uint32_t size = 4; size < full; size += 4) {
        unsigned char * const part = (unsigned char *)malloc(size);
        memset(part, 0xAB, size);
        memcpy(part, &size, sizeof size);
        same(call(NULL, part), PYL_OK, line, "a smaller struct is filled in");
        if (hole > 0 && size > hole) memcpy(part + hole, whole + hole, 4);
        that(memcmp(part + 4, whole + 4, size - 4) == 0 && memcmp(part, &size, 4) == 0, line, "with the same values as far as it goes");
        free(part);
        unsigned char big[256];
        memset(big, 0xAB, sizeof big);
        memcpy(big, &size, sizeof size);
        call(NULL, big);
        for (size_t i = size; i < sizeof big; i++) {
            if (big[i] != 0xAB && that(0, line, "nothing is written beyond struct_size")) break;
        }
    }
    const uint32_t wrong[] = {0, 1, 3, full + 1, full + 4, UINT32_MAX};
    for (size_t i = 0; i < COUNT(wrong); i++) {
        unsigned char big[256];
        memset(big, 0xAB, sizeof big);
        memcpy(big, &wrong[i], sizeof wrong[i]);
        same(call(NULL, big), PYL_E_INVALID, line, "a struct_size of nobody is refused");
        for (size_t k = 4; k < sizeof big; k++) that(big[k] == 0xAB, line, "and nothing is written");
    }
    free(whole);
}

static void try_sizes(fill call, uint32_t full, int line) { try_sizes_but(call, full, 0, line); }

static int holds(pyl_text * text, const char * words) {
    const int found = strstr(pyl_text_data(text), words) != NULL;
    if (!found) fprintf(stderr, "    not in: %s\n", pyl_text_data(text));
    pyl_text_free(text);
    return found;
}

/* What is only looked at: nothing is opened, and what opening would refuse is refused. */
static void test_dry_runs(const pyl_model * model) {
    pyl_text * text = NULL;
    pyl_store_params sp;
    pyl_store_params_init(&sp, sizeof sp);
    IS(0, sp.n_ubatch + sp.n_rs_seq + sp.n_outputs);
    IS(3, sp.kv_unified + sp.offload_kqv + sp.op_offload);
    sp.n_ctx = 64, sp.n_batch = 32, sp.n_ubatch = 16;
    const pyl_live before = live();
    OK(pyl_dry_run(&text, "stub:n_vocab=300", 16, NULL, &sp));
    CHECK(holds(text, "\"n_ctx\":64,\"n_ctx_seq\":64,\"n_batch\":32,\"n_ubatch\":16,\"n_seq_max\":8,"));
    OK(pyl_dry_run(&text, "stub:n_vocab=300", 16, NULL, NULL));
    CHECK(holds(text, "\"refusal\":null"));
    sp.kv_unified = 0;
    OK(pyl_dry_run(&text, "stub:n_vocab=300", 16, NULL, &sp));
    CHECK(holds(text, "\"refusal\":\"kv_unified"));
    pyl_store * store = NULL;
    IS(PYL_E_UNSUPPORTED, pyl_store_open(&store, model, &sp));
    sp.kv_unified = 1;
    pyl_text * const untouched = (pyl_text *)&sp;
    text = untouched;
    INVALID(pyl_dry_run(NULL, "stub:", 5, NULL, &sp));
    INVALID(pyl_dry_run(&text, NULL, 5, NULL, &sp));
    INVALID(pyl_dry_run(&text, "stub:", 0, NULL, &sp));
    INVALID(pyl_dry_run(&text, "st\0ub", 5, NULL, &sp));
    IS(PYL_E_FORMAT, pyl_dry_run(&text, "stub:n_vocab=1", 14, NULL, &sp));
    pyl_model_params mp;
    pyl_model_params_init(&mp, sizeof mp);
    mp.vocab_only = 1;
    IS(PYL_E_UNSUPPORTED, pyl_dry_run(&text, "stub:", 5, &mp, &sp));
    const struct {
        uint32_t n_ubatch, n_outputs, n_rs_seq;
    } bad[] = {{7, 0, 0}, {33, 0, 0}, {0, 7, 0}, {0, 33, 0}, {0, 0, 65}, {UINT32_MAX, 0, 0}, {0, UINT32_MAX, 0}, {0, 0, UINT32_MAX}};
    for (size_t i = 0; i < COUNT(bad); i++) {
        sp.n_ubatch = bad[i].n_ubatch, sp.n_outputs = bad[i].n_outputs, sp.n_rs_seq = bad[i].n_rs_seq;
        INVALID(pyl_dry_run(&text, "stub:", 5, NULL, &sp));
        INVALID(pyl_store_open(&store, model, &sp));
    }
    sp.n_ubatch = 16, sp.n_outputs = 9, sp.n_rs_seq = 0;
    INVALID(pyl_projector_dry_run(NULL, "stub:", 5, NULL, 0, 0, 1));
    INVALID(pyl_projector_dry_run(&text, NULL, 5, NULL, 0, 0, 1));
    IS(PYL_E_PROJECTOR, pyl_projector_dry_run(&text, "stub:x", 6, NULL, 0, 0, 1));
    CHECK(text == untouched && store == NULL);
    OK(pyl_projector_dry_run(&text, "stub:", 5, NULL, 0, 0, 1));
    CHECK(holds(text, "\"encoders\":[]"));
    OK(pyl_store_open(&store, model, &sp));
    IS(16, pressure_of(store).n_ubatch);
    INVALID(pyl_store_memory(store, NULL));
    OK(pyl_store_memory(store, &text));
    CHECK(holds(text, "\"n_ubatch\":16,\"n_seq_max\":8,\"n_rs_seq\":0,\"n_outputs\":9,"));
    OK(pyl_store_drain(store));
    CLOSED(pyl_store_memory(store, &text));
    OK(pyl_store_free(store));
    CLOSED(pyl_store_memory(store, &text));
    const pyl_live after = live();
    CHECK(memcmp(&before, &after, sizeof before) == 0);
}

static void test_struct_sizes(const pyl_model * model) {
    the_model = model;
    the_store = open_store(model, 64);
    the_branch = new_branch(the_store);
    pyl_run run = run_of(the_branch, hello, 5);
    OK(pyl_prefill_n(the_store, &run, 1, 0, NULL));
    try_sizes(fill_live, sizeof(pyl_live), __LINE__);
    try_sizes(fill_info, sizeof(pyl_model_info), __LINE__);
    try_sizes(fill_pressure, sizeof(pyl_pressure), __LINE__);
    try_sizes_but(fill_sampling, sizeof(pyl_sampling), offsetof(pyl_sampling, seed_mode) + 4, __LINE__);
    try_sizes_but(fill_branch, sizeof(pyl_branch_info), offsetof(pyl_branch_info, has_grammar) + 4, __LINE__);
    try_sizes(fill_logits, sizeof(pyl_logits_view), __LINE__);
    try_sizes(fill_distribution, sizeof(pyl_distribution), __LINE__);
    OK(pyl_branch_set_metrics(the_store, the_branch, PYL_METRICS_MODEL | PYL_METRICS_SAMPLING));
    const int32_t one = 'x';
    OK(pyl_commit_n(the_store, &the_branch, &one, 1)); /* so that the fields are not all 0 */
    try_sizes(fill_metrics, sizeof(pyl_metrics), __LINE__);
    OK(pyl_embedder_open(&the_embedder, model, NULL));
    try_sizes(fill_embedder, sizeof(pyl_embedder_info), __LINE__);
    OK(pyl_embedder_free(the_embedder));
    pyl_part words = part_of(PYL_PART_TEXT);
    words.text = "hello", words.n = 5;
    OK(pyl_projector_open(&the_projector, model, "stub:", 5, NULL));
    OK(pyl_prompt_make(&the_prompt, model, the_projector, &words, 1, 0));
    try_sizes(fill_projector, sizeof(pyl_projector_info), __LINE__);
    try_sizes(fill_quote, sizeof(pyl_quote), __LINE__);
    OK(pyl_projector_free(the_projector));
    OK(pyl_prompt_free(the_prompt));

    /* In-structs: an older caller's is read as far as it goes, and what it does not know has its default. */
    pyl_sampling defaults;
    pyl_sampling_init(&defaults, sizeof defaults);
    for (uint32_t size = 4; size <= sizeof defaults; size += 4) {
        pyl_sampling * const part = (pyl_sampling *)malloc(size);
        memcpy(part, &defaults, size);
        part->struct_size = size;
        if (size >= offsetof(pyl_sampling, top_k)) part->temperature = 1.25f;
        if (CHECK(pyl_branch_set_sampling(the_store, the_branch, part) == PYL_OK)) {
            pyl_sampling got;
            got.struct_size = sizeof got;
            OK(pyl_branch_get_sampling(the_store, the_branch, &got));
            CHECK(got.temperature == (size >= offsetof(pyl_sampling, top_k) ? 1.25f : defaults.temperature));
            CHECK(memcmp(&got.top_k, &defaults.top_k, offsetof(pyl_sampling, seed_mode) - offsetof(pyl_sampling, top_k)) == 0);
        } else {
            fprintf(stderr, "    struct_size %u: %s\n", (unsigned)size, pyl_error_last()->message);
        }
        pyl_branch other = 0;
        if (CHECK(pyl_branch_create(the_store, &other, 0, part, NULL) == PYL_OK)) OK(pyl_branch_prune_n(the_store, &other, 1));
        free(part);
    }
    pyl_store_params sp;
    pyl_store_params_init(&sp, sizeof sp);
    sp.n_ctx = 64, sp.deterministic = 1;
    for (uint32_t size = 8; size <= sizeof sp; size += 4) {
        pyl_store_params * const part = (pyl_store_params *)malloc(size);
        memcpy(part, &sp, size);
        part->struct_size = size;
        pyl_store * store = NULL;
        if (CHECK(pyl_store_open(&store, model, part) == PYL_OK)) {
            IS(1, pressure_of(store).swa_full); /* what a caller does not know of has its default */
            IS(size > offsetof(pyl_store_params, deterministic), pressure_of(store).deterministic);
            IS(64, pressure_of(store).n_ctx);
            IS(8, pressure_of(store).leases_remaining);
            OK(pyl_store_free(store));
        }
        free(part);
    }
    pyl_model_params mp;
    pyl_model_params_init(&mp, sizeof mp);
    for (uint32_t size = 4; size <= sizeof mp; size += 4) {
        pyl_model_params * const part = (pyl_model_params *)malloc(size);
        memcpy(part, &mp, size);
        part->struct_size = size;
        pyl_model *first = NULL, *second = NULL;
        OK(pyl_model_open(&first, "stub:n_vocab=280", 16, part));
        OK(pyl_model_open(&second, "stub:n_vocab=280", 16, NULL));
        IS(2, live().weights); /* the same params, so the same weights, next to those of this test */
        OK(pyl_model_free(first));
        OK(pyl_model_free(second));
        free(part);
    }
    pyl_embedder_params ep;
    pyl_embedder_params_init(&ep, sizeof ep);
    ep.n_ctx = 77, ep.pooling = PYL_POOLING_LAST;
    for (uint32_t size = 4; size <= sizeof ep; size += 4) {
        pyl_embedder_params * const part = (pyl_embedder_params *)malloc(size);
        memcpy(part, &ep, size);
        part->struct_size = size;
        pyl_embedder * embedder = NULL;
        if (CHECK(pyl_embedder_open(&embedder, model, part) == PYL_OK)) {
            pyl_embedder_info info;
            info.struct_size = sizeof info;
            OK(pyl_embedder_describe(embedder, &info));
            IS(size > offsetof(pyl_embedder_params, n_ctx) ? 77 : 512, info.n_ctx);
            IS(size > offsetof(pyl_embedder_params, pooling) ? PYL_POOLING_LAST : PYL_POOLING_MEAN, info.pooling);
            OK(pyl_embedder_free(embedder));
        }
        free(part);
    }
    const uint32_t wrong[] = {0, 1, 3, sizeof(pyl_store_params) + 4, UINT32_MAX}; /* no struct of these is larger */
    for (size_t i = 0; i < COUNT(wrong); i++) {
        pyl_branch b = 0;
        pyl_store * store = NULL;
        pyl_model * other = NULL;
        defaults.struct_size = wrong[i], sp.struct_size = wrong[i], mp.struct_size = wrong[i], ep.struct_size = wrong[i];
        pyl_embedder * embedder = NULL;
        INVALID(pyl_embedder_open(&embedder, model, &ep));
        INVALID(pyl_branch_create(the_store, &b, 0, &defaults, NULL));
        INVALID(pyl_branch_set_sampling(the_store, the_branch, &defaults));
        INVALID(pyl_store_open(&store, model, &sp));
        INVALID(pyl_model_open(&other, "stub:", 5, &mp));
        int32_t token = 0;
        run = run_of(the_branch, hello, 1);
        pyl_lane lane = lane_of(the_branch);
        pyl_tick tick = tick_of(1);
        run.struct_size = wrong[i];
        INVALID(pyl_prefill_n(the_store, &run, 1, 0, NULL));
        lane.struct_size = wrong[i];
        INVALID(pyl_tick_n(the_store, &tick, &lane, 1, &token));
        lane.struct_size = sizeof lane, tick.struct_size = wrong[i];
        INVALID(pyl_tick_n(the_store, &tick, &lane, 1, &token));
    }
    IS(6, describe(the_store, the_branch).cells_own);
    OK(pyl_store_free(the_store));
}

static void test_errors(const pyl_model * model) {
    pyl_store * store = open_store(model, 8);
    const pyl_branch a = new_branch(store), b = new_branch(store);
    const pyl_error * const e = pyl_error_last();
    int32_t tokens[10] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};

    pyl_run runs[2] = {run_of(a, tokens, 5), run_of(b, tokens, 4)};
    IS(PYL_E_CONTEXT, pyl_prefill_n(store, runs, 2, 0, NULL));
    CHECK(pyl_error_last() == e); /* one per thread, always in the same place */
    IS(sizeof *e, e->struct_size);
    IS(PYL_E_CONTEXT, e->code);
    IS(PYL_STATE_UNCHANGED, e->state);
    IS(0, e->engine_rc);
    IS(0, e->partial);
    IS(-1, e->index);
    IS(9, e->need);
    IS(8, e->have);
    CHECK(strstr(e->message, "9") && strstr(e->message, "8"));

    OK(pyl_prefill_n(store, runs, 1, 0, NULL));
    IS(PYL_E_CONTEXT, e->code); /* a success leaves it in place */

    tokens[1] = 300;
    pyl_branch both[2] = {a, b};
    INVALID(pyl_commit_n(store, both, tokens, 2));
    IS(PYL_E_INVALID, e->code);
    IS(1, e->index);
    IS(-1, e->need); /* nothing is left over from the one before */
    IS(-1, e->have);
    CHECK(strstr(e->message, "300") != NULL);

    both[1] = b + (7ull << 32);
    IS(PYL_E_STALE, pyl_commit_n(store, both, tokens, 2));
    IS(1, e->index);
    pyl_branch many[20];
    IS(PYL_E_NO_LEASE, pyl_branch_fork_n(store, a, many, 20, NULL, 0));
    IS(20, e->need);
    IS(6, e->have);
    CLOSED(pyl_store_free(NULL));
    IS(PYL_E_CLOSED, e->code);
    IS(-1, e->index);
    IS(0, pyl_store_epoch(NULL));
    OK(pyl_store_free(store));

    /* What the engine said, and what became of the state. */
    static const int rcs[] = {1, -1, 2, -2, -3};
    for (size_t i = 0; i < COUNT(rcs); i++) {
        char path[64];
        snprintf(path, sizeof path, "stub:fail_at=2;fail_rc=%d;fail_rows=1", rcs[i]);
        pyl_model * failing = open_model(path);
        pyl_store * s = open_store(failing, 64);
        const pyl_branch x = new_branch(s);
        const int intact = rcs[i] == 1 || rcs[i] == -1;
        pyl_run run = run_of(x, hello, 5);
        OK(pyl_prefill_n(s, &run, 1, 0, NULL));
        int32_t token = 'x';
        IS(rcs[i] == 1 ? PYL_E_NO_CELLS : rcs[i] == -1 ? PYL_E_INTERNAL : PYL_E_DECODE, pyl_commit_n(s, &x, &token, 1));
        IS(rcs[i], e->engine_rc);
        IS(intact ? PYL_STATE_UNCHANGED : PYL_STATE_POISONED, e->state);
        IS(!intact, describe(s, x).is_poisoned);
        pyl_sampling sampling;
        pyl_sampling_init(&sampling, sizeof sampling);
        IS(intact ? PYL_OK : PYL_E_POISONED, pyl_commit_n(s, &x, &token, 1));
        IS(intact ? PYL_OK : PYL_E_POISONED, pyl_branch_set_sampling(s, x, &sampling));
        pyl_logits_view view;
        view.struct_size = sizeof view;
        IS(intact ? PYL_OK : PYL_E_POISONED, pyl_branch_logits(s, x, &view));
        OK(pyl_branch_get_sampling(s, x, &sampling)); /* looking is allowed */
        OK(pyl_branch_prune_n(s, &x, 1));
        IS(0, pressure_of(s).cells_used);
        OK(pyl_model_free(failing));
        OK(pyl_store_free(s));
    }
}

/* Saved and loaded: texts are the caller's to free, and what they hold is told without a store. */
static void test_saved(const pyl_model * model) {
    pyl_store * store = open_store(model, 64);
    const pyl_branch b = new_branch(store);
    pyl_run run = run_of(b, hello, 5);
    OK(pyl_prefill_n(store, &run, 1, 0, NULL));
    pyl_text *text = NULL, *bare = NULL, *told = NULL;
    OK(pyl_branch_save(store, b, PYL_SAVE_LOGITS, &text));
    OK(pyl_branch_save(store, b, 0, &bare));
    IS(2, live().texts);
    IS(300 * sizeof(float), pyl_text_size(text) - pyl_text_size(bare));
    OK(pyl_saved_describe((const uint8_t *)pyl_text_data(text), pyl_text_size(text), &told));
    CHECK(contains(told, "\"format\":2") && contains(told, "\"position\":5") && contains(told, "\"cells\":5") && contains(told, "\"has_logits\":true") && contains(told, "\"has_grammar\":false"));
    CHECK(contains(told, "\"engine\":\"stub 1\"") && contains(told, "\"n_vocab\":300") && contains(told, "\"type_k\":\"f16\""));
    char size[64];
    snprintf(size, sizeof size, "\"bytes\":%u,", (unsigned)pyl_text_size(text));
    CHECK(contains(told, size));
    pyl_text_free(told);
    pyl_branch loaded = 0;
    OK(pyl_branch_load(store, &loaded, (const uint8_t *)pyl_text_data(text), pyl_text_size(text)));
    CHECK(loaded != 0 && loaded != b);
    const pyl_branch_info info = describe(store, loaded);
    CHECK(info.position == 5 && info.cells_own == 5 && info.cells_inherited == 0 && info.parent == 0 && info.has_logits && info.last_token == -1);
    pyl_text_free(text); /* copied: the branch does not need it any more */
    float x[2], y[2];
    const int32_t ids[2] = {7, 299};
    OK(pyl_branch_logits_at(store, b, ids, 2, x));
    OK(pyl_branch_logits_at(store, loaded, ids, 2, y));
    CHECK(x[0] == y[0] && x[1] == y[1]);
    pyl_branch other = 4711;
    IS(PYL_E_FORMAT, pyl_branch_load(store, &other, (const uint8_t *)pyl_text_data(bare), pyl_text_size(bare) - 1));
    IS((long long)pyl_text_size(bare), pyl_error_last()->need);
    IS((long long)pyl_text_size(bare) - 1, pyl_error_last()->have);
    IS(4711, other);
    pyl_model * another = open_model("stub:n_vocab=301");
    pyl_store * elsewhere = open_store(another, 64);
    IS(PYL_E_UNSUPPORTED, pyl_branch_load(elsewhere, &other, (const uint8_t *)pyl_text_data(bare), pyl_text_size(bare)));
    CHECK(strstr(pyl_error_last()->message, "stub of 300") && strstr(pyl_error_last()->message, "stub of 301"));
    OK(pyl_store_free(elsewhere));
    OK(pyl_model_free(another));
    pyl_text_free(bare);
    IS(0, live().texts);
    OK(pyl_store_free(store));
}

static void test_measures(const pyl_model * model) {
    pyl_store * store = open_store(model, 64);
    const pyl_branch b = new_branch(store);
    pyl_run run = run_of(b, hello, 5);
    OK(pyl_prefill_n(store, &run, 1, 0, NULL));
    /* Priors: as many as asked for, and how many there are. */
    int32_t tokens[4] = {-7, -7, -7, -7};
    float log_probs[4];
    size_t n = 77, n_legal = 77;
    OK(pyl_branch_priors(store, b, tokens, log_probs, 3, &n, &n_legal));
    CHECK(n == 3 && n_legal == 300 && tokens[3] == -7 && tokens[0] >= 0 && log_probs[0] >= log_probs[1] && log_probs[1] >= log_probs[2] && log_probs[0] < 0);
    OK(pyl_branch_priors(store, b, tokens, log_probs, 1, &n, NULL));
    pyl_distribution d;
    d.struct_size = sizeof d;
    OK(pyl_branch_distribution(store, b, &d));
    IS(d.most_likely, tokens[0]);
    /* Metrics: zero, then one token's. */
    pyl_metrics m;
    memset(&m, 0xAB, sizeof m);
    m.struct_size = sizeof m;
    OK(pyl_branch_get_metrics(store, b, &m));
    CHECK(m.levels == 0 && m.n_tokens == 0 && m.model_surprisal == 0);
    OK(pyl_branch_set_metrics(store, b, PYL_METRICS_MODEL));
    OK(pyl_commit_n(store, &b, tokens, 1));
    OK(pyl_branch_get_metrics(store, b, &m));
    CHECK(m.levels == PYL_METRICS_MODEL && m.n_tokens == 1 && fabs(m.model_surprisal + log_probs[0]) < 1e-5 && fabs(m.last_model_entropy - d.entropy) < 1e-9);
    /* Scores: rows in order, whole or in part, and nothing left. */
    const uint32_t lengths[3] = {1, 2, 2};
    float some[3], whole[3 * 300];
    const int32_t id = 9;
    const pyl_pressure before = pressure_of(store);
    OK(pyl_score_n(store, b, hello, lengths, 3, &id, 1, some));
    OK(pyl_score_n(store, b, hello, lengths, 3, NULL, 0, whole));
    for (int i = 0; i < 3; i++) CHECK(some[i] == whole[300 * i + 9]);
    CHECK(before.cells_used == pressure_of(store).cells_used && before.leases_used == pressure_of(store).leases_used);
    const uint32_t many[1] = {5};
    INVALID(pyl_score_n(store, 0, hello, many, 1, &tokens[3], 1, some)); /* -7 */
    IS(0, pyl_error_last()->index);
    /* Reading anew: how much is in, also when nothing is. */
    uint32_t landed = 77;
    OK(pyl_branch_reseed_kv(store, b, hello, 3, &landed));
    IS(3, landed);
    IS(3, describe(store, b).position);
    landed = 77;
    INVALID(pyl_branch_reseed_kv(store, b, tokens + 3, 1, &landed));
    IS(0, landed);
    OK(pyl_branch_reseed_kv(store, b, hello, 5, NULL));
    OK(pyl_store_free(store));
}

static void test_embedder(const pyl_model * model) {
    pyl_embedder_params p;
    pyl_embedder_params_init(NULL, sizeof(pyl_embedder_params));
    pyl_embedder_params_init(&p, sizeof p);
    CHECK(p.struct_size == sizeof p && p.n_ctx == 0 && p.n_threads == 0 && p.pooling == PYL_POOLING_MODEL && p.flash_attn == PYL_FLASH_ATTN_AUTO);
    pyl_embedder * e = NULL;
    INVALID(pyl_embedder_open(NULL, model, &p));
    CLOSED(pyl_embedder_open(&e, NULL, &p));
#define NO_EMBEDDER(...)                              \
    do {                                              \
        pyl_embedder_params_init(&p, sizeof p);                 \
        __VA_ARGS__;                                  \
        INVALID(pyl_embedder_open(&e, model, &p));    \
    } while (0)
    NO_EMBEDDER(p.pooling = -1);
    NO_EMBEDDER(p.pooling = 4);
    NO_EMBEDDER(p.flash_attn = 3);
    NO_EMBEDDER(p.flash_attn = -1);
    NO_EMBEDDER(p.n_threads = 513);
    NO_EMBEDDER(p.n_ctx = 4097); /* beyond what the model was trained with */
    CHECK(pyl_error_last()->need == 4097 && pyl_error_last()->have == 4096);
    NO_EMBEDDER(p.n_ctx = UINT32_MAX);
    CHECK(e == NULL);
    IS(0, live().embedders + live().contexts);
    pyl_model * bare = open_model("stub:n_ctx_train=0");
    INVALID(pyl_embedder_open(&e, bare, NULL)); /* there is no context to take */
    OK(pyl_model_free(bare));
    pyl_model_params mp;
    pyl_model_params_init(&mp, sizeof mp);
    mp.vocab_only = 1;
    OK(pyl_model_open(&bare, "stub:", 5, &mp));
    IS(PYL_E_UNSUPPORTED, pyl_embedder_open(&e, bare, NULL));
    OK(pyl_model_free(bare));

    OK(pyl_embedder_open(&e, model, NULL));
    pyl_embedder_info info;
    info.struct_size = sizeof info;
    OK(pyl_embedder_describe(e, &info));
    CHECK(info.n_embd == 8 && info.n_ctx == 512 && info.pooling == PYL_POOLING_MEAN && info.n_dispatches == 0 && info.n_texts == 0 && info.n_tokens == 0);
    IS(1, live().embedders);
    IS(1, live().contexts);
    const uint32_t lengths[2] = {2, 3};
    float out[16];
    out[0] = out[15] = -7;
    INVALID(pyl_embed_n(e, NULL, lengths, 2, 1, out));
    INVALID(pyl_embed_n(e, hello, NULL, 2, 1, out));
    INVALID(pyl_embed_n(e, hello, lengths, 2, 1, NULL));
    const uint32_t empty[2] = {2, 0};
    INVALID(pyl_embed_n(e, hello, empty, 2, 1, out));
    IS(1, pyl_error_last()->index);
    CHECK(out[0] == -7 && out[15] == -7);
    OK(pyl_embed_n(e, NULL, NULL, 0, 1, NULL));
    OK(pyl_embed_n(e, hello, lengths, 2, 1, out));
    CHECK(out[0] != -7 && out[15] != -7 && fabsf(out[0]) <= 1);
    OK(pyl_embedder_describe(e, &info));
    CHECK(info.n_dispatches == 1 && info.n_texts == 2 && info.n_tokens == 5);
    INVALID(pyl_embedder_describe(e, NULL));

    /* What is freed, what never was one, and what is something else. */
    pyl_store * store = open_store(model, 64);
    OK(pyl_embedder_free(e));
    pyl_embedder * const never[] = {NULL, e, (pyl_embedder *)(uintptr_t)1, (pyl_embedder *)UINTPTR_MAX, (pyl_embedder *)(void *)store, (pyl_embedder *)(void *)&info};
    for (size_t i = 0; i < COUNT(never); i++) {
        CLOSED(pyl_embedder_describe(never[i], &info));
        CLOSED(pyl_embed_n(never[i], hello, lengths, 2, 1, out));
        CLOSED(pyl_embedder_free(never[i]));
    }
    OK(pyl_store_free(store));
    IS(0, live().embedders + live().contexts);
    /* It keeps the weights it needs. */
    pyl_model * own = open_model("stub:n_vocab=290");
    OK(pyl_embedder_open(&e, own, NULL));
    OK(pyl_model_free(own));
    OK(pyl_embed_n(e, hello, lengths, 2, 0, out));
    OK(pyl_embedder_free(e));
}

static pyl_store * busy_store;
static pyl_branch busy_branch;
static int32_t busy_result;

static void * decode_for_long(void * unused) {
    static int32_t tokens[5000];
    pyl_run run = run_of(busy_branch, tokens, COUNT(tokens));
    busy_result = pyl_prefill_n(busy_store, &run, 1, 0, NULL);
    return unused;
}

/* Projectors, parts and prompts. */
static void test_prompts(const pyl_model * model) {
    pyl_projector_params pp;
    pyl_projector_params_init(NULL, sizeof(pyl_projector_params));
    pyl_projector_params_init(&pp, sizeof pp);
    IS(sizeof pp, pp.struct_size);
    pyl_projector * projector = NULL;
    INVALID(pyl_projector_open(NULL, model, "stub:", 5, &pp));
    CLOSED(pyl_projector_open(&projector, NULL, "stub:", 5, &pp));
    INVALID(pyl_projector_open(&projector, model, NULL, 5, &pp));
    INVALID(pyl_projector_open(&projector, model, "stub:", 0, &pp));
    INVALID(pyl_projector_open(&projector, model, "st\0ub", 5, &pp));
    IS(PYL_E_PROJECTOR, pyl_projector_open(&projector, model, "stub", 4, &pp));
#define WRONG_PARAMS(field, value)                                  \
    pyl_projector_params_init(&pp, sizeof pp);                                 \
    pp.field = value;                                               \
    INVALID(pyl_projector_open(&projector, model, "stub:", 5, &pp))
    WRONG_PARAMS(struct_size, 0);
    WRONG_PARAMS(struct_size, 3);
    WRONG_PARAMS(n_threads, 513);
    WRONG_PARAMS(flash_attn, 7);
    WRONG_PARAMS(image_min_tokens, 65537);
    WRONG_PARAMS(image_max_tokens, UINT32_MAX);
    pp.image_min_tokens = 9, pp.image_max_tokens = 8;
    INVALID(pyl_projector_open(&projector, model, "stub:", 5, &pp));
    CHECK(projector == NULL);
    IS(0, live().projectors);
    OK(pyl_projector_open(&projector, model, "stub:", 5, NULL));
    IS(1, live().projectors);
    pyl_projector_info info;
    memset(&info, 0, sizeof info);
    INVALID(pyl_projector_describe(projector, NULL));
    INVALID(pyl_projector_describe(projector, &info)); /* struct_size not set */
    info.struct_size = sizeof info;
    OK(pyl_projector_describe(projector, &info));
    CHECK(info.has_vision == 1 && info.n_embd == 4 && info.n_encodes == 0);

    static const uint8_t rgb[8 * 8 * 3] = {1, 2, 3};
    static const float samples[200] = {0.5f};
    pyl_part parts[2] = {part_of(PYL_PART_TEXT), part_of(PYL_PART_IMAGE)};
    parts[0].text = "ab", parts[0].n = 2;
    parts[1].rgb = rgb, parts[1].width = parts[1].height = 8, parts[1].id = "name";
    pyl_prompt * prompt = NULL;
    INVALID(pyl_prompt_make(NULL, model, projector, parts, 2, 0));
    CLOSED(pyl_prompt_make(&prompt, NULL, projector, parts, 2, 0));
    INVALID(pyl_prompt_make(&prompt, model, projector, NULL, 2, 0));
    INVALID(pyl_prompt_make(&prompt, model, projector, parts, 2, PYL_TOKENIZE_PARSE_SPECIAL));
    IS(PYL_E_PROJECTOR, pyl_prompt_make(&prompt, model, NULL, parts, 2, 0));
    IS(1, pyl_error_last()->index);
    pyl_model * other = open_model("stub:n_vocab=301");
    IS(PYL_E_PROJECTOR, pyl_prompt_make(&prompt, other, projector, parts, 2, 0));
#define WRONG_PART(code, set)                                                       \
    do {                                                                            \
        pyl_part given[2] = {parts[0], parts[1]};                                   \
        pyl_part * const part = &given[1];                                          \
        set;                                                                        \
        IS(code, pyl_prompt_make(&prompt, model, projector, given, 2, 0));          \
        IS(1, pyl_error_last()->index);                                             \
    } while (0)
    WRONG_PART(PYL_E_INVALID, part->struct_size = 0);
    WRONG_PART(PYL_E_INVALID, part->struct_size--);
    WRONG_PART(PYL_E_INVALID, part->kind = 5);
    WRONG_PART(PYL_E_INVALID, part->kind = -1);
    WRONG_PART(PYL_E_INVALID, part->width = 0);
    WRONG_PART(PYL_E_INVALID, part->height = 0);
    WRONG_PART(PYL_E_INVALID, part->width = 65537);
    WRONG_PART(PYL_E_INVALID, (part->rgb = NULL, part->width = part->height = 65536));
    WRONG_PART(PYL_E_INVALID, (part->rgb = NULL, part->width = 32768, part->height = 65536));
    WRONG_PART(PYL_E_INVALID, (part->kind = PYL_PART_TEXT, part->n = 2));
    WRONG_PART(PYL_E_INVALID, (part->kind = PYL_PART_TEXT, part->flags = 8));
    WRONG_PART(PYL_E_FORMAT, (part->kind = PYL_PART_TEXT, part->text = "a\xff", part->n = 2));
    WRONG_PART(PYL_E_INVALID, (part->kind = PYL_PART_TOKENS, part->n = 1));
    static const int32_t beyond = 300;
    WRONG_PART(PYL_E_INVALID, (part->kind = PYL_PART_TOKENS, part->tokens = &beyond, part->n = 1));
    WRONG_PART(PYL_E_INVALID, part->kind = PYL_PART_AUDIO);
    WRONG_PART(PYL_E_INVALID, (part->kind = PYL_PART_AUDIO, part->samples = samples, part->n = SIZE_MAX));
    WRONG_PART(PYL_E_INVALID, (part->kind = PYL_PART_ROWS, part->n = 2, part->width = 4, part->height = 0, part->n_pos = 2));
    WRONG_PART(PYL_E_INVALID, (part->kind = PYL_PART_ROWS, part->samples = samples, part->n = 2, part->width = 0, part->height = 0, part->n_pos = 2));
    WRONG_PART(PYL_E_INVALID, (part->kind = PYL_PART_ROWS, part->samples = samples, part->n = 2, part->width = 5, part->height = 0, part->n_pos = 2));
    WRONG_PART(PYL_E_INVALID, (part->kind = PYL_PART_ROWS, part->samples = samples, part->n = 2, part->width = 4, part->height = 2, part->n_pos = 2));
    WRONG_PART(PYL_E_INVALID, (part->kind = PYL_PART_ROWS, part->samples = samples, part->n = 2, part->width = 4, part->height = 0, part->n_pos = 3));
    WRONG_PART(PYL_E_INVALID, (part->kind = PYL_PART_ROWS, part->samples = samples, part->tokens = hello, part->n = 2, part->width = 4, part->height = 1, part->n_pos = 2));
    CHECK(prompt == NULL);
    IS(0, live().prompts);
    OK(pyl_prompt_make(&prompt, model, projector, NULL, 0, 0));
    pyl_quote quote;
    memset(&quote, 0, sizeof quote);
    INVALID(pyl_prompt_quote(prompt, NULL));
    INVALID(pyl_prompt_quote(prompt, &quote));
    quote.struct_size = sizeof quote;
    OK(pyl_prompt_quote(prompt, &quote));
    CHECK(quote.n_segments == 0 && quote.n_cells == 0 && quote.is_decodable == 1);
    OK(pyl_prompt_free(prompt));

    OK(pyl_prompt_make(&prompt, model, projector, parts, 2, 0));
    OK(pyl_projector_free(projector)); /* what was laid out through it lives on */
    IS(1, live().prompts);
    OK(pyl_prompt_quote(prompt, &quote));
    CHECK(quote.n_segments == 2 && quote.n_cells == 3 && quote.n_pos == 3 && quote.n_media == 1);
    pyl_text * text = NULL;
    INVALID(pyl_prompt_segments(prompt, NULL));
    OK(pyl_prompt_segments(prompt, &text));
    CHECK(contains(text, "\"tokens\":[97,98]") && contains(text, "\"positions\":[0]"));
    pyl_text_free(text);

    pyl_store * store = open_store(model, 64);
    const pyl_branch b = new_branch(store);
    pyl_item item = item_of(b, prompt), before = item;
    INVALID(pyl_decode_prompts_n(store, NULL, 1));
    OK(pyl_decode_prompts_n(store, NULL, 0));
    CLOSED(pyl_decode_prompts_n(NULL, &item, 1));
    item.struct_size = before.struct_size = sizeof item - 1;
    INVALID(pyl_decode_prompts_n(store, &item, 1));
    item.struct_size = before.struct_size = sizeof item;
    item.prompt = before.prompt = NULL;
    CLOSED(pyl_decode_prompts_n(store, &item, 1));
    item.prompt = before.prompt = prompt;
    item.branch = before.branch = 0;
    IS(PYL_E_STALE, pyl_decode_prompts_n(store, &item, 1));
    CHECK(memcmp(&item, &before, sizeof item) == 0); /* refused as a whole: no output is touched */
    pyl_item twice[2] = {item_of(b, prompt), item_of(b, prompt)};
    INVALID(pyl_decode_prompts_n(store, twice, 2));
    IS(0, pressure_of(store).cells_used);
    item.branch = b;
    OK(pyl_decode_prompts_n(store, &item, 1));
    CHECK(item.code == PYL_OK && item.state == PYL_STATE_ADVANCED && item.engine_rc == 0 && item.message == NULL && item.n_segments_landed == 2 && item.n_cells_landed == 3);
    OK(pyl_store_free(store));
    CLOSED(pyl_decode_prompts_n(store, &item, 1));

    OK(pyl_prompt_free(prompt));
    pyl_prompt * const no_prompt[] = {NULL, prompt, (pyl_prompt *)(uintptr_t)1, (pyl_prompt *)UINTPTR_MAX, (pyl_prompt *)(void *)other, (pyl_prompt *)(void *)&info};
    for (size_t i = 0; i < COUNT(no_prompt); i++) {
        CLOSED(pyl_prompt_quote(no_prompt[i], &quote));
        CLOSED(pyl_prompt_segments(no_prompt[i], &text));
        CLOSED(pyl_prompt_free(no_prompt[i]));
    }
    pyl_projector * const no_projector[] = {projector, (pyl_projector *)(uintptr_t)1, (pyl_projector *)UINTPTR_MAX, (pyl_projector *)(void *)other, (pyl_projector *)(void *)&info, NULL};
    for (size_t i = 0; i < COUNT(no_projector); i++) {
        CLOSED(pyl_projector_describe(no_projector[i], &info));
        CLOSED(pyl_projector_free(no_projector[i]));
        if (no_projector[i]) CLOSED(pyl_prompt_make(&prompt, model, no_projector[i], parts, 2, 0));
    }
    OK(pyl_model_free(other));

    /* A picture that cannot be encoded: its item says so, the other one is in. */
    pyl_model * failing = open_model("stub:encode_fail_at=1");
    OK(pyl_projector_open(&projector, failing, "stub:", 5, NULL));
    OK(pyl_prompt_make(&prompt, failing, projector, parts, 2, 0));
    store = open_store(failing, 64);
    pyl_item pair[2] = {item_of(new_branch(store), prompt), item_of(new_branch(store), prompt)};
    IS(PYL_E_MEDIA, pyl_decode_prompts_n(store, pair, 2));
    IS(0, pyl_error_last()->index);
    IS(1, pyl_error_last()->partial);
    CHECK(pair[0].code == PYL_E_MEDIA && pair[0].state == PYL_STATE_ADVANCED && pair[0].n_segments_landed == 1 && pair[0].n_cells_landed == 2);
    CHECK(pair[0].message && contains(pair[0].message, "told to fail"));
    CHECK(pair[1].code == PYL_OK && pair[1].n_cells_landed == 3 && pair[1].message == NULL);
    IS(5, pressure_of(store).cells_used);
    pyl_text_free(pair[0].message);
    OK(pyl_model_free(failing));
    OK(pyl_projector_free(projector));
    OK(pyl_prompt_free(prompt));
    OK(pyl_store_free(store)); /* in any order */
    IS(0, live().texts + live().projectors + live().prompts);
}

/* While another thread is inside, every call on the store is refused, and changes nothing. */
static void test_busy(void) {
    pyl_model * slow = open_model("stub:spin_us=2000;n_ctx_train=100000");
    pyl_store_params p;
    pyl_store_params_init(&p, sizeof p);
    p.n_ctx = 5100, p.n_batch = 8, p.n_threads = 1;
    OK(pyl_store_open(&busy_store, slow, &p));
    const pyl_branch b = busy_branch = new_branch(busy_store);
    pthread_t thread;
    if (!CHECK(pthread_create(&thread, NULL, decode_for_long, NULL) == 0)) return;
    while (pressure_of(busy_store).n_dispatches == 0) {}
#define BUSY(call) IS(PYL_E_BUSY, call)
    pyl_text * text = NULL;
    pyl_branch out = 0;
    pyl_metrics m;
    m.struct_size = sizeof m;
    int32_t token = 5;
    float x = -7;
    size_t n = 77;
    uint32_t landed = 77;
    const uint32_t length = 1;
    const uint8_t bytes[4] = {0};
    BUSY(pyl_branch_save(busy_store, b, 0, &text));
    BUSY(pyl_branch_load(busy_store, &out, bytes, 4));
    BUSY(pyl_branch_set_metrics(busy_store, b, 1));
    BUSY(pyl_branch_get_metrics(busy_store, b, &m));
    BUSY(pyl_branch_logits_at(busy_store, b, &token, 1, &x));
    BUSY(pyl_branch_priors(busy_store, b, &token, &x, 1, &n, NULL));
    BUSY(pyl_score_n(busy_store, 0, &token, &length, 1, &token, 1, &x));
    BUSY(pyl_branch_reseed_kv(busy_store, b, &token, 1, &landed));
    IS(-1, pyl_error_last()->index);
    IS(PYL_STATE_UNCHANGED, pyl_error_last()->state);
    CHECK(text == NULL && out == 0 && x == -7 && token == 5 && n == 77 && landed == 77);
    OK(pyl_store_cancel(busy_store));
    CHECK(pthread_join(thread, NULL) == 0);
    IS(PYL_E_CANCELLED, busy_result);
    CHECK(describe(busy_store, b).position % 8 == 0);
    OK(pyl_branch_get_metrics(busy_store, b, &m));
    IS(0, m.levels);
    OK(pyl_store_free(busy_store));
    OK(pyl_model_free(slow));
}

int main(void) {
    IS(PYL_OK, pyl_error_last()->code); /* nothing has failed yet */
    IS(-1, pyl_error_last()->index);
    IS(0, strlen(pyl_error_last()->message));
    check_nothing_alive(__LINE__);
    test_library();
    test_log();
    test_model();
    pyl_model * model = open_model("stub:n_vocab=300");
    test_vocabulary(model);
    test_store_open(model);
    test_branches(model);
    test_null_in_store(model);
    test_struct_sizes(model);
    test_dry_runs(model);
    test_errors(model);
    test_saved(model);
    test_measures(model);
    test_embedder(model);
    test_prompts(model);
    test_busy();
    OK(pyl_model_free(model));
    test_handles_after_free();
    pyl_model_params_init(NULL, sizeof(pyl_model_params));
    check_nothing_alive(__LINE__);
    printf("test_abi: %d checks, %d failed\n", n_done, n_failed);
    return n_failed ? 1 : 0;
}
