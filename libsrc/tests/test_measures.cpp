// What is said about logits and tokens (metrics, priors, logits of some tokens), what is computed beside the branches (score, embeddings),
// and what is read anew; and what each of them leaves behind when the n-th call of the engine fails.
#include <cmath>
#include <thread>

#include "check.hpp"
#include "core/embedder.hpp"
#include "stub_store.hpp"

using namespace stub;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr int32_t both = PYL_METRICS_MODEL | PYL_METRICS_SAMPLING;

bool near(double a, double b, double tolerance = 1e-6) { return std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b)); }

ContextParams deterministic(ContextParams params) {
    params.deterministic = true;
    return params;
}

SamplingParams wild() {
    SamplingParams p;
    p.temperature = 1.4f, p.top_k = 60, p.top_p = 0.9f, p.min_p = 0.02f, p.typical_p = 0.95f, p.penalty_repeat = 1.2f, p.penalty_frequency = 0.1f;
    return p;
}

void bias(Store & store, pyl_branch branch, int32_t kind, const Tokens & tokens, const std::vector<float> & by) { store.set_bias(branch, kind, tokens, by.data()); }
void never_ends(Store & store, pyl_branch branch) { bias(store, branch, PYL_BIAS, {257, 258}, {-inf, -inf}); }

// In doubles, from the logits alone.
struct Reference {
    std::vector<double> p;
    double entropy = 0, log_sum = 0;
    explicit Reference(const Row & row) {
        double top = -std::numeric_limits<double>::infinity(), sum = 0;
        for (const float x : row) top = std::max(top, static_cast<double>(x));
        for (const float x : row) sum += std::exp(x - top);
        log_sum = top + std::log(sum);
        for (const float x : row) p.push_back(std::exp(x - log_sum));
        for (const double x : p) entropy -= x > 0 ? x * std::log(x) : 0;
    }
    double surprisal(Token token) const { return -std::log(p[static_cast<size_t>(token)]); }
};

// ---------------------------------------------------------------------------------------------------------------- metrics

void test_model_level() {
    Store store(model(), context());
    const pyl_branch a = root(store, text(8), wild(), 3), b = root(store, text(5, 2), wild(), 4);
    for (const pyl_branch x : {a, b}) never_ends(store, x);
    store.set_metrics(a, PYL_METRICS_MODEL);
    double surprisal = 0, entropy = 0;
    for (uint64_t i = 1; i <= 40; i++) {
        const Reference before(row(store, a));
        Token token = static_cast<Token>(i * 7 % 250);
        if (i % 2) {
            commit(store, {b, a}, {9, token});
        } else {
            Lanes l = lanes({a, b}, 1);
            run_tick(store, l);
            token = l.taken(0)[0];
        }
        const pyl_metrics & m = store.get(a).metrics;
        CHECK_EQ(m.n_tokens, i);
        CHECK(near(m.last_model_surprisal, before.surprisal(token)) && near(m.last_model_entropy, before.entropy));
        CHECK(near(m.model_surprisal, surprisal += before.surprisal(token)) && near(m.model_entropy, entropy += before.entropy));
        CHECK(m.n_inside == 0 && m.sampling_surprisal == 0);  // that level is off
        CHECK_EQ(store.get(b).metrics.n_tokens, 0);            // and that branch
    }
    store.set_metrics(a, PYL_METRICS_MODEL);
    CHECK_EQ(store.get(a).metrics.n_tokens, 0);  // from zero, also at the same level
    commit(store, {a}, {1});
    store.set_metrics(a, PYL_METRICS_NONE);
    commit(store, {a}, {1});
    CHECK_EQ(store.get(a).metrics.n_tokens, 0);
    for (const int32_t bad : {-1, 4, 7, 1 << 20}) CHECK_THROWS(PYL_E_INVALID, store.set_metrics(a, bad));
}

// Whatever the settings: the probabilities it measures by are one distribution, and tokens are drawn from it.
void test_sampling_level_is_one_distribution() {
    Store store(model(), context(4096, 64, 16));
    std::vector<SamplingParams> settings{SamplingParams(), wild(), greedy()};
    for (const auto & change : std::vector<std::function<void(SamplingParams &)>>{
             [](SamplingParams & p) { p.top_k = 5; }, [](SamplingParams & p) { p.top_p = 0.5f; }, [](SamplingParams & p) { p.min_p = 0.3f; }, [](SamplingParams & p) { p.typical_p = 0.3f; },
             [](SamplingParams & p) { p.temperature = 0.1f; }, [](SamplingParams & p) { p.temperature = 9.0f; }, [](SamplingParams & p) { p.penalty_repeat = 2.0f, p.penalty_presence = 1.0f; }}) {
        SamplingParams p;
        p.top_k = 0, p.top_p = 1, p.min_p = 0, p.temperature = 1;
        change(p);
        settings.push_back(p);
    }
    for (size_t k = 0; k < settings.size(); k++) {
        const pyl_branch branch = root(store, text(20, static_cast<uint32_t>(k)), settings[k], k);
        never_ends(store, branch);
        bias(store, branch, PYL_STEER, {40, 41}, {2.0f, -3.0f});
        for (int round = 0; round < 3; round++) {
            store.set_metrics(branch, both);
            const Branches forks = fork(store, branch, 1);
            double sum = 0, entropy = 0;
            std::vector<double> p(300);
            for (Token token = 0; token < 300; token++) {  // forced, one after another, each measured at the same point
                const pyl_branch probe = fork(store, branch, 1)[0];
                if (const Branch & from = store.get(branch); from.steer) bias(store, probe, PYL_STEER, {40, 41}, {2.0f, -3.0f});
                commit(store, {probe}, {token});
                const pyl_metrics & m = store.get(probe).metrics;
                CHECK_EQ(m.n_tokens, 1);
                CHECK_EQ(m.n_inside, std::isfinite(m.last_sampling_surprisal));
                p[static_cast<size_t>(token)] = std::exp(-m.last_sampling_surprisal);
                sum += p[static_cast<size_t>(token)];
                entropy = m.last_sampling_entropy;
                CHECK(m.n_inside ? m.sampling_surprisal == m.last_sampling_surprisal && m.sampling_entropy == entropy : m.sampling_surprisal == 0 && m.sampling_entropy == 0);
                store.prune(Branches{probe});
            }
            double told = 0;
            for (const double x : p) told -= x > 0 ? x * std::log(x) : 0;
            CHECK(near(sum, 1) && near(entropy, told, 1e-5));
            CHECK(p[257] == 0 && p[258] == 0);  // banned
            for (int i = 0; i < 200; i++) {  // what is drawn is in it
                Token token = -1;
                store.sample(Branches{branch}, &token);
                CHECK(p[static_cast<size_t>(token)] > 0);
            }
            store.prune(forks);
            Lanes l = lanes({branch}, 1);
            run_tick(store, l);
            const pyl_metrics & m = store.get(branch).metrics;
            CHECK(m.n_inside == 1 && near(m.sampling_surprisal, -std::log(p[static_cast<size_t>(l.taken(0)[0])]), 1e-9));
        }
        store.prune(Branches{branch});
    }
}

