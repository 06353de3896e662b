// Branches as bytes: everything comes back, what does not belong is refused with both sides named, damage is always noticed, and
// bytes that are whole but wrong are a typed error that leaves the store as it was.
#include <array>
#include <cmath>
#include <string>

#include "check.hpp"
#include "core/bytes.hpp"
#include "core/saved.hpp"
#include "stub_store.hpp"

using namespace stub;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
const std::string gbnf = "root ::= \"abcdefghijklmnopqrstuvwxyz\"";

ContextParams with(ContextParams params, int32_t type_k, int32_t type_v, int32_t flash_attn) {
    params.type_k = type_k, params.type_v = type_v, params.flash_attn = flash_attn;
    return params;
}

std::vector<std::pair<Token, float>> pairs(const Biases & biases) { return biases ? *biases : std::vector<std::pair<Token, float>>(); }

// Everything that must come back, and nothing of where in a store it was.
void check_same_branch(Store & one, pyl_branch a, Store & other, pyl_branch b) {
    const Facts x = facts(one, a), y = facts(other, b);
    CHECK_EQ(y.position, x.position);
    CHECK_EQ(y.cells_own + y.cells_inherited, x.cells_own + x.cells_inherited);
    CHECK(x.params == y.params && x.seed == y.seed && x.draws == y.draws && x.history == y.history);
    CHECK(x.has_grammar == y.has_grammar && x.taken == y.taken);
    CHECK_EQ(y.last_token, x.last_token);
    CHECK(same_metrics(x.metrics, y.metrics));
    CHECK(x.logits.size() == y.logits.size() && (x.logits.empty() || same_bits(x.logits, y.logits)));
    const Branch &p = one.get(a), &q = other.get(b);
    CHECK(pairs(p.bias) == pairs(q.bias));
    CHECK(pairs(p.steer) == pairs(q.steer));
    CHECK_EQ(p.grammar_source != nullptr, q.grammar_source != nullptr);
    if (p.grammar_source && q.grammar_source) CHECK(p.grammar_source->text == q.grammar_source->text && p.grammar_source->root == q.grammar_source->root && p.grammar_source->is_chat == q.grammar_source->is_chat);
}

// What is loaded is a root, alone, that owns all its cells.
void check_is_root(Store & store, pyl_branch branch) {
    const Branch & b = store.get(branch);
    CHECK_EQ(b.parent, 0);
    CHECK(b.children.empty());
    CHECK_EQ(b.cells_inherited, 0);
}

Tokens ticks(Store & store, pyl_branch branch, uint32_t n_steps) {
    Lanes l = lanes({branch}, n_steps);
    run_tick(store, l);
    return l.taken(0);
}

void bias(Store & store, pyl_branch branch, int32_t kind, const Tokens & tokens, const std::vector<float> & by) { store.set_bias(branch, kind, tokens, by.data()); }

SamplingParams everything_on() {
    SamplingParams p;
    p.temperature = 1.7f, p.top_k = 200, p.top_p = 0.97f, p.min_p = 0.001f, p.typical_p = 0.98f;
    p.penalty_repeat = 1.3f, p.penalty_frequency = 0.11f, p.penalty_presence = 0.07f, p.penalty_last_n = 1500;
    return p;
}

// No end of generation comes in between.
void never_ends(Store & store, pyl_branch branch) { bias(store, branch, PYL_BIAS, {257, 258, 70}, {-inf, -inf, 0.25f}); }

// ------------------------------------------------------------------------------------------------------------ round trips

void test_every_field_comes_back() {
    Store store(model(), context(8192)), other(model(), context(4096, 32, 3));
    const pyl_branch branch = root(store, text(20), everything_on(), 0xFEDCBA9876543210ull);
    never_ends(store, branch);
    bias(store, branch, PYL_STEER, {71, 72}, {-inf, -1.5f});
    store.set_metrics(branch, PYL_METRICS_MODEL | PYL_METRICS_SAMPLING);
    CHECK_EQ(ticks(store, branch, 2200).size(), 2200);  // the window of 1,500 is full, and history was cut before
    CHECK(store.get(branch).sampler.history().size() >= 1500);
    CHECK_EQ(store.get(branch).metrics.n_tokens, 2200);
    const Snapshot before = snapshot(store);
    const uint64_t epoch = store.epoch();
    const std::string bytes = store.save(branch, true);
    CHECK(snapshot(store) == before);  // looking changes nothing
    CHECK_EQ(store.epoch(), epoch);    // so a view of logits is still good
    CHECK(store.save(branch, true) == bytes);

    const pyl_branch loaded = other.load(bytes);
    check_same_branch(store, branch, other, loaded);
    check_is_root(other, loaded);
    CHECK_EQ(pressure(other).cells_used, 2220);
    CHECK_EQ(pressure(other).leases_used, 1);
    CHECK(other.save(loaded, true) == bytes);  // nothing is added or lost by going round
    CHECK(ticks(store, branch, 300) == ticks(other, loaded, 300));
    check_same_branch(store, branch, other, loaded);

    // Settings that change after the restore find the same stream and window.
    SamplingParams p = everything_on();
    for (const auto & change : std::vector<std::function<void()>>{[&] { p.temperature = 0.6f; }, [&] { p.typical_p = 0.8f; }, [&] { p.min_p = 0.05f; }, [&] { p.penalty_last_n = 1200; }, [&] { p.penalty_repeat = 1.9f; },
                                                                  [&] { p.temperature = 0; }, [&] { p.temperature = 2.5f, p.top_k = 0, p.top_p = 1; }}) {
        change();
        store.get(branch).sampler.set_params(p);
        other.get(loaded).sampler.set_params(p);
        CHECK(ticks(store, branch, 60) == ticks(other, loaded, 60));
    }
    check_same_branch(store, branch, other, loaded);
}

