// What llama.cpp does when it is used directly, and wrongly: the other half of every test in tests/aborts. Uses llama.h alone and
// nothing of ours, so that what dies or lies here is the engine, not the kernel.
//
//   raw_engine CASE MODEL.gguf
//
// A case that survives prints what it measured, a "name value" a line, and exits with 0. One that must die says just before where
// it will: "survived until CALL".
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "llama-ext.h"
#include "llama.h"

namespace {

using Tokens = std::vector<llama_token>;
using Row = std::vector<float>;

[[gnu::format(printf, 2, 3)]] void say(const char * name, const char * format, ...) {
    std::printf("%s ", name);
    va_list values;
    va_start(values, format);
    std::vprintf(format, values);
    va_end(values);
    std::printf("\n");
}

[[noreturn]] void fail(const char * what) {
    std::fprintf(stderr, "raw_engine: %s\n", what);
    std::exit(1);
}

llama_model * model;

Tokens some(int n, int salt = 0) {
    Tokens out;
    for (int i = 0; i < n; i++) out.push_back((7 + i * 31 + i * i % 13 + salt * 17) % 250);
    return out;
}

Tokens operator+(Tokens a, const Tokens & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

Tokens first(const Tokens & tokens, size_t n) { return {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(n)}; }

float apart(const Row & a, const Row & b) {
    if (a.empty() || a.size() != b.size()) return INFINITY;
    float most = 0;
    for (size_t i = 0; i < a.size(); i++) most = std::max(most, std::fabs(a[i] - b[i]));
    return most;
}

// The settings under which decoding is bit-exact with ggml's own attention too: flash attention, one thread, at most 63 rows computed at once.
llama_context_params settings() {
    llama_context_params p = llama_context_default_params();
    p.n_ctx = 512;
    p.n_batch = p.n_ubatch = 63;
    p.n_seq_max = 4;
    p.n_threads = p.n_threads_batch = 1;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    p.kv_unified = true;
    p.swa_full = true;
    return p;
}

struct Entry {
    llama_token token;
    llama_pos pos;
    llama_seq_id seq;
    bool output;
};

class Context {
public:
    explicit Context(const llama_context_params & params) : context_(llama_init_from_model(model, params), llama_free) {
        if (!context_) fail("no context");
    }
    llama_context * get() const { return context_.get(); }
    llama_memory_t memory() const { return llama_get_memory(context_.get()); }

    int32_t decode(std::vector<Entry> rows) const {
        std::vector<llama_token> token;
        std::vector<llama_pos> pos;
        std::vector<llama_seq_id *> seq;
        std::vector<int32_t> one(rows.size(), 1);
        std::vector<int8_t> output;
        for (Entry & row : rows) token.push_back(row.token), pos.push_back(row.pos), seq.push_back(&row.seq), output.push_back(row.output);
        return llama_decode(get(), {static_cast<int32_t>(rows.size()), token.data(), nullptr, pos.data(), one.data(), seq.data(), output.data()});
    }
    // In one call, with logits for the last.
    int32_t decode(llama_seq_id seq, llama_pos at, const Tokens & tokens) const {
        std::vector<Entry> rows;
        for (size_t i = 0; i < tokens.size(); i++) rows.push_back({tokens[i], at + static_cast<llama_pos>(i), seq, i + 1 == tokens.size()});
        return decode(std::move(rows));
    }
    // As many calls as it takes; they must all land.
    void read(llama_seq_id seq, llama_pos at, const Tokens & tokens) const {
        for (size_t i = 0; i < tokens.size(); i += 63) {
            const size_t n = std::min<size_t>(63, tokens.size() - i);
            if (decode(seq, at + static_cast<llama_pos>(i), Tokens(tokens.begin() + static_cast<std::ptrdiff_t>(i), tokens.begin() + static_cast<std::ptrdiff_t>(i + n))) != 0) fail("a text did not land");
        }
    }
    Row logits(int32_t row = -1) const {
        const float * data = llama_get_logits_ith(get(), row);
        return data ? Row(data, data + llama_vocab_n_tokens(llama_model_get_vocab(model))) : Row();
    }

private:
    std::unique_ptr<llama_context, void (*)(llama_context *)> context_;
};

// What the logits should be: this text alone, in a context of its own.
Row afresh(const Tokens & tokens) {
    llama_context_params p = settings();
    p.n_ctx = 1024;
    const Context context(p);
    context.read(0, 0, tokens);
    return context.logits();
}

void until(const char * what) { say("survived until", "%s", what); }

// ------------------------------------------------------------------------------------------------ what kills the process

void batch_over_n_batch() {
    llama_context_params p = settings();
    p.n_batch = p.n_ubatch = 8;
    const Context context(p);
    until("llama_decode");
    say("rc", "%d", context.decode(0, 0, some(9)));
}

// n_batch is cut down to the n_ctx that was asked for, and only then is that rounded up.
void batch_between_n_ctx_and_its_rounding() {
    llama_context_params p = settings();
    p.n_ctx = 300;
    p.n_batch = p.n_ubatch = 512;
    const Context context(p);
    say("n_ctx", "%u", llama_n_ctx(context.get()));
    say("n_batch", "%u", llama_n_batch(context.get()));
    until("llama_decode");
    say("rc", "%d", context.decode(0, 0, some(310)));
}

void outputs_over_n_outputs_max() {
    llama_context_params p = settings();
    p.n_seq_max = p.n_outputs_max = 2;
    const Context context(p);
    const Tokens text = some(3);
    until("llama_decode");
    say("rc", "%d", context.decode({{text[0], 0, 0, true}, {text[1], 1, 0, true}, {text[2], 2, 0, true}}));
}

void n_outputs_max_under_n_seq_max() {
    llama_context_params p = settings();
    p.n_outputs_max = 2;
    until("llama_init_from_model");
    const Context context(p);
}

void n_batch_under_n_seq_max() {
    llama_context_params p = settings();
    p.n_batch = p.n_ubatch = 2;
    until("llama_init_from_model");
    const Context context(p);
}

void partial_copy_between_streams() {
    llama_context_params p = settings();
    p.kv_unified = false;
    const Context context(p);
    context.read(0, 0, some(20));
    until("llama_memory_seq_cp");
    llama_memory_seq_cp(context.memory(), 0, 1, 5, 10);
}

template <typename Call>
void out_of_range(const char * what, Call && call) {
    const Context context(settings());
    context.read(0, 0, some(4));
    until(what);
    call(context.memory());
}
void copy_to_a_sequence_out_of_range() {
    out_of_range("llama_memory_seq_cp", [](llama_memory_t m) { llama_memory_seq_cp(m, 0, 256, -1, -1); });
}
void remove_a_sequence_out_of_range() {
    out_of_range("llama_memory_seq_rm", [](llama_memory_t m) { llama_memory_seq_rm(m, 256, -1, -1); });
}
void remove_a_negative_sequence() {
    out_of_range("llama_memory_seq_rm", [](llama_memory_t m) { llama_memory_seq_rm(m, -2, -1, -1); });
}
void keep_a_sequence_out_of_range() {
    out_of_range("llama_memory_seq_keep", [](llama_memory_t m) { llama_memory_seq_keep(m, 256); });
}

// Of four sequences: the ninth, the 257th, and a negative one.
void decode_a_sequence_out_of_range() {
    for (const llama_seq_id seq : {8, 256, -1}) {
        const Context context(settings());
        say(("rc " + std::to_string(seq)).c_str(), "%d", context.decode(seq, 0, some(4)));
    }
}
// To the ninth of four.
void copy_to_a_sequence_that_is_not_there() {
    const Context context(settings());
    context.read(0, 0, some(4));
    llama_memory_seq_cp(context.memory(), 0, 8, -1, -1);
    say("last position", "%d", llama_memory_seq_pos_max(context.memory(), 8));
}

void shift_positions() {
    const Context context(settings());
    context.read(0, 0, some(20));
    say("can shift", "%d", llama_memory_can_shift(context.memory()));
    until("llama_memory_seq_add");
    llama_memory_seq_rm(context.memory(), 0, 0, 5);
    llama_memory_seq_add(context.memory(), 0, 5, -1, -5);
    until("llama_decode");
    say("rc", "%d", context.decode(0, 15, some(1)));
}
void divide_positions() {
    const Context context(settings());
    context.read(0, 0, some(20));
    say("can shift", "%d", llama_memory_can_shift(context.memory()));
    until("llama_memory_seq_div");
    llama_memory_seq_div(context.memory(), 0, 0, -1, 2);
}
// The two caches differ in size, so the engine says that it cannot shift; does it die?
void shift_where_it_cannot() {
    llama_context_params p = settings();
    p.n_ctx = 2048;
    p.swa_full = false;
    const Context context(p);
    context.read(0, 0, some(20));
    say("can shift", "%d", llama_memory_can_shift(context.memory()));
    llama_memory_seq_rm(context.memory(), 0, 0, 5);
    llama_memory_seq_add(context.memory(), 0, 5, -1, -5);
    say("rc", "%d", context.decode(0, 15, some(1)));
}

using Chain = std::unique_ptr<llama_sampler, void (*)(llama_sampler *)>;
Chain grammar() { return {llama_sampler_init_grammar(llama_model_get_vocab(model), "root ::= \"ab\"", "root"), llama_sampler_free}; }

llama_token token_of(const char * text) {
    llama_token token = -1;
    if (llama_tokenize(llama_model_get_vocab(model), text, static_cast<int32_t>(std::strlen(text)), &token, 1, false, false) != 1) fail("not one token");
    return token;
}
llama_token an_end() {
    const llama_vocab * vocab = llama_model_get_vocab(model);
    for (llama_token t = 0; t < llama_vocab_n_tokens(vocab); t++) {
        if (llama_vocab_is_eog(vocab, t)) return t;
    }
    fail("no end of generation");
}
void end_of_an_incomplete_grammar() {
    const Chain chain = grammar();
    llama_sampler_accept(chain.get(), token_of("a"));
    until("llama_sampler_accept");
    llama_sampler_accept(chain.get(), an_end());
}
void token_the_grammar_forbids() {
    const Chain chain = grammar();
    llama_sampler_accept(chain.get(), token_of("a"));
    until("llama_sampler_accept");
    llama_sampler_accept(chain.get(), token_of("c"));
}
// A grammar that waits for "t" and then wants "tz": the token "the" wakes it and is forbidden by it.
void token_that_wakes_a_grammar_and_breaks_it() {
    const char * pattern = "t";
    const Chain chain(llama_sampler_init_grammar_lazy_patterns(llama_model_get_vocab(model), "root ::= \"tz\"", "root", &pattern, 1, nullptr, 0), llama_sampler_free);
    llama_token_data one{token_of("the"), 0.0f, 0.0f};
    llama_token_data_array all{&one, 1, -1, false};
    llama_sampler_apply(chain.get(), &all);
    say("legal", "%d", all.data[0].logit == 0.0f);
    until("llama_sampler_accept");
    llama_sampler_accept(chain.get(), one.id);
}
// Is a repetition punished? With a window of 4, and with one of -1, which elsewhere means "all of the context".
void negative_penalty_window() {
    for (const int32_t last_n : {4, -1}) {
        const Chain chain(llama_sampler_init_penalties(llama_vocab_n_tokens(llama_model_get_vocab(model)), last_n, 2.0f, 0.0f, 0.0f), llama_sampler_free);
        llama_sampler_accept(chain.get(), 5);
        llama_token_data one{5, 1.0f, 0.0f};
        llama_token_data_array all{&one, 1, -1, false};
        llama_sampler_apply(chain.get(), &all);
        say(("logit " + std::to_string(last_n)).c_str(), "%g", all.data[0].logit);
    }
}

void rows_over_n_ubatch_without_causality() {
    llama_context_params p = settings();
    p.n_ubatch = 8;
    const Context context(p);
    llama_set_causal_attn(context.get(), false);
    until("llama_decode");
    say("rc", "%d", context.decode(0, 0, some(9)));
}

void snapshots_as_many_as_are_computed_at_once() {
    llama_context_params p = settings();
    p.n_ubatch = 8;
    p.n_rs_seq = 7;
    const Context context(p);
    until("llama_decode");
    say("rc", "%d", context.decode(0, 0, some(9)));
}

// ------------------------------------------------------------------------------------------------- what is silently wrong

// 1. Attention from the past, running state from the tip.
void copy_of_a_part() {
    const Tokens text = some(20), next = some(1, 3);
    for (const int part : {20, 10}) {
        const Context context(settings());
        context.read(0, 0, text);
        llama_memory_seq_cp(context.memory(), 0, 1, 0, part);
        say(("rc " + std::to_string(part)).c_str(), "%d", context.decode(1, part, next));
        say(("apart " + std::to_string(part)).c_str(), "%g", apart(context.logits(), afresh(first(text, static_cast<size_t>(part)) + next)));
    }
}

// 2. The copy is of the state that was rolled back, not of the one it was rolled back to.
void copy_after_a_rollback() {
    const Tokens text = some(20), next = some(1, 3);
    for (const llama_seq_id seq : {0, 1}) {
        llama_context_params p = settings();
        p.n_rs_seq = 4;
        const Context context(p);
        context.read(0, 0, text);
        say(("removed " + std::to_string(seq)).c_str(), "%d", llama_memory_seq_rm(context.memory(), 0, 18, -1));
        if (seq) llama_memory_seq_cp(context.memory(), 0, seq, -1, -1);
        say(("rc " + std::to_string(seq)).c_str(), "%d", context.decode(seq, 18, next));
        say(("apart " + std::to_string(seq)).c_str(), "%g", apart(context.logits(), afresh(first(text, 18) + next)));
    }
}

llama_context_params short_window(uint32_t n_seq_max) {
    llama_context_params p = settings();
    p.n_ctx = 2048;
    p.n_seq_max = n_seq_max;
    p.swa_full = false;
    return p;
}

// 3. 600 tokens fill the window's 512 cells; then seven sequences share all of them.
void shared_cells_of_a_full_window() {
    for (const llama_seq_id n_shared : {1, 8}) {
        const Context context(short_window(8));
        context.read(0, 0, some(600));
        for (llama_seq_id seq = 1; seq < n_shared; seq++) llama_memory_seq_cp(context.memory(), 0, seq, -1, -1);
        int refused = 0;
        for (int i = 0; i < 10; i++) refused += context.decode(0, 600 + i - refused, some(1, i)) == 1;
        say(("refused of 10, shared by " + std::to_string(n_shared)).c_str(), "%d", refused);
    }
}

// 4. The window's cells are gone, and the removal says that all is well.
void rewind_past_the_window() {
    const Tokens text = some(600), next = some(1, 3);
    for (const llama_pos to : {590, 400, 300}) {
        const Context context(short_window(1));
        context.read(0, 0, text);
        const std::string name = std::to_string(to);
        say(("first position kept " + name).c_str(), "%d", llama_memory_seq_pos_min(context.memory(), 0));
        say(("removed " + name).c_str(), "%d", llama_memory_seq_rm(context.memory(), 0, to, -1));
        say(("rc " + name).c_str(), "%d", context.decode(0, to, next));
        say(("apart " + name).c_str(), "%g", apart(context.logits(), afresh(first(text, static_cast<size_t>(to)) + next)));
    }
}

// 5. An image of 2 x 3 rows of embeddings after ten tokens; it takes three positions.
void put_image(const Context & context, llama_pos base) {
    constexpr int w = 3, h = 2, n = w * h;
    const int n_embd = llama_model_n_embd(model);
    std::vector<float> embd(static_cast<size_t>(n * n_embd));
    for (size_t i = 0; i < embd.size(); i++) embd[i] = std::sin(static_cast<float>(i) * 0.7f);
    std::vector<llama_pos> pos(4 * n);
    for (int i = 0; i < n; i++) pos[static_cast<size_t>(i)] = base, pos[static_cast<size_t>(n + i)] = base + i / w, pos[static_cast<size_t>(2 * n + i)] = base + i % w;
    llama_seq_id zero = 0;
    std::vector<llama_seq_id *> seq(n, &zero);
    std::vector<int32_t> one(n, 1);
    std::vector<int8_t> output(n, 0);
    if (llama_decode(context.get(), {n, nullptr, embd.data(), pos.data(), one.data(), seq.data(), output.data()}) != 0) fail("the image did not land");
}
void text_inside_an_image() {
    const Tokens text = some(10), next = some(1, 3);
    std::map<int, Row> after;
    for (const int n_pos : {1, 3}) {
        const Context context(settings());
        context.read(0, 0, text);
        put_image(context, 10);
        say(("last position " + std::to_string(n_pos)).c_str(), "%d", llama_memory_seq_pos_max(context.memory(), 0));
        say(("rc " + std::to_string(n_pos)).c_str(), "%d", context.decode(0, 10 + n_pos, next));
        after[n_pos] = context.logits();
    }
    say("apart", "%g", apart(after[1], after[3]));
}
void cut_inside_an_image() {
    const Context context(settings());
    context.read(0, 0, some(10));
    put_image(context, 10);
    say("removed", "%d", llama_memory_seq_rm(context.memory(), 0, 11, -1));
    say("last position", "%d", llama_memory_seq_pos_max(context.memory(), 0));
    say("rc", "%d", context.decode(0, 11, some(1, 3)));
    const Row cut = context.logits();
    const Context whole(settings());
    whole.read(0, 0, some(10));
    put_image(whole, 10);
    if (whole.decode(0, 11, some(1, 3)) != 0) fail("text did not land");
    say("apart from an image left whole", "%g", apart(cut, whole.logits()));
}

// 6. A pointer from before a decode; row -1; and the old row after a decode that asked for none.
void logits_from_before() {
    const Context context(settings());
    context.read(0, 0, some(10));
    context.read(1, 0, some(12, 1));
    const float * data = llama_get_logits_ith(context.get(), -1);
    const Row then = context.logits();
    const Tokens next = some(2, 3);
    if (context.decode({{next[0], 10, 0, true}, {next[1], 12, 1, true}}) != 0) fail("two rows did not land");
    say("pointer apart", "%g", apart(Row(data, data + then.size()), then));
    say("row -1 from row 0", "%g", apart(context.logits(-1), context.logits(0)));
    const Row one = context.logits(1);
    if (context.decode({{next[0], 13, 1, false}}) != 0) fail("a row did not land");
    const float * old = llama_get_logits(context.get());
    say("old rows still readable", "%d", old != nullptr && apart(Row(old + one.size(), old + 2 * one.size()), one) == 0);
    say("row -1 is there", "%d", !context.logits(-1).empty());
}

// 7. Nothing was removed, and only the return value says so.
void remove_a_part() {
    const Tokens text = some(20), next = some(1, 3);
    const Context context(settings());
    context.read(0, 0, text);
    say("removed", "%d", llama_memory_seq_rm(context.memory(), 0, 10, -1));
    say("last position", "%d", llama_memory_seq_pos_max(context.memory(), 0));
    say("rc at the cut", "%d", context.decode(0, 10, next));
    say("rc at the tip", "%d", context.decode(0, 20, next));
    say("apart from the cut text", "%g", apart(context.logits(), afresh(first(text, 10) + next)));
    say("apart from the whole text", "%g", apart(context.logits(), afresh(text + next)));
}

// Whole, then again, then another text in its place.
void remove_all() {
    const Context context(settings());
    context.read(0, 0, some(20));
    say("removed", "%d", llama_memory_seq_rm(context.memory(), 0, -1, -1));
    say("last position", "%d", llama_memory_seq_pos_max(context.memory(), 0));
    say("removed again", "%d", llama_memory_seq_rm(context.memory(), 0, -1, -1));
    context.read(0, 0, some(20, 1));
    say("apart", "%g", apart(context.logits(), afresh(some(20, 1))));
}

// 8. Computations a decode of eight sequences takes, by the order of its rows.
int n_splits;
void count_splits(ggml_log_level, const char * text, void *) { n_splits += std::strstr(text, "added ubatch to split") != nullptr; }
void order_of_rows() {
    llama_log_set(count_splits, nullptr);
    for (const char * order : {"01234567", "76543210", "04152637", "02461357"}) {
        llama_context_params p = settings();
        p.n_seq_max = 8;
        const Context context(p);
        const Tokens text = some(8);
        std::vector<Entry> rows;
        for (const char * at = order; *at; at++) rows.push_back({text[static_cast<size_t>(*at - '0')], 0, *at - '0', true});
        n_splits = 0;
        if (context.decode(rows) != 0) fail("the rows did not land");
        say(order, "%d", n_splits);
        float most = 0;
        for (size_t i = 0; i < rows.size(); i++) most = std::max(most, apart(context.logits(static_cast<int32_t>(i)), afresh({rows[i].token})));
        say((std::string("apart ") + order).c_str(), "%g", most);
    }
}

// 9. Bytes of the compute buffer with room for the logits of every token of a batch, and for those of each sequence.
void room_for_logits() {
    for (const uint32_t n_outputs_max : {0, 4}) {
        llama_context_params p = settings();
        p.n_batch = p.n_ubatch = 512;
        p.n_outputs_max = n_outputs_max;
        const Context context(p);
        context.read(0, 0, some(4));
        size_t bytes = 0;
        for (const auto & [type, data] : llama_get_memory_breakdown(context.get())) bytes += data.compute;
        say(("bytes " + std::to_string(n_outputs_max)).c_str(), "%zu", bytes);
    }
}

// 10. Keys are turned to their new positions at the next decode; a state saved before that has the one without the other.
void save_after_a_shift() {
    const Tokens text = some(30), next = some(1, 3);
    for (const bool decode_first : {false, true}) {
        const Context context(settings());
        context.read(0, 0, text);
        llama_memory_seq_rm(context.memory(), 0, 0, 10);
        llama_memory_seq_add(context.memory(), 0, 10, -1, -10);
        if (decode_first && context.decode(1, 0, some(1)) != 0) fail("a row did not land");
        std::vector<uint8_t> state(llama_state_seq_get_size(context.get(), 0));
        const size_t n = llama_state_seq_get_data(context.get(), state.data(), state.size(), 0);
        if (context.decode(0, 20, next) != 0) fail("a row did not land");
        const Context restored(settings());
        say(("restored " + std::to_string(decode_first)).c_str(), "%d", llama_state_seq_set_data(restored.get(), state.data(), n, 0) == n);
        say(("rc " + std::to_string(decode_first)).c_str(), "%d", restored.decode(0, 20, next));
        say(("apart " + std::to_string(decode_first)).c_str(), "%g", apart(restored.logits(), context.logits()));
    }
}

const std::map<std::string, void (*)()> cases{
#define CASE(name) {#name, name}
    CASE(batch_over_n_batch), CASE(batch_between_n_ctx_and_its_rounding), CASE(outputs_over_n_outputs_max), CASE(n_outputs_max_under_n_seq_max), CASE(n_batch_under_n_seq_max),
    CASE(partial_copy_between_streams), CASE(copy_to_a_sequence_out_of_range), CASE(remove_a_sequence_out_of_range), CASE(remove_a_negative_sequence), CASE(keep_a_sequence_out_of_range),
    CASE(decode_a_sequence_out_of_range), CASE(copy_to_a_sequence_that_is_not_there), CASE(shift_positions), CASE(divide_positions), CASE(shift_where_it_cannot),
    CASE(end_of_an_incomplete_grammar), CASE(token_the_grammar_forbids), CASE(token_that_wakes_a_grammar_and_breaks_it), CASE(negative_penalty_window), CASE(rows_over_n_ubatch_without_causality),
    CASE(snapshots_as_many_as_are_computed_at_once),
    CASE(copy_of_a_part), CASE(copy_after_a_rollback), CASE(shared_cells_of_a_full_window), CASE(rewind_past_the_window), CASE(text_inside_an_image), CASE(cut_inside_an_image),
    CASE(logits_from_before), CASE(remove_a_part), CASE(remove_all), CASE(order_of_rows), CASE(room_for_logits), CASE(save_after_a_shift),
#undef CASE
};

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 3 || !cases.contains(argv[1])) {
        for (const auto & [name, run] : cases) std::fprintf(stderr, "%s\n", name.c_str());
        return 2;
    }
    std::setvbuf(stdout, nullptr, _IONBF, 0);  // a process that aborts flushes nothing
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    model = llama_model_load_from_file(argv[2], llama_model_default_params());
    if (!model) fail("the model did not load");
    cases.at(argv[1])();
    llama_model_free(model);
    return 0;
}