void test_forced_and_greedy() {
    Store store(model(), context());
    const pyl_branch branch = root(store, text(8), greedy(), 3);
    store.set_metrics(branch, both);
    Lanes l = lanes({branch}, 6);
    never_ends(store, branch);
    run_tick(store, l);
    pyl_metrics m = store.get(branch).metrics;
    CHECK(m.n_tokens == 6 && m.n_inside == 6 && m.sampling_surprisal == 0 && m.sampling_entropy == 0 && m.model_surprisal > 0);
    CHECK(!std::signbit(m.last_sampling_surprisal));  // 0, not -0
    Row row_ = row(store, branch);
    const Token worst = static_cast<Token>(std::min_element(row_.begin(), row_.end()) - row_.begin());
    commit(store, {branch}, {worst});
    m = store.get(branch).metrics;
    CHECK(m.n_tokens == 7 && m.n_inside == 6 && m.sampling_surprisal == 0 && std::isinf(m.last_sampling_surprisal) && m.last_sampling_entropy == 0);
    CHECK(near(m.last_model_surprisal, Reference(row_).surprisal(worst)));

    // Under a grammar that leaves one token, it is no surprise for the sampler, whatever the model thinks.
    const pyl_branch strict = fork(store, branch, 1)[0];
    store.set_grammar(strict, {false, "root ::= \"abc\"", "root"});
    store.set_metrics(strict, both);
    store.get(strict).sampler.set_params(wild());
    Lanes g = lanes({strict}, 9);
    run_tick(store, g);
    m = store.get(strict).metrics;
    CHECK(m.n_tokens == 3 && m.n_inside == 3 && m.sampling_surprisal == 0 && m.model_surprisal > 1);

    // Before anything was decoded there is nothing to measure by.
    const pyl_branch fresh = store.create(0, greedy(), 1);
    store.set_metrics(fresh, both);
    commit(store, {fresh}, {5});
    CHECK_EQ(store.get(fresh).metrics.n_tokens, 0);
    commit(store, {fresh}, {6});
    CHECK_EQ(store.get(fresh).metrics.n_tokens, 1);
    prefill(store, fresh, text(4));
    CHECK_EQ(store.get(fresh).metrics.n_tokens, 1);  // a prompt is not measured

    // Where every token is banned, forcing one is a surprise without bounds; measuring must not make the commit fail.
    store.set_logits(fresh, Row(300, -inf));
    commit(store, {fresh}, {7});
    m = store.get(fresh).metrics;
    CHECK(m.n_tokens == 2 && m.n_inside == 0 && std::isinf(m.model_surprisal) && std::isinf(m.last_model_surprisal) && m.last_model_entropy == 0 && std::isinf(m.last_sampling_surprisal));
    Row one(300, -inf);
    one[9] = 0.5f;
    store.set_logits(fresh, one);
    commit(store, {fresh}, {9});
    CHECK(store.get(fresh).metrics.last_model_surprisal == 0 && store.get(fresh).metrics.last_model_entropy == 0);
}

void test_metrics_are_carried() {
    Store store(model(), context());
    const pyl_branch top = root(store, text(8), wild(), 3);
    never_ends(store, top);
    store.set_metrics(top, both);
    Lanes l = lanes({top}, 5);
    run_tick(store, l);
    const pyl_metrics before = store.get(top).metrics;
    const Branches kids = fork(store, top, 2, {1, 2});
    for (const pyl_branch kid : kids) CHECK(same_metrics(store.get(kid).metrics, before));
    Lanes k = lanes(kids, 4);
    run_tick(store, k);
    CHECK_EQ(store.get(kids[0]).metrics.n_tokens, 9);
    CHECK(!same_metrics(store.get(kids[0]).metrics, store.get(kids[1]).metrics));
    CHECK(same_metrics(store.get(top).metrics, before));
    const pyl_metrics child = store.get(kids[1]).metrics;
    store.fast_forward(top, kids[1]);
    CHECK(same_metrics(store.get(top).metrics, child));
    uint32_t landed = 0;
    store.prune(Branches{kids[0]});
    store.reseed_kv(top, text(6, 9), landed);
    CHECK(same_metrics(store.get(top).metrics, child));
    const pyl_branch loaded = store.load(store.save(top, true));
    CHECK(same_metrics(store.get(loaded).metrics, child));
    store.retain_only(loaded);
    CHECK(same_metrics(store.get(loaded).metrics, child));
}

void test_metrics_of_what_failed() {
    for (const int rc : {1, -1, 2, -2}) {
        for (const bool in_tick : {false, true}) {
            for (const bool alone : {false, true}) {
                Store store(model("n_vocab=300;fail_at=4;fail_rows=1;fail_rc=" + std::to_string(rc)), alone ? deterministic(context()) : context());
                const pyl_branch a = root(store, text(8), wild(), 3), b = root(store, text(8), wild(), 4);
                for (const pyl_branch x : {a, b}) never_ends(store, x), store.set_metrics(x, both);
                Lanes l = lanes({a}, 1);
                run_tick(store, l);  // the third
                const pyl_metrics before_a = store.get(a).metrics, before_b = store.get(b).metrics;
                CHECK_EQ(before_a.n_tokens, 1);
                Lanes failing = lanes({b, a}, 1);
                try {
                    if (in_tick) run_tick(store, failing);
                    else commit(store, {b, a}, {5, 6});
                    CHECK(false);
                } catch (const Error & error) {
                    CHECK_EQ(error.engine_rc, rc);
                }
                CHECK(same_metrics(store.get(a).metrics, before_a) && same_metrics(store.get(b).metrics, before_b));
                if (rc == 2 || rc == -2) continue;
                Lanes again = lanes({b, a}, 3);
                run_tick(store, again);
                CHECK(store.get(a).metrics.n_tokens == 4 && store.get(b).metrics.n_tokens == 3);
            }
        }
    }
    // A grammar's refusal, and a tick's unlanded ends, are not measured either.
    Store store(model(), context());
    const pyl_branch a = root(store, text(8), greedy(), 3);
    store.set_metrics(a, both);
    store.set_grammar(a, {false, "root ::= \"x\"", "root"});
    CHECK_THROWS(PYL_E_GRAMMAR, commit(store, {a}, {'y'}));
    CHECK_EQ(store.get(a).metrics.n_tokens, 0);
    Lanes l = lanes({a}, 5);
    run_tick(store, l);
    CHECK(l.lanes[0].finish == PYL_FINISH_EOG && store.get(a).metrics.n_tokens == 1);
}