void test_odd_but_whole_branches() {
    Store store(model(), context(256)), other(model(), context(128, 16, 4));
    const auto round = [&](pyl_branch branch, bool with_logits) {
        const uint32_t used = pressure(other).cells_used;
        const pyl_branch loaded = other.load(store.save(branch, with_logits));
        check_same_branch(store, branch, other, loaded);
        check_is_root(other, loaded);
        CHECK_EQ(pressure(other).cells_used, used + other.get(loaded).cells_own);
        return loaded;
    };
    const pyl_branch empty = store.create(0, everything_on(), 5), late = store.create(1000, greedy(), 6), set = store.create(0, greedy(), 7);
    const pyl_branch loaded_empty = round(empty, true);
    prefill(other, loaded_empty, text(9));
    CHECK(same_bits(row(other, loaded_empty), replay(text(9))));
    // Nothing decoded, and yet not at the beginning.
    const pyl_branch loaded_late = round(late, true);
    other.prune(Branches{loaded_empty});
    CHECK_EQ(other.get(loaded_late).position, 1000);
    prefill(other, loaded_late, text(7));
    CHECK(same_bits(row(other, loaded_late), replay(text(7), 1000)));
    other.prune(Branches{loaded_late});
    // Logits that came from the caller and not from a decode.
    Row given(300);
    for (size_t i = 0; i < given.size(); i++) given[i] = i % 7 ? 0.01f * static_cast<float>(i) : -inf;
    store.set_logits(set, given);
    const pyl_branch loaded_set = round(set, true);
    CHECK(same_bits(row(other, loaded_set), given));
    other.prune(Branches{loaded_set});
    // Without the flag the logits stay behind, and all else comes.
    prefill(store, late, text(6));
    const pyl_branch bare = other.load(store.save(late, false));
    CHECK(!other.get(bare).logits.any());
    CHECK_THROWS(PYL_E_NO_LOGITS, ticks(other, bare, 1));
    commit(other, {bare}, {50});
    commit(store, {late}, {50});
    CHECK(same_bits(row(other, bare), row(store, late)));
    other.prune(Branches{bare});
    // Committed tokens without a draw between, a start further on, an end of generation among them.
    const pyl_branch spoken = root(store, text(3), everything_on(), 9);
    for (const Token token : {65, 257, 66}) commit(store, {spoken}, {token});
    const pyl_branch loaded_spoken = round(spoken, true);
    never_ends(store, spoken), never_ends(other, loaded_spoken);
    CHECK(ticks(store, spoken, 20) == ticks(other, loaded_spoken, 20));
    CHECK_EQ(pressure(other).leases_used, 1);
}

void test_a_grammar_half_way() {
    Store store(model(), context(256)), other(model(), context(256));
    const pyl_branch branch = root(store, text(4));
    for (const size_t taken : {0, 1, 13, 25, 26}) {
        store.set_grammar(branch, {false, gbnf, "root"});
        CHECK_EQ(ticks(store, branch, static_cast<uint32_t>(std::max<size_t>(taken, 1))).size(), std::max<size_t>(taken, 1));
        if (taken == 0) store.set_grammar(branch, {false, gbnf, "root"});  // anew: what came before is not part of it
        const pyl_branch loaded = other.load(store.save(branch, true));
        check_same_branch(store, branch, other, loaded);
        CHECK_EQ(other.get(loaded).grammar_taken.size(), taken);
        const Tokens rest = ticks(other, loaded, 40);
        CHECK_EQ(rest.size(), 26 - taken);
        for (size_t i = 0; i < rest.size(); i++) CHECK_EQ(rest[i], static_cast<Token>('a' + taken + i));
        CHECK_EQ(live_counts().grammars, 2);
        other.prune(Branches{loaded});
    }
    // An end of generation that the grammar took is no obstacle.
    commit(store, {branch}, {257});
    const pyl_branch ended = other.load(store.save(branch, true));
    CHECK_EQ(other.get(ended).grammar_taken.size(), 27);
    CHECK_EQ(ticks(other, ended, 3).size(), 0);
    // A fork's grammar has its own progress; lifted, it is gone.
    store.set_grammar(branch, {false, gbnf, "root"});
    commit(store, {branch}, {'a'});
    const pyl_branch fork_ = fork(store, branch, 1)[0];
    commit(store, {fork_}, {'b'});
    for (const pyl_branch b : {branch, fork_}) {
        const pyl_branch loaded = other.load(store.save(b, true));
        check_same_branch(store, b, other, loaded);
        CHECK_EQ(ticks(other, loaded, 1)[0], b == branch ? 'b' : 'c');
        other.prune(Branches{loaded});
    }
    store.set_grammar(fork_, {false, "", "root"});
    const pyl_branch free_ = other.load(store.save(fork_, true));
    CHECK(!other.get(free_).grammar && !other.get(free_).grammar_source && other.get(free_).grammar_taken.empty());
}

void test_a_fork_is_saved_with_what_it_inherited() {
    Store store(model(), context(256)), other(model(), context(256));
    const pyl_branch top = root(store, text(30), everything_on(), 3);
    never_ends(store, top);
    store.set_metrics(top, PYL_METRICS_MODEL);
    const pyl_branch child = fork(store, top, 1)[0];
    prefill(store, child, text(7, 2));
    const pyl_branch grandchild = fork(store, child, 1, {99})[0];
    const Tokens spoken = ticks(store, grandchild, 5);
    const Snapshot before = snapshot(store);
    const std::string bytes = store.save(grandchild, true);
    CHECK(snapshot(store) == before);
    for (Store * into : {&other, &store}) {  // also next to the one it was saved from
        const uint32_t used = pressure(*into).cells_used;
        const pyl_branch loaded = into->load(bytes);
        check_same_branch(store, grandchild, *into, loaded);
        check_is_root(*into, loaded);
        CHECK_EQ(into->get(loaded).cells_own, 42);
        CHECK_EQ(pressure(*into).cells_used, used + 42);
        CHECK(same_bits(row(*into, loaded), replay(text(30) + text(7, 2) + spoken)));
        // It is a root like any other: forked, taken over, retained.
        const Branches kids = fork(*into, loaded, 2, {5, 6});
        commit(*into, kids, {50, 51});
        CHECK(same_bits(row(*into, kids[1]), replay(text(30) + text(7, 2) + spoken + Tokens{51})));
        into->fast_forward(loaded, kids[0]);
        CHECK_EQ(into->get(loaded).cells_own, 43);
        into->prune(Branches{kids[1]});
        into->prune(Branches{loaded});
        CHECK_EQ(pressure(*into).cells_used, used);
    }
    CHECK(snapshot(store) == before);
    // The ancestors go, and the bytes do not mind.
    store.prune_subtree(top);
    const pyl_branch again = store.load(bytes);
    CHECK(same_bits(row(store, again), replay(text(30) + text(7, 2) + spoken)));
    store.retain_only(again);
    CHECK_EQ(pressure(store).cells_used, 42);
}

void test_after_reading_anew_and_taking_over() {
    Store store(model(), context(256)), other(model(), context(256));
    const pyl_branch branch = root(store, text(50), everything_on(), 3);
    never_ends(store, branch);
    ticks(store, branch, 10);
    uint32_t landed = 0;
    store.reseed_kv(branch, text(12, 5), landed);
    const pyl_branch loaded = other.load(store.save(branch, true));
    check_same_branch(store, branch, other, loaded);
    CHECK_EQ(other.get(loaded).position, 12);
    CHECK(ticks(store, branch, 30) == ticks(other, loaded, 30));
    const pyl_branch child = fork(store, branch, 1, {8})[0];
    ticks(store, child, 5);
    store.fast_forward(branch, child);
    const pyl_branch second = other.load(store.save(branch, true));
    check_same_branch(store, branch, other, second);
    CHECK(ticks(store, branch, 30) == ticks(other, second, 30));
}

// --------------------------------------------------------------------------------------------------------------- refusals