// ------------------------------------------------------------------------------------------------- priors, logits of some

void test_priors() {
    Store store(model(), context());
    const pyl_branch branch = root(store, text(8));
    Tokens tokens(300, -7);
    std::vector<float> log_probs(300, -7);
    const auto priors = [&](size_t capacity) {
        std::fill(tokens.begin(), tokens.end(), -7);
        return store.priors(branch, std::span(tokens).first(capacity), log_probs.data());
    };
    const auto check_whole = [&](size_t n_legal) {
        const Store::Priors found = priors(300);
        CHECK(found.n == n_legal && found.n_legal == n_legal);
        double sum = 0;
        std::vector<bool> seen(300);
        for (size_t i = 0; i < found.n; i++) {
            sum += std::exp(static_cast<double>(log_probs[i]));
            CHECK(!seen[static_cast<size_t>(tokens[i])]);
            seen[static_cast<size_t>(tokens[i])] = true;
            if (i) CHECK(log_probs[i] < log_probs[i - 1] || (log_probs[i] == log_probs[i - 1] && tokens[i] > tokens[i - 1]));
        }
        CHECK(near(sum, 1, 1e-5));
    };
    const Snapshot before = snapshot(store);
    check_whole(300);
    const Reference reference(row(store, branch));
    for (size_t i = 0; i < 300; i++) CHECK(near(log_probs[i], -reference.surprisal(tokens[i]), 1e-5));
    const Tokens all = tokens;
    for (const size_t n : {0, 1, 2, 10, 299}) {
        const Store::Priors found = priors(n);
        CHECK(found.n == n && found.n_legal == 300);
        CHECK(std::equal(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(n), all.begin()) && (n == 300 || tokens[n] == -7));
    }
    bias(store, branch, PYL_BIAS, {all[0], all[1]}, {-inf, 3.0f});
    check_whole(299);
    CHECK_EQ(tokens[0], all[1]);
    bias(store, branch, PYL_STEER, {all[1], all[2]}, {-inf, -inf});
    check_whole(297);
    CHECK_EQ(tokens[0], all[3]);
    bias(store, branch, PYL_STEER, {}, {});
    bias(store, branch, PYL_BIAS, {}, {});
    CHECK(snapshot(store) == before);

    store.set_grammar(branch, {false, "root ::= \"ab\"", "root"});
    check_whole(1);
    CHECK(tokens[0] == 'a' && log_probs[0] == 0);
    check_whole(1);  // asking changed nothing
    bias(store, branch, PYL_BIAS, {'a'}, {-inf});
    tokens[0] = -7;
    CHECK_THROWS(PYL_E_ILLEGAL, store.priors(branch, tokens, log_probs.data()));
    CHECK_EQ(tokens[0], -7);
    bias(store, branch, PYL_BIAS, {}, {});
    store.set_grammar(branch, {false, "", "root"});

    // Ties go to the smaller id; a vast bias is no NaN, and two of them are even.
    store.set_logits(branch, Row(300, 1.5f));
    check_whole(300);
    for (Token t = 0; t < 300; t++) CHECK_EQ(tokens[static_cast<size_t>(t)], t);
    bias(store, branch, PYL_BIAS, {70, 60}, {3e38f, 3e38f});
    bias(store, branch, PYL_STEER, {60, 70}, {3e38f, 3e38f});
    check_whole(300);
    CHECK(tokens[0] == 60 && tokens[1] == 70 && near(log_probs[0], std::log(0.5)) && near(log_probs[1], std::log(0.5)) && log_probs[2] == -inf);
    store.get(branch).sampler.set_params(wild());
    for (int i = 0; i < 50; i++) {
        Token token = -1;
        store.sample(Branches{branch}, &token);
        CHECK(token == 60 || token == 70);
    }
    store.set_logits(branch, Row(300, -inf));
    CHECK_THROWS(PYL_E_ILLEGAL, store.priors(branch, tokens, log_probs.data()));
    const pyl_branch none = store.create(0, greedy(), 1);
    CHECK_THROWS(PYL_E_NO_LOGITS, store.priors(none, tokens, log_probs.data()));
    CHECK_THROWS(PYL_E_STALE, store.priors(0, tokens, log_probs.data()));
}

void test_logits_of_some() {
    Store store(model(), context());
    const pyl_branch branch = root(store, text(8)), none = store.create(0, greedy(), 1);
    const Row all = row(store, branch);
    const Tokens tokens{299, 0, 17, 17};
    Row out(4, -7);
    store.logits_at(branch, tokens, out.data());
    CHECK(out == Row({all[299], all[0], all[17], all[17]}));
    out.assign(4, -7);
    const Error error = CHECK_THROWS(PYL_E_INVALID, store.logits_at(branch, Tokens{1, 300}, out.data()));
    CHECK(error.index == 1 && out[0] == -7);
    CHECK_THROWS(PYL_E_INVALID, store.logits_at(branch, Tokens{-1}, out.data()));
    CHECK_THROWS(PYL_E_NO_LOGITS, store.logits_at(none, tokens, out.data()));
    CHECK_THROWS(PYL_E_STALE, store.logits_at(0, tokens, out.data()));
    store.logits_at(branch, {}, nullptr);
}

// ------------------------------------------------------------------------------------------------------------------ score

std::vector<std::span<const Token>> spans(const std::vector<Tokens> & texts) { return {texts.begin(), texts.end()}; }

std::vector<Tokens> prompts(size_t n) {
    std::vector<Tokens> out;
    for (size_t i = 0; i < n; i++) out.push_back(text(1 + i * 5 % 11, static_cast<uint32_t>(100 + i)));
    return out;
}