void test_no_room() {
    Store store(model(), context(256));
    const pyl_branch branch = root(store, text(40));
    const std::string bytes = store.save(branch, true);
    Store small(model(), context(60, 8, 2));
    const pyl_branch first = root(small, text(21));
    Snapshot before = snapshot(small);
    Error error = CHECK_THROWS(PYL_E_CONTEXT, small.load(bytes));
    CHECK(error.need == 40 && error.have == 39 && error.state == PYL_STATE_UNCHANGED);
    CHECK(snapshot(small) == before);
    small.prune(Branches{first});
    const pyl_branch fits = small.load(bytes);
    prefill(small, fits, text(20, 2));  // to the last cell
    const pyl_branch other = small.create(0, greedy(), 1);
    before = snapshot(small);
    error = CHECK_THROWS(PYL_E_CONTEXT, small.load(bytes));
    CHECK(error.need == 40 && error.have == 0);
    small.prune(Branches{fits});
    const pyl_branch more = small.create(0, greedy(), 1);
    before = snapshot(small);
    error = CHECK_THROWS(PYL_E_NO_LEASE, small.load(bytes));
    CHECK(error.need == 1 && error.have == 0 && error.state == PYL_STATE_UNCHANGED);
    CHECK(snapshot(small) == before);
    small.prune(Branches{other});
    CHECK(same_bits(row(small, small.load(bytes)), replay(text(40))));
    small.prune(Branches{more});
}

void test_poisoned_and_stale() {
    Store store(model("n_vocab=300;fail_at=2;fail_rc=-2;fail_rows=1"), context(256));
    const pyl_branch branch = root(store, text(5)), gone = store.create(0, greedy(), 1);
    store.prune(Branches{gone});
    CHECK_THROWS(PYL_E_DECODE, commit(store, {branch}, {1}));
    const Snapshot before = snapshot(store);
    CHECK_THROWS(PYL_E_POISONED, store.save(branch, true));
    CHECK_THROWS(PYL_E_STALE, store.save(gone, true));
    CHECK_THROWS(PYL_E_STALE, store.save(0, false));
    CHECK(snapshot(store) == before);
}

void check_names(const Error & error, const std::string & saved, const std::string & here) {
    const bool ok = error.message.find(saved) != std::string::npos && error.message.find(here) != std::string::npos && error.message.find(saved) < error.message.find(here);
    if (!CHECK(ok)) std::fprintf(stderr, "    '%s' does not name '%s' and '%s'\n", error.message.c_str(), saved.c_str(), here.c_str());
}

void test_both_sides_are_named() {
    Store store(model(), context());
    const std::string bytes = store.save(root(store, text(5)), true);
    const auto refused = [&](const std::string & options, const ContextParams & params) {
        Store other(model(options), params);
        const Snapshot before = snapshot(other);
        const Error error = CHECK_THROWS(PYL_E_UNSUPPORTED, other.load(bytes));
        CHECK(snapshot(other) == before && error.state == PYL_STATE_UNCHANGED);
        return error;
    };
    check_names(refused("n_vocab=301", context()), "model stub of 300", "stub of 301");
    check_names(refused("n_vocab=300", with(context(), PYL_KV_Q8_0, PYL_KV_F16, PYL_FLASH_ATTN_AUTO)), "KV types f16/f16", "q8_0/f16");
    check_names(refused("n_vocab=300", with(context(), PYL_KV_F16, PYL_KV_IQ4_NL, PYL_FLASH_ATTN_AUTO)), "KV types f16/f16", "f16/iq4_nl");
    check_names(refused("n_vocab=300", with(context(), PYL_KV_F16, PYL_KV_F16, PYL_FLASH_ATTN_OFF)), "flash attention on", "off");
    // What does not matter does not matter.
    ContextParams params = context(64, 16, 3);
    params.swa_full = false, params.deterministic = true;
    Store other(model("n_vocab=300;n_ctx_train=77"), params);
    CHECK(same_bits(row(other, other.load(bytes)), replay(text(5))));
}

// ----------------------------------------------------------------------------------------------------------------- damage

struct Small {
    std::string bytes;
    Small() {
        Store store(model("n_vocab=260"), context());
        const pyl_branch branch = root(store, text(6), everything_on(), 77);
        bias(store, branch, PYL_BIAS, {257, 258}, {-inf, -inf});
        store.set_grammar(branch, {false, gbnf, "root"});
        ticks(store, branch, 3);
        bytes = store.save(branch, false);
    }
};