// A few branches in every state, and one to continue.
struct Grove {
    Store store;
    pyl_branch source, bystander, below;
    Tokens source_text;
    explicit Grove(const std::string & options = "n_vocab=300", ContextParams params = context(120, 16, 7)) : store(model(options), params), source_text(text(20)) {
        source = root(store, source_text, wild(), 3);
        bystander = root(store, text(9, 2), wild(), 4);
        below = fork(store, source, 1)[0];
        store.set_metrics(source, both);
        store.set_grammar(source, {false, "root ::= \"abc\"", "root"});
        never_ends(store, bystander);
    }
};
constexpr uint64_t grove_decodes = 3;  // 20 tokens in two dispatches of 16, and one more

void check_scores(Store & store, const std::vector<Tokens> & texts, const Tokens & before, const Row & out, const Tokens & ids) {
    const size_t width = ids.empty() ? store.n_vocab() : ids.size();
    for (size_t i = 0; i < texts.size(); i++) {
        const Row want = replay(before + texts[i]);
        for (size_t k = 0; k < width; k++) CHECK(out[i * width + k] == want[ids.empty() ? k : static_cast<size_t>(ids[k])]);
    }
}

void test_score() {
    for (const bool alone : {false, true}) {
        Grove g("n_vocab=300", alone ? deterministic(context(120, 16, 7)) : context(120, 16, 7));
        const Snapshot before = snapshot(g.store);
        for (const size_t n : {1, 3, 4, 5, 40}) {  // four leases are free
            for (const Tokens & ids : {Tokens{}, Tokens{299, 5, 5, 0}}) {
                for (const pyl_branch source : {pyl_branch{0}, g.source}) {
                    Row out(n * (ids.empty() ? 300 : ids.size()), -7);
                    const auto texts = prompts(n);
                    g.store.score(source, spans(texts), ids, out.data());
                    check_scores(g.store, texts, source ? g.source_text : Tokens(), out, ids);
                    CHECK(snapshot(g.store) == before);
                }
            }
        }
        CHECK_EQ(live_counts().grammars, 1);
        // An empty prompt is what the source has already; without a source, or one without logits, it is nothing.
        std::vector<Tokens> texts{{}, text(3), {}};
        Row out(3, -7);
        g.store.score(g.source, spans(texts), Tokens{9}, out.data());
        check_scores(g.store, texts, g.source_text, out, {9});
        const pyl_branch bare = g.store.create(0, greedy(), 1);
        Error error = CHECK_THROWS(PYL_E_INVALID, g.store.score(0, spans({text(2), {}}), Tokens{9}, out.data()));
        CHECK_EQ(error.index, 1);
        error = CHECK_THROWS(PYL_E_INVALID, g.store.score(bare, spans({text(2), {}}), Tokens{9}, out.data()));
        CHECK_EQ(error.index, 1);
        g.store.score(bare, spans({text(2)}), Tokens{9}, out.data());
        CHECK(out[0] == replay(text(2))[9]);
        g.store.prune(Branches{bare});
        g.store.score(g.source, {}, {}, nullptr);
        CHECK(snapshot(g.store) == before);
    }
}

void test_score_refuses_before_it_starts() {
    Grove g;  // 120 cells, 29 of them taken
    const Snapshot before = snapshot(g.store);
    Row out(5, -7);
    const uint64_t dispatches = pressure(g.store).n_dispatches;
    const auto refused = [&](int32_t code, pyl_branch source, const std::vector<Tokens> & texts, const Tokens & ids) {
        const Error error = CHECK_THROWS(code, g.store.score(source, spans(texts), ids, out.data()));
        CHECK(snapshot(g.store) == before && error.state == PYL_STATE_UNCHANGED && !error.partial);
        CHECK(out == Row(5, -7) && pressure(g.store).n_dispatches == dispatches);
        return error;
    };
    Error error = refused(PYL_E_CONTEXT, g.source, {text(3), text(92), text(3)}, {1});
    CHECK(error.index == 1 && error.need == 92 && error.have == 91);
    CHECK_EQ(refused(PYL_E_INVALID, 0, {text(3), {1, 300}}, {1}).index, 1);
    CHECK_EQ(refused(PYL_E_INVALID, 0, {{-1}}, {1}).index, 0);
    CHECK_EQ(refused(PYL_E_INVALID, 0, {text(3)}, {1, 300}).index, 1);
    refused(PYL_E_STALE, g.source + (7ull << 32), {text(3)}, {1});
    const Branches rest = fork(g.store, g.source, 4);
    error = CHECK_THROWS(PYL_E_NO_LEASE, g.store.score(0, spans({text(3)}), Tokens{1}, out.data()));
    CHECK(error.need == 1 && error.have == 0);
    g.store.prune(rest);
    CHECK(snapshot(g.store) == before);
    // As large as it can be it fits, next to smaller ones.
    const std::vector<Tokens> texts{text(91, 3), text(2), text(91, 4), text(90, 5), text(2, 6)};
    g.store.score(g.source, spans(texts), Tokens{7}, out.data());
    check_scores(g.store, texts, g.source_text, out, {7});
    CHECK(snapshot(g.store) == before);
}

void test_score_when_the_engine_fails() {
    const auto texts = prompts(23);
    uint64_t n_decodes = 0;
    {
        Grove g;
        Row out(23, -7);
        const uint64_t before = pressure(g.store).n_dispatches;
        CHECK_EQ(before, grove_decodes);
        g.store.score(g.source, spans(texts), Tokens{7}, out.data());
        n_decodes = pressure(g.store).n_dispatches - before;
        CHECK(n_decodes > 6);
    }
    for (const int rc : {1, -1, 2, -2, -3}) {
        for (const int rows : {0, 1, 5}) {
            for (uint64_t n = 1; n <= n_decodes; n++) {
                Grove g("n_vocab=300;fail_at=" + std::to_string(grove_decodes + n) + ";fail_rc=" + std::to_string(rc) + ";fail_rows=" + std::to_string(rows));
                const Snapshot before = snapshot(g.store);
                Row out(23, -7);
                const int32_t code = rc == 1 ? PYL_E_NO_CELLS : rc == -1 ? PYL_E_INTERNAL : PYL_E_DECODE;
                const Error error = CHECK_THROWS(code, g.store.score(g.source, spans(texts), Tokens{7}, out.data()));
                CHECK(error.state == PYL_STATE_UNCHANGED && !error.partial && error.engine_rc == rc);
                CHECK(snapshot(g.store) == before);
                CHECK_EQ(live_counts().grammars, 1);
                g.store.score(g.source, spans(texts), Tokens{7}, out.data());
                check_scores(g.store, texts, g.source_text, out, {7});
                CHECK(snapshot(g.store) == before);
                const pyl_branch filler = root(g.store, text(91, 8));  // and the cache is as empty as the books say
                CHECK(same_bits(row(g.store, filler), replay(text(91, 8))));
            }
        }
    }
}

void test_score_is_cancelled() {
    const auto texts = prompts(23);
    for (uint64_t at = 1; at < 12; at++) {
        Store * store = nullptr;
        uint64_t n = 0;
        const auto watched = std::make_shared<Watched>(model(), [](const std::function<void()> & call) { call(); }, [&](const Batch &) {
            if (store && ++n == at) store->cancel();
        });
        Store one(watched, context(120, 16, 7));
        const pyl_branch source = root(one, text(20), wild(), 1);
        const Snapshot before = snapshot(one);
        Row out(23, -7);
        store = &one;
        const Store::Call call(one);  // entering clears what was asked for before
        try {
            one.score(source, spans(texts), Tokens{7}, out.data());
            CHECK(n <= at);  // asked for in the last dispatch: nothing was left to stop
        } catch (const Error & error) {
            CHECK(error.code == PYL_E_CANCELLED && error.state == PYL_STATE_UNCHANGED && n == at);
        }
        store = nullptr;
        Snapshot after{};
        for (const pyl_branch handle : one.list(0)) after.branches.push_back(facts(one, handle));
        CHECK(after.branches == before.branches);
    }
}

// -------------------------------------------------------------------------------------------------------------- reseed_kv

void test_reseed() {
    for (const bool alone : {false, true}) {
        Store store(model(), alone ? deterministic(context(64, 16, 5)) : context(64, 16, 5));
        const pyl_branch top = root(store, text(30), wild(), 3);
        never_ends(store, top);
        store.set_grammar(top, {false, "root ::= \"abcdef\"", "root"});
        store.set_metrics(top, both);
        Lanes l = lanes({top}, 2);
        run_tick(store, l);
        const Facts before = facts(store, top);
        uint32_t landed = 77;
        store.reseed_kv(top, text(64, 9), landed);  // as many as the cache has cells: its own are free
        CHECK_EQ(landed, 64);
        Facts after = facts(store, top);
        CHECK(after.position == 64 && after.cells_own == 64 && same_bits(after.logits, replay(text(64, 9))));
        after.position = before.position, after.cells_own = before.cells_own, after.logits = before.logits;
        CHECK(after == before);  // and nothing else has changed
        CHECK_EQ(pressure(store).cells_used, 64);
        store.reseed_kv(top, text(5), landed);
        Lanes rest = lanes({top}, 9);
        run_tick(store, rest);
        CHECK(rest.taken(0) == Tokens({'c', 'd', 'e', 'f'}));

        // A fork lets go of what it inherited; the others keep it.
        Store tree(model(), context(64, 16, 5));
        const pyl_branch trunk = root(tree, text(20));
        const Branches kids = fork(tree, trunk, 2);
        prefill(tree, kids[0], text(10, 2));
        tree.reseed_kv(kids[0], text(34, 3), landed);
        CHECK(tree.get(kids[0]).cells_own == 34 && tree.get(kids[0]).cells_inherited == 0 && tree.get(kids[0]).position == 34);
        CHECK_EQ(pressure(tree).cells_used, 54);
        CHECK(tree.handle_of(tree.get(kids[0]).parent) == trunk);
        CHECK(same_bits(row(tree, kids[0]), replay(text(34, 3))) && same_bits(row(tree, trunk), replay(text(20))));
        commit(tree, kids, {1, 2});
        CHECK(same_bits(row(tree, kids[0]), replay(text(34, 3) + Tokens{1})) && same_bits(row(tree, kids[1]), replay(text(20) + Tokens{2})));
        // It no longer continues the trunk, which therefore cannot take it over.
        CHECK_THROWS(PYL_E_DIVERGED, tree.fast_forward(trunk, kids[0]));
        tree.retain_only(kids[0]);
        CHECK_EQ(pressure(tree).cells_used, 35);
    }
}

void test_reseed_refuses() {
    Grove g;
    const Snapshot before = snapshot(g.store);
    uint32_t landed = 77;
    const auto refused = [&](int32_t code, pyl_branch branch, const Tokens & tokens) {
        landed = 77;
        const Error error = CHECK_THROWS(code, g.store.reseed_kv(branch, tokens, landed));
        CHECK(snapshot(g.store) == before && error.state == PYL_STATE_UNCHANGED && landed == 0);
        return error;
    };
    refused(PYL_E_HAS_CHILDREN, g.source, text(3));
    refused(PYL_E_INVALID, g.below, {});
    CHECK_EQ(refused(PYL_E_INVALID, g.below, {1, 2, 300}).index, 2);
    refused(PYL_E_INVALID, g.below, {-1});
    refused(PYL_E_STALE, g.below + (9ull << 32), text(3));
    const Error error = refused(PYL_E_CONTEXT, g.bystander, text(101));
    CHECK(error.need == 101 && error.have == 100);  // 120 less the 29 in use, and its own nine
    CHECK_EQ(refused(PYL_E_CONTEXT, g.below, text(92)).have, 91);  // what it inherited is not its own to give
}