void test_damage() {
    const std::string bytes = Small().bytes;
    Store store(model("n_vocab=260"), context());
    const Snapshot before = snapshot(store);
    std::printf("damage: %zu bytes\n", bytes.size());
    size_t n_tried = 0;
    const auto refused = [&](const std::string & damaged) {
        n_tried++;
        CHECK_THROWS(PYL_E_FORMAT, store.load(damaged));
        CHECK_THROWS(PYL_E_FORMAT, checked_payload(damaged));
    };
    for (size_t i = 0; i < bytes.size(); i++) {
        for (const int flip : {1, 2, 4, 8, 16, 32, 64, 128, 255}) {
            std::string damaged = bytes;
            damaged[i] = static_cast<char>(damaged[i] ^ flip);
            refused(damaged);
        }
        refused(bytes.substr(0, i));  // cut off
        refused(bytes.substr(i + 1));  // begun too late
        refused(bytes.substr(0, i) + bytes.substr(i + 1));  // one byte lost
        refused(bytes.substr(0, i) + '\0' + bytes.substr(i));  // one too many
        if (i + 8 < bytes.size() && bytes[i] != bytes[i + 8]) {  // words swapped
            std::string damaged = bytes;
            std::swap(damaged[i], damaged[i + 8]);
            refused(damaged);
        }
    }
    refused(bytes + '\0');
    refused(bytes + bytes);
    refused(std::string(bytes.size(), '\0'));
    refused(std::string(bytes.size(), '\xff'));
    CHECK(n_tried > 13 * bytes.size());
    CHECK(snapshot(store) == before);
    CHECK_EQ(live_counts().grammars, 0);
    CHECK_EQ(store.get(store.load(bytes)).grammar_taken.size(), 3);  // undamaged it is fine
}

// ---------------------------------------------------------------------------------------------------- whole, and still wrong

// The bytes of a branch, field by field: as the kernel would write them, but for what a test changes.
struct Craft {
    SavedHead head{"stub 1", "stub of 260", 260, 260, PYL_KV_F16, PYL_KV_F16, PYL_FLASH_ATTN_ON, 3, 3, 66, true, true, 7, 5};
    Pos start = 0;
    std::array<float, 7> floats{0.8f, 0.95f, 0.05f, 1.0f, 1.1f, 0.0f, 0.0f};  // temperature, top_p, min_p, typical_p, repeat, frequency, presence
    int32_t top_k = 40, last_n = 64;
    Tokens history{65, 66};
    std::vector<std::pair<Token, float>> bias{{5, -inf}, {6, 1.0f}}, steer{{7, -2.0f}};
    int32_t levels = PYL_METRICS_MODEL;
    uint64_t n_tokens = 2, n_inside = 0;
    std::array<double, 8> sums{1, 2, 0.5, 1, 0, 0, 0, 0};
    uint8_t ignore_eog = 0, is_chat = 0, is_lazy = 0;
    std::string grammar = gbnf, name = "root", triggers;
    Tokens taken{'a', 'b'};
    Row logits = Row(260, 0.5f);
    Tokens cell_tokens{1, 2, 3};
    std::string tail;
    size_t wrong_length = SIZE_MAX;   // which of the lengths, in order, is told as
    uint64_t length = 1ull << 63;

    std::string bytes() const {
        ByteWriter out;
        size_t n_lengths = 0;
        const auto put_length = [&](uint64_t n) { out.put<uint64_t>(n_lengths++ == wrong_length ? length : n); };
        const auto put_text = [&](std::string_view s) {
            put_length(s.size());
            out.bytes().append(s);
        };
        out.bytes().assign(saved_prefix, '\0');
        put_text(head.engine);
        put_text(head.model);
        out.put(head.fingerprint);
        for (const int32_t value : {head.n_vocab, head.type_k, head.type_v, head.flash_attn, head.position}) out.put(value);
        out.put(head.cells);
        out.put(head.last_token);
        out.put<uint8_t>(head.has_logits);
        out.put<uint8_t>(head.has_grammar);
        out.put(head.seed);
        out.put(head.draws);
        out.put(start);
        for (const float value : floats) out.put(value);
        out.put(top_k);
        out.put(last_n);
        out.put(ignore_eog);
        put_length(history.size());
        for (const Token token : history) out.put(token);
        for (const auto * biases : {&bias, &steer}) {
            put_length(biases->size());
            for (const auto & [token, by] : *biases) out.put(token), out.put(by);
        }
        out.put(levels);
        out.put(n_tokens);
        out.put(n_inside);
        for (const double value : sums) out.put(value);
        if (head.has_grammar) {
            out.put(is_chat);
            put_text(grammar);
            put_text(name);
            out.put(is_lazy);
            put_text(triggers);
            put_length(taken.size());
            for (const Token token : taken) out.put(token);
        }
        put_length(logits.size());
        for (const float value : logits) out.put(value);
        put_length(8 * cell_tokens.size());
        for (size_t i = 0; i < cell_tokens.size(); i++) out.put(cell_tokens[i]), out.put(static_cast<Pos>(i));
        out.bytes().append(tail);
        seal(out.bytes());
        return out.bytes();
    }
};

class Victim {
public:
    Victim() : before_(snapshot(store)) {}