void test_reseed_when_the_engine_fails() {
    for (const int rc : {1, -1, 2, -2}) {
        for (const int rows : {0, 1, 7}) {
            for (uint32_t n = 1; n <= 3; n++) {  // 40 tokens in dispatches of 16
                for (const bool inherits : {false, true}) {
                    Grove g("n_vocab=300;fail_at=" + std::to_string(grove_decodes + n) + ";fail_rc=" + std::to_string(rc) + ";fail_rows=" + std::to_string(rows));
                    const pyl_branch branch = inherits ? g.below : g.bystander;
                    const Facts before = facts(g.store, branch), others[2] = {facts(g.store, g.source), facts(g.store, inherits ? g.bystander : g.below)};
                    uint32_t landed = 77;
                    const bool undone = rc == 1 || rc == -1;
                    const Error error = CHECK_THROWS(rc == 1 ? PYL_E_NO_CELLS : rc == -1 ? PYL_E_INTERNAL : PYL_E_DECODE, g.store.reseed_kv(branch, text(40, 9), landed));
                    CHECK(error.state == (undone ? PYL_STATE_ADVANCED : PYL_STATE_POISONED) && error.partial && error.engine_rc == rc);
                    CHECK_EQ(landed, 16 * (n - 1));
                    const Facts after = facts(g.store, branch);
                    CHECK(after.is_poisoned == !undone && after.position == static_cast<Pos>(landed) && after.cells_inherited == 0 && after.logits.empty());
                    CHECK_EQ(after.cells_own, undone ? landed : landed + std::min<uint32_t>(16, 40 - landed));  // charged for what may have landed
                    CHECK(after.draws == before.draws && after.history == before.history && same_metrics(after.metrics, before.metrics) && after.has_grammar == before.has_grammar);
                    CHECK(facts(g.store, g.source) == others[0] && facts(g.store, inherits ? g.bystander : g.below) == others[1]);
                    if (undone) {  // it can go on from there
                        const Tokens whole = text(40, 9);
                        prefill(g.store, branch, Tokens(whole.begin() + landed, whole.end()));
                        CHECK(same_bits(row(g.store, branch), replay(whole)));
                    }
                    g.store.prune(Branches{branch});
                    CHECK_EQ(pressure(g.store).cells_used, inherits ? 29 : 20);
                    const pyl_branch filler = root(g.store, text(91, 8));
                    CHECK(same_bits(row(g.store, filler), replay(text(91, 8))));
                }
            }
        }
    }
}

void test_reseed_is_cancelled() {
    for (uint64_t at = 0; at < 3; at++) {
        Store * store = nullptr;
        uint64_t n = 0;
        const auto watched = std::make_shared<Watched>(model(), [](const std::function<void()> & call) { call(); }, [&](const Batch &) {
            if (store && ++n == at) store->cancel();
        });
        Store one(watched, context(120, 16, 7));
        const pyl_branch branch = root(one, text(20), wild(), 1);
        uint32_t landed = 77;
        const Tokens whole = text(40, 9);
        {
            const Store::Call call(one);
            store = &one;
            if (at == 0) one.cancel();  // before the first dispatch, and after the call began
            const Error error = CHECK_THROWS(PYL_E_CANCELLED, one.reseed_kv(branch, whole, landed));
            store = nullptr;
            CHECK(error.state == PYL_STATE_ADVANCED && error.partial && landed == 16 * at);
        }
        CHECK(one.get(branch).position == static_cast<Pos>(landed) && !one.get(branch).is_poisoned && !one.get(branch).logits.any());
        CHECK_EQ(pressure(one).cells_used, landed);
        prefill(one, branch, Tokens(whole.begin() + landed, whole.end()));
        CHECK(same_bits(row(one, branch), replay(whole)));
    }
}

// ---------------------------------------------------------------------------------------------------------- deterministic

void test_each_dispatch_holds_one_branch() {
    size_t n = 0;
    std::vector<Batch> seen;
    const auto watched = std::make_shared<Watched>(model(), [](const std::function<void()> & call) { call(); }, [&](const Batch & batch) {
        seen.push_back(batch);
        n++;
    });
    Store store(watched, deterministic(context(256, 16, 8)));
    const auto check_alone = [&](size_t dispatches) {
        CHECK_EQ(seen.size(), dispatches);
        for (const Batch & batch : seen) CHECK(std::all_of(batch.seq.begin(), batch.seq.end(), [&](Seq s) { return s == batch.seq[0]; }));
        seen.clear();
    };
    const pyl_branch top = root(store, text(20), greedy());
    check_alone(2);
    const Branches kids = fork(store, top, 3);
    std::vector<Tokens> texts{text(3), text(17), text(2)};
    std::vector<pyl_run> runs;
    for (size_t i = 0; i < 3; i++) runs.push_back(run(kids[i], texts[i]));
    CHECK_EQ(prefill(store, runs), 4);
    check_alone(4);
    commit(store, {kids[0], top, kids[2]}, {1, 2, 3});
    check_alone(3);
    for (const pyl_branch kid : kids) store.get(kid).grammar = std::make_unique<OnlyThese>(Tokens{65, 66});
    Lanes l = lanes(kids, 4, {}, {0, 2, 0});
    run_tick(store, l);
    CHECK(l.tick.n_ticks == 4 && l.tick.n_dispatches == 10);
    check_alone(10);
    CHECK(same_bits(row(store, kids[1]), replay(text(20) + texts[1] + l.taken(1))));
    CHECK(same_bits(row(store, kids[2]), replay(text(20) + texts[2] + Tokens{3} + l.taken(2))));
    CHECK(pressure(store).deterministic == 1);
    CHECK(n == pressure(store).n_dispatches);
}

// The n-th of five fails: those before it landed, it is as the rule says, and those after were never tried.
void test_deterministic_failures() {
    for (const int rc : {1, -1, 2, -2}) {
        for (const int rows : {0, 1}) {
            for (uint32_t n = 0; n < 5; n++) {
                for (const bool in_tick : {false, true}) {
                    Store store(model("n_vocab=300;fail_at=" + std::to_string(5 + 1 + n) + ";fail_rc=" + std::to_string(rc) + ";fail_rows=" + std::to_string(rows)), deterministic(context(256, 32, 8)));
                    Branches branches;
                    std::vector<Facts> before;
                    for (uint32_t i = 0; i < 5; i++) {
                        branches.push_back(root(store, text(4 + i, i), wild(), i));
                        never_ends(store, branches[i]);
                        store.set_metrics(branches[i], both);
                    }
                    for (const pyl_branch b : branches) before.push_back(facts(store, b));
                    const bool undone = rc == 1 || rc == -1;
                    Lanes l = lanes(branches, 3);
                    Tokens tokens{10, 11, 12, 13, 14};
                    Error error(PYL_OK, "");
                    const int32_t code = rc == 1 ? PYL_E_NO_CELLS : rc == -1 ? PYL_E_INTERNAL : PYL_E_DECODE;
                    if (in_tick) error = CHECK_THROWS(code, run_tick(store, l));
                    else error = CHECK_THROWS(code, commit(store, branches, tokens));
                    CHECK_EQ(error.index, n);
                    CHECK_EQ(error.partial, n > 0);
                    CHECK_EQ(error.state, !undone ? PYL_STATE_POISONED : n ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED);
                    uint32_t used = 0;
                    for (uint32_t i = 0; i < 5; i++) {
                        const Facts after = facts(store, branches[i]);
                        used += after.cells_own;
                        if (in_tick) {
                            CHECK_EQ(l.lanes[i].n_tokens, i < n);
                            CHECK_EQ(l.lanes[i].state, i < n ? PYL_STATE_ADVANCED : i == n && !undone ? PYL_STATE_POISONED : PYL_STATE_UNCHANGED);
                            CHECK(l.lanes[i].finish == PYL_FINISH_NONE && l.lanes[i].final_token == -1);
                            if (i < n) tokens[i] = l.taken(i)[0];
                        }
                        if (i < n) {
                            CHECK(after.position == before[i].position + 1 && after.last_token == tokens[i] && after.history == Tokens{tokens[i]} && after.metrics.n_tokens == 1);
                            CHECK_EQ(after.draws, in_tick);
                            CHECK(same_bits(after.logits, replay(text(4 + i, i) + Tokens{tokens[i]})));
                        } else if (i == n && !undone) {
                            CHECK(after.is_poisoned && after.cells_own == before[i].cells_own + 1 && same_metrics(after.metrics, before[i].metrics) && after.history.empty());
                        } else {
                            CHECK(after == before[i]);  // the draw as well
                        }
                    }
                    CHECK_EQ(pressure(store).cells_used, used);
                    if (!undone) store.prune(Branches{branches[n]}), branches.erase(branches.begin() + n);
                    commit(store, branches, Tokens(branches.size(), 77));  // and on it goes
                }
            }
        }
    }
}

void test_deterministic_prefill_failures() {
    for (const int rc : {1, -2}) {
        for (uint32_t n = 0; n < 6; n++) {  // runs of 3, 40 and 20 in dispatches of 16: 1 + 3 + 2
            Store store(model("n_vocab=300;fail_at=" + std::to_string(1 + n) + ";fail_rc=" + std::to_string(rc) + ";fail_rows=1"), deterministic(context(256, 16, 8)));
            const Branches branches{store.create(0, greedy(), 1), store.create(0, greedy(), 2), store.create(0, greedy(), 3)};
            const std::vector<Tokens> texts{text(3), text(40, 2), text(20, 3)};
            std::vector<pyl_run> runs;
            for (size_t i = 0; i < 3; i++) runs.push_back(run(branches[i], texts[i]));
            const Error error = CHECK_THROWS(rc == 1 ? PYL_E_NO_CELLS : PYL_E_DECODE, prefill(store, runs));
            CHECK_EQ(error.partial, n > 0);
            const uint32_t landed[3] = {n > 0 ? 3u : 0u, n > 3 ? 40u : n > 1 ? 16 * (n - 1) : 0u, n > 4 ? 16u : 0u};
            const size_t hit = n == 0 ? 0 : n < 4 ? 1 : 2;
            for (size_t i = 0; i < 3; i++) {
                CHECK_EQ(runs[i].n_landed, landed[i]);
                CHECK_EQ(store.get(branches[i]).position, landed[i]);
                CHECK_EQ(store.get(branches[i]).is_poisoned, rc == -2 && i == hit);
                CHECK_EQ(runs[i].state, rc == -2 && i == hit ? PYL_STATE_POISONED : landed[i] ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED);
                if (landed[i] == texts[i].size()) CHECK(same_bits(row(store, branches[i]), replay(texts[i])));
            }
        }
    }
}

// A lane that ends in the tick that fails further on has ended: its draw is not taken back.
void test_ends_in_a_tick_that_fails() {
    for (const int rc : {1, -2}) {
        for (const uint32_t n : {0u, 1u}) {
            Store store(model("n_vocab=300;fail_at=" + std::to_string(4 + n) + ";fail_rc=" + std::to_string(rc)), deterministic(context(256, 32, 8)));
            Branches branches;
            for (uint32_t i = 0; i < 3; i++) branches.push_back(root(store, text(4 + i, i), wild(), i));
            store.get(branches[0]).grammar = std::make_unique<OnlyThese>(Tokens{257});
            for (const size_t i : {1, 2}) store.get(branches[i]).grammar = std::make_unique<OnlyThese>(Tokens{65, 66});
            Lanes l = lanes(branches, 2);
            const Error error = CHECK_THROWS(rc == 1 ? PYL_E_NO_CELLS : PYL_E_DECODE, run_tick(store, l));
            CHECK_EQ(error.index, 1 + n);  // the lane's, not that among those that went on
            const bool undone = rc == 1 && n == 0;
            CHECK_EQ(error.state, undone ? PYL_STATE_UNCHANGED : rc == 1 ? PYL_STATE_ADVANCED : PYL_STATE_POISONED);
            CHECK_EQ(l.lanes[0].finish, undone ? PYL_FINISH_NONE : PYL_FINISH_EOG);
            CHECK_EQ(l.lanes[0].final_token, undone ? -1 : 257);
            CHECK_EQ(store.get(branches[0]).sampler.draws(), !undone);
            CHECK_EQ(store.get(branches[1]).sampler.draws(), n == 1 || rc == -2);
            CHECK_EQ(store.get(branches[2]).sampler.draws(), n == 1 && rc == -2);
        }
    }
}

// ------------------------------------------------------------------------------------------------------------- embeddings

EmbedderParams embedder(uint32_t n_ctx, int32_t pooling = PYL_POOLING_MODEL) { return {n_ctx, 1, pooling, PYL_FLASH_ATTN_AUTO}; }

void test_embeddings() {
    Embedder one(model(), embedder(64)), narrow(model(), embedder(11)), last(model(), embedder(64, PYL_POOLING_LAST));
    CHECK_EQ(one.info().pooling, PYL_POOLING_MEAN);
    CHECK_EQ(last.info().pooling, PYL_POOLING_LAST);
    const auto texts = prompts(37);
    const size_t width = static_cast<size_t>(one.info().n_embd);
    Row packed(37 * width, -7), other(37 * width, -7), alone(width), raw(37 * width);
    one.embed(spans(texts), true, packed.data());
    const pyl_embedder_info info = one.info();
    size_t n_tokens = 0;
    for (const Tokens & t : texts) n_tokens += t.size();
    CHECK(info.n_texts == 37 && info.n_tokens == n_tokens && info.n_dispatches >= 10 && info.n_dispatches < 37);
    narrow.embed(spans(texts), true, other.data());
    CHECK(same_bits(packed, other));  // however they were packed
    CHECK(narrow.info().n_dispatches > info.n_dispatches);
    one.embed(spans(texts), false, raw.data());
    for (size_t i = 0; i < 37; i++) {
        one.embed(spans({texts[i]}), true, alone.data());
        CHECK(std::equal(alone.begin(), alone.end(), packed.begin() + static_cast<std::ptrdiff_t>(i * width)));
        double length = 0, raw_length = 0;
        for (size_t k = 0; k < width; k++) length += packed[i * width + k] * packed[i * width + k], raw_length += raw[i * width + k] * raw[i * width + k];
        CHECK(near(length, 1));
        for (size_t k = 0; k < width; k++) CHECK(near(packed[i * width + k], raw[i * width + k] / std::sqrt(raw_length)));
    }
    last.embed(spans(texts), true, other.data());
    CHECK(!same_bits(packed, other));
    one.embed({}, true, nullptr);
}