    // A typed error of one of these codes, and a store that is as it was.
    void refuses(const std::string & bytes, const std::vector<int32_t> & codes, const char * what, int line) {
        try {
            const pyl_branch branch = store.load(bytes);
            check::that(false, __FILE__, line, what);
            store.prune(Branches{branch});
        } catch (const Error & error) {
            if (!check::that(std::find(codes.begin(), codes.end(), error.code) != codes.end() && error.state == PYL_STATE_UNCHANGED && !error.partial, __FILE__, line, what)) {
                std::fprintf(stderr, "    code %d: %s\n", error.code, error.what());
            }
        } catch (const std::exception & error) {
            check::that(false, __FILE__, line, error.what());
        }
        check_sound(line);
    }
    void check_sound(int line) {
        check::that(snapshot(store) == before_, __FILE__, line, "nothing changed");
        check::same(live_counts().grammars, 0, __FILE__, line, "no grammar was left");
        check::same(live_counts().branches, 1, __FILE__, line, "no branch was left");
    }

    Store store{model("n_vocab=260"), context(64, 16, 4)};

private:
    pyl_branch root_ = root(store, text(9));
    Snapshot before_;
};

#define REFUSED(code, ...)                                                   \
    do {                                                                     \
        Craft c;                                                             \
        __VA_ARGS__;                                                         \
        victim.refuses(c.bytes(), {code}, #__VA_ARGS__ " is " #code, __LINE__); \
    } while (0)
#define ACCEPTED(...)                                                             \
    do {                                                                          \
        Craft c;                                                                  \
        __VA_ARGS__;                                                              \
        const pyl_branch made = victim.store.load(c.bytes());                     \
        CHECK(c.bytes() == victim.store.save(made, c.head.has_logits)); /* nothing is lost or bent */ \
        victim.store.prune(Branches{made});                                       \
        victim.check_sound(__LINE__);                                             \
    } while (0)

void test_fields_out_of_range() {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    Victim victim;
    ACCEPTED();  // and so every refusal below is that of its one change
    ACCEPTED(c.head.last_token = -1, c.history.clear());
    ACCEPTED(c.bias.clear(), c.steer.clear(), c.levels = 0, c.n_tokens = 0, c.sums = {});
    ACCEPTED(c.head.has_grammar = false);
    ACCEPTED(c.head.has_logits = false, c.logits.clear());
    ACCEPTED(c.head.cells = 0, c.head.position = 0, c.cell_tokens.clear());
    ACCEPTED(c.head.seed = UINT64_MAX, c.head.draws = UINT64_MAX);
    ACCEPTED(c.floats[0] = -1, c.top_k = -5, c.last_n = 65536, c.history = Tokens(5000, 7));
    ACCEPTED(c.sums[6] = std::numeric_limits<double>::infinity());
    ACCEPTED(c.logits[7] = nan, c.logits[8] = inf, c.logits[9] = -inf, c.sums[0] = nan);  // a model may well give that, and then it is so

    REFUSED(PYL_E_FORMAT, c.head.position = -1);
    REFUSED(PYL_E_FORMAT, c.head.position = INT32_MIN);
    REFUSED(PYL_E_FORMAT, c.head.position = INT32_MAX);
    REFUSED(PYL_E_FORMAT, c.head.position = (1 << 24) + 1);
    REFUSED(PYL_E_FORMAT, c.head.last_token = -2);
    REFUSED(PYL_E_FORMAT, c.head.last_token = 260);
    REFUSED(PYL_E_FORMAT, c.head.last_token = INT32_MAX);
    REFUSED(PYL_E_CONTEXT, c.head.cells = 56);
    REFUSED(PYL_E_CONTEXT, c.head.cells = UINT32_MAX);
    REFUSED(PYL_E_FORMAT, c.head.cells = 0);
    REFUSED(PYL_E_FORMAT, c.cell_tokens.clear());
    for (size_t i = 0; i < 7; i++) {
        for (const float bad : {nan, inf, -inf}) {
            REFUSED(PYL_E_FORMAT, c.floats[i] = bad);
        }
    }
    for (const size_t i : {1, 3}) {
        for (const float bad : {0.0f, -0.1f, 1.001f}) {
            REFUSED(PYL_E_FORMAT, c.floats[i] = bad);
        }
    }
    for (const float bad : {-0.1f, 1.001f}) REFUSED(PYL_E_FORMAT, c.floats[2] = bad);
    for (const float bad : {0.0f, -1.0f}) REFUSED(PYL_E_FORMAT, c.floats[4] = bad);
    for (const int32_t bad : {-1, 65537, INT32_MIN, INT32_MAX}) REFUSED(PYL_E_FORMAT, c.last_n = bad);
    for (const Token bad : {-1, 260, INT32_MIN, INT32_MAX}) {
        REFUSED(PYL_E_FORMAT, c.history[1] = bad);
        REFUSED(PYL_E_FORMAT, c.bias[1].first = bad);
        REFUSED(PYL_E_FORMAT, c.steer[0].first = bad);
        REFUSED(PYL_E_FORMAT, c.taken[1] = bad);
    }
    for (const float bad : {nan, inf}) {
        REFUSED(PYL_E_FORMAT, c.bias[0].second = bad);
        REFUSED(PYL_E_FORMAT, c.steer[0].second = bad);
    }
    for (const int32_t bad : {-1, 4, 8, 1 << 30}) REFUSED(PYL_E_FORMAT, c.levels = bad);
    for (const Pos bad : {-1, 4, INT32_MIN, INT32_MAX}) REFUSED(PYL_E_FORMAT, c.start = bad);
    REFUSED(PYL_E_FORMAT, c.n_inside = 3);
    REFUSED(PYL_E_FORMAT, c.grammar = "root ::= (");
    REFUSED(PYL_E_FORMAT, c.grammar = "");
    REFUSED(PYL_E_FORMAT, c.grammar = std::string(1 << 20, 'x'));
    REFUSED(PYL_E_FORMAT, c.name = "other");
    REFUSED(PYL_E_FORMAT, c.taken = {'a', 'a'});
    REFUSED(PYL_E_FORMAT, c.taken = Tokens(100, 'a'));
    REFUSED(PYL_E_UNSUPPORTED, c.is_chat = 1);  // the stub has no chat templates
    REFUSED(PYL_E_FORMAT, c.logits.pop_back());
    REFUSED(PYL_E_FORMAT, c.logits.push_back(0));
    REFUSED(PYL_E_FORMAT, c.logits.clear());
    REFUSED(PYL_E_FORMAT, c.head.has_logits = false);
    REFUSED(PYL_E_FORMAT, c.tail = "x");
    REFUSED(PYL_E_FORMAT, c.tail = std::string(8, '\0'));
    REFUSED(PYL_E_UNSUPPORTED, c.head.engine = "stub 2");
    REFUSED(PYL_E_UNSUPPORTED, c.head.engine = std::string(1 << 20, '\xff'));
    REFUSED(PYL_E_UNSUPPORTED, c.head.fingerprint++);
    REFUSED(PYL_E_UNSUPPORTED, c.head.n_vocab = -1);
    REFUSED(PYL_E_UNSUPPORTED, c.head.type_k = -1);
    REFUSED(PYL_E_UNSUPPORTED, c.head.type_v = INT32_MAX);
    REFUSED(PYL_E_UNSUPPORTED, c.head.flash_attn = PYL_FLASH_ATTN_AUTO);
}

void test_lengths_out_of_range() {
    Victim victim;
    for (size_t which = 0; which < 11; which++) {
        for (const uint64_t length : std::vector<uint64_t>{1ull << 63, UINT64_MAX, UINT64_MAX / 4 + 1, UINT64_MAX / 8 + 1, 1ull << 40, 1ull << 32}) {
            Craft c;
            c.wrong_length = which, c.length = length;
            victim.refuses(c.bytes(), {PYL_E_FORMAT}, "a length that cannot be", __LINE__);
        }
        for (const uint64_t length : std::vector<uint64_t>{0, 1, 4, 9, 100}) {  // small enough to be believed: what follows is read as something else
            Craft c;
            c.wrong_length = which, c.length = length;
            if (c.bytes() != Craft().bytes()) victim.refuses(c.bytes(), {PYL_E_FORMAT, PYL_E_UNSUPPORTED, PYL_E_CONTEXT}, "a length that is not so", __LINE__);
        }
    }
}

// Positions must not run to where neighbours are no longer told apart: as for a branch that begins further on.
void test_positions_that_leave_no_room() {
    Store store(model(), context(64)), same(model(), context(64)), larger(model(), context(4096));
    const pyl_branch last = store.create((1 << 24) - 64, greedy(), 1);
    prefill(store, last, text(10));
    const std::string bytes = store.save(last, true);
    CHECK_EQ(same.get(same.load(bytes)).position, (1 << 24) - 54);
    CHECK_THROWS(PYL_E_INVALID, larger.create((1 << 24) - 64, greedy(), 1));
    const Snapshot before = snapshot(larger);
    const Error error = CHECK_THROWS(PYL_E_UNSUPPORTED, larger.load(bytes));
    CHECK(snapshot(larger) == before);
    CHECK(error.message.find(std::to_string((1 << 24) - 54)) != std::string::npos);
}

// Any one byte another one, and sealed again. It may then be another good branch; it is never a crash, a leak or a changed store.
void test_every_byte_wrong_and_sealed() {
    Victim victim;
    const std::string bytes = Craft().bytes();
    size_t n_accepted = 0, n_refused = 0;
    for (size_t i = saved_prefix; i < bytes.size(); i++) {
        for (const int change : {1, 2, 0x10, 0x40, 0x7f, 0x80, 0xff}) {
            std::string other = bytes;
            other[i] = static_cast<char>(other[i] ^ change);
            seal(other);
            try {
                const pyl_branch made = victim.store.load(other);
                n_accepted++;
                const Branch & b = victim.store.get(made);
                CHECK(b.position >= 0 && b.position <= 1 << 24);
                if (b.logits.any()) ticks(victim.store, made, 2);  // and works
                CHECK(checked_payload(victim.store.save(made, true)).size() > 0);
                victim.store.prune(Branches{made});
            } catch (const Error & error) {
                n_refused++;
                CHECK(error.code == PYL_E_FORMAT || error.code == PYL_E_UNSUPPORTED || error.code == PYL_E_CONTEXT || error.code == PYL_E_NO_CELLS);
            } catch (const std::exception & error) {
                check::that(false, __FILE__, __LINE__, error.what());
            }
            victim.check_sound(__LINE__);
        }
    }
    CHECK(n_accepted > 1000);
    CHECK(n_refused > 1000);
    std::printf("sealed again: %zu accepted, %zu refused\n", n_accepted, n_refused);
}

// Pieces of bytes over other pieces, lengths and all.
void test_random_pieces_sealed() {
    Victim victim;
    uint64_t x = 88172645463325252ull;
    const auto random = [&](size_t below) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        return static_cast<size_t>(x % below);
    };
    const std::vector<std::string> sources{Craft().bytes(), Small().bytes};
    for (int round = 0; round < 20000; round++) {
        std::string bytes = sources[random(2)];
        for (size_t n = 1 + random(3); n > 0; n--) {
            const std::string & from = sources[random(2)];
            const size_t length = 1 + random(16), a = saved_prefix + random(from.size() - saved_prefix), b = saved_prefix + random(bytes.size() - saved_prefix);
            if (random(2)) {
                bytes.replace(b, std::min(length, bytes.size() - b), from.substr(a, length));
            } else {
                bytes.erase(b, random(12));
            }
        }
        if (bytes.size() < saved_prefix) continue;
        seal(bytes);
        try {
            victim.store.prune(Branches{victim.store.load(bytes)});
        } catch (const Error &) {
        } catch (const std::exception & error) {
            check::that(false, __FILE__, __LINE__, error.what());
        }
    }
    victim.check_sound(__LINE__);
}

// ------------------------------------------------------------------------------------------------------ the engine's refusal

void test_the_engine_refuses() {
    bool refuses = false;
    const auto watched = std::make_shared<Watched>(model(), [&](const std::function<void()> & call) {
        if (refuses) throw Error(PYL_E_NO_CELLS, "no room in one piece");
        call();
    });
    Store store(watched, context(64));
    const pyl_branch branch = root(store, text(10), everything_on(), 4);
    store.set_grammar(branch, {false, gbnf, "root"});
    const std::string bytes = store.save(branch, true);
    const Snapshot before = snapshot(store);
    refuses = true;
    const Error error = CHECK_THROWS(PYL_E_NO_CELLS, store.load(bytes));
    CHECK_EQ(error.state, PYL_STATE_UNCHANGED);
    CHECK(snapshot(store) == before);
    CHECK_EQ(live_counts().grammars, 1);
    refuses = false;
    check_same_branch(store, branch, store, store.load(bytes));
}

void test_views_and_handles() {
    Store store(model(), context());
    const pyl_branch branch = root(store, text(5));
    const std::string bytes = store.save(branch, true);
    const Branches kids = fork(store, branch, 3);
    store.prune(kids);
    const uint64_t epoch = store.epoch();
    const pyl_branch loaded = store.load(bytes);
    CHECK(store.epoch() != epoch);
    for (const pyl_branch kid : kids) CHECK(kid != loaded);  // the slot is used again, the handle is not
    for (const pyl_branch kid : kids) CHECK_THROWS(PYL_E_STALE, store.get(kid));
    CHECK(store.list(0) == Branches({branch, loaded}));
}

}  // namespace

int main() {
    test_every_field_comes_back();
    test_odd_but_whole_branches();
    test_a_grammar_half_way();
    test_a_fork_is_saved_with_what_it_inherited();
    test_after_reading_anew_and_taking_over();
    test_no_room();
    test_poisoned_and_stale();
    test_both_sides_are_named();
    test_damage();
    test_fields_out_of_range();
    test_lengths_out_of_range();
    test_positions_that_leave_no_room();
    test_every_byte_wrong_and_sealed();
    test_random_pieces_sealed();
    test_the_engine_refuses();
    test_views_and_handles();
    CHECK_EQ(live_counts().grammars + live_counts().branches + live_counts().contexts + live_counts().weights, 0);
    return check::result("test_saved");
}