void test_embeddings_refuse() {
    Embedder one(model(), embedder(20));
    Row out(24, -7);
    const auto refused = [&](int32_t code, const std::vector<Tokens> & texts) {
        const Error error = CHECK_THROWS(code, one.embed(spans(texts), true, out.data()));
        CHECK(out == Row(24, -7) && one.info().n_dispatches == 0);
        return error;
    };
    CHECK_EQ(refused(PYL_E_INVALID, {text(3), {}}).index, 1);
    const Error error = refused(PYL_E_INVALID, {text(3), text(20), text(21)});
    CHECK(error.index == 2 && error.need == 21 && error.have == 20);
    CHECK_EQ(refused(PYL_E_INVALID, {text(3), {1, 300}}).index, 1);
    CHECK_EQ(refused(PYL_E_INVALID, {{-1}}).index, 0);
    one.close();
    one.close();
    refused(PYL_E_CLOSED, {text(3)});
    CHECK_EQ(live_counts().contexts, 0);
}

void test_embeddings_when_the_engine_fails() {
    const auto texts = prompts(13);  // four in a dispatch
    Embedder sound(model(), embedder(64));
    Row want(13 * 8);
    sound.embed(spans(texts), true, want.data());
    const uint64_t n_dispatches = sound.info().n_dispatches;
    CHECK(n_dispatches >= 4);
    for (const int rc : {1, -1, 2, -3}) {
        for (uint64_t n = 1; n <= n_dispatches; n++) {
            Embedder one(model("n_vocab=300;fail_at=" + std::to_string(n) + ";fail_rc=" + std::to_string(rc)), embedder(64));
            Row out(13 * 8, -7);
            const Error error = CHECK_THROWS(PYL_E_DECODE, one.embed(spans(texts), true, out.data()));
            CHECK(error.engine_rc == rc && out == Row(13 * 8, -7));
            CHECK(error.index >= 0 && (n == 1 ? error.index == 0 : error.index > 0));
            CHECK_EQ(one.info().n_dispatches, n);
            one.embed(spans(texts), true, out.data());
            CHECK(same_bits(out, want));
        }
    }
}

// A call in flight has a second one refused, and a close wait for it.
void test_one_call_at_a_time_in_an_embedder() {
    struct Slow final : EmbedContext {
        std::atomic<bool> is_inside{false}, may_go{false};
        std::vector<float> row = std::vector<float>(8, 1.0f);
        int32_t n_embd() const override { return 8; }
        uint32_t n_seq_max() const override { return 4; }
        int32_t pooling() const override { return PYL_POOLING_MEAN; }
        int32_t embed(const Batch &) override {
            is_inside = true;
            while (!may_go) std::this_thread::yield();
            return 0;
        }
        const float * vector(size_t) const override { return row.data(); }
    };
    struct SlowModel final : Model {
        std::shared_ptr<Model> of = model();
        mutable Slow * made = nullptr;
        const pyl_model_info & info() const override { return of->info(); }
        std::string metadata() const override { return of->metadata(); }
        Tokens tokenize(std::string_view t, uint32_t flags) const override { return of->tokenize(t, flags); }
        std::string piece(Token token, bool special) const override { return of->piece(token, special); }
        uint32_t token_flags(Token token) const override { return of->token_flags(token); }
        std::unique_ptr<Grammar> grammar(const GrammarSource & source) const override { return of->grammar(source); }
        std::string chat_render(std::string_view r) const override { return of->chat_render(r); }
        ModelIdentity identity() const override { return of->identity(); }
        std::unique_ptr<Context> open(const ContextParams & p) const override { return of->open(p); }
        std::shared_ptr<Projector> open_projector(std::shared_ptr<const Model> self, const std::string & p, const ProjectorParams & q) const override { return of->open_projector(self, p, q); }
        std::unique_ptr<EmbedContext> open_embedder(const EmbedderParams &) const override {
            auto out = std::make_unique<Slow>();
            made = out.get();
            return out;
        }
    };
    const auto slow = std::make_shared<SlowModel>();
    Embedder one(slow, embedder(64));
    Slow & inside = *slow->made;
    Row out(8, -7), other(8, -7);
    std::thread caller([&] { one.embed(spans({text(3)}), false, out.data()); });
    while (!inside.is_inside) std::this_thread::yield();
    CHECK_THROWS(PYL_E_BUSY, one.embed(spans({text(3)}), false, other.data()));
    CHECK(other == Row(8, -7));
    CHECK_EQ(one.info().n_dispatches, 0);  // told all the while
    std::atomic<bool> is_closed{false};
    std::thread closer([&] {
        one.close();
        is_closed = true;
    });
    CHECK(!is_closed);
    inside.may_go = true;
    caller.join();
    closer.join();
    CHECK(out == Row(8, 1));  // it was let finish
    CHECK_THROWS(PYL_E_CLOSED, one.embed(spans({text(3)}), false, other.data()));
}

}  // namespace

int main() {
    test_model_level();
    test_sampling_level_is_one_distribution();
    test_forced_and_greedy();
    test_metrics_are_carried();
    test_metrics_of_what_failed();
    test_priors();
    test_logits_of_some();
    test_score();
    test_score_refuses_before_it_starts();
    test_score_when_the_engine_fails();
    test_score_is_cancelled();
    test_reseed();
    test_reseed_refuses();
    test_reseed_when_the_engine_fails();
    test_reseed_is_cancelled();
    test_each_dispatch_holds_one_branch();
    test_deterministic_failures();
    test_deterministic_prefill_failures();
    test_ends_in_a_tick_that_fails();
    test_embeddings();
    test_embeddings_refuse();
    test_embeddings_when_the_engine_fails();
    test_one_call_at_a_time_in_an_embedder();
    CHECK_EQ(live_counts().grammars + live_counts().branches + live_counts().contexts + live_counts().weights, 0);
    return check::result("test_measures");
}
