// The sampler against a reference written the slow way, in double precision.
//
// Which tokens survive is checked by drawing: truncation happens before temperature, so at an enormous temperature every
// survivor is about equally likely, and enough draws show exactly the set that is left. How likely each is, is checked by
// counting draws at an ordinary temperature. Every random choice has a fixed seed: a run is the same every time.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.hpp"
#include "core/error.hpp"
#include "core/sampler.hpp"

using namespace pyl;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float flat = 1e6f;  // a temperature that makes all survivors alike

using Legal = std::function<bool(Token)>;

// Allows what a predicate allows; remembers how it was asked.
class FakeGrammar final : public Grammar {
public:
    explicit FakeGrammar(Legal legal) : legal_(std::move(legal)) {}
    std::unique_ptr<Grammar> clone() const override { return std::make_unique<FakeGrammar>(legal_); }
    void filter(std::span<Candidate> candidates) override {
        n_asked += candidates.size();
        for (Candidate & c : candidates) {
            if (!legal_(c.id)) c.logit = -inf;
        }
    }
    void accept(Token) override { n_accepted++; }

    size_t n_asked = 0, n_accepted = 0;

private:
    Legal legal_;
};

SamplingParams plain() {
    SamplingParams p;
    p.temperature = 1.0f;
    p.top_k = 0;
    p.top_p = 1.0f;
    p.min_p = 0.0f;
    return p;
}

struct Reference {
    std::map<Token, double> p;  // survivors and how likely each is to be drawn
    double margin = 1;          // how far the closest cut was from falling elsewhere: float may differ from double below it
};

// Order: grammar, penalties, top_k, typical_p, top_p, min_p, temperature. O(n^2), no sorting.
Reference reference(const std::vector<float> & logits, const SamplingParams & s, const std::vector<Token> & history, const Legal & legal) {
    std::map<Token, double> x;
    for (size_t i = 0; i < logits.size(); i++) {
        const auto id = static_cast<Token>(i);
        if (!std::isnan(logits[i]) && logits[i] != -inf && (!legal || legal(id))) x[id] = static_cast<double>(logits[i]);
    }
    if (s.has_penalties()) {
        for (auto & [id, logit] : x) {
            const size_t n = std::min<size_t>(history.size(), static_cast<size_t>(s.penalty_last_n));
            const auto count = std::count(history.end() - static_cast<std::ptrdiff_t>(n), history.end(), id);
            if (count == 0) continue;
            logit = logit <= 0 ? logit * static_cast<double>(s.penalty_repeat) : logit / static_cast<double>(s.penalty_repeat);
            logit -= static_cast<double>(count) * static_cast<double>(s.penalty_frequency) + static_cast<double>(s.penalty_presence);
        }
    }
    Reference out;
    const auto keep = [&](const std::set<Token> & kept) { std::erase_if(x, [&](const auto & item) { return !kept.contains(item.first); }); };
    const auto probabilities = [&](double temperature) {
        double top = -1e300, sum = 0;
        for (const auto & [id, logit] : x) top = std::max(top, logit);
        std::map<Token, double> p;
        for (const auto & [id, logit] : x) sum += p[id] = std::exp((logit - top) / temperature);
        for (auto & [id, value] : p) value /= sum;
        return p;
    };
    const auto above = [&](Token a, Token b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
    // The shortest prefix, in the order `before`, whose probabilities sum to at least `enough`.
    const auto keep_mass = [&](double enough, const std::map<Token, double> & p, const std::function<bool(Token, Token)> & before) {
        std::set<Token> kept;
        for (const auto & [id, own] : p) {
            double sum = 0;
            for (const auto & [other, value] : p) sum += before(other, id) ? value : 0;
            if (sum < enough) kept.insert(id);
            out.margin = std::min(out.margin, std::abs(sum - enough));
        }
        keep(kept);
    };
    if (x.empty()) return out;
    if (s.top_k > 0) {
        std::set<Token> kept;
        for (const auto & [id, logit] : x) {
            int32_t rank = 0;
            for (const auto & [other, value] : x) rank += above(other, id);
            if (rank < s.top_k) kept.insert(id);
        }
        keep(kept);
    }
    if (s.typical_p < 1) {
        const auto p = probabilities(1);
        double entropy = 0;
        for (const auto & [id, value] : p) entropy -= value * std::log(value);
        const auto surprise = [&](Token id) { return std::abs(-std::log(p.at(id)) - entropy); };
        for (const auto & [a, pa] : p) {
            for (const auto & [b, pb] : p) {
                if (a < b && x[a] != x[b]) out.margin = std::min(out.margin, std::abs(surprise(a) - surprise(b)));
            }
        }
        keep_mass(static_cast<double>(s.typical_p), p, [&](Token a, Token b) { return surprise(a) != surprise(b) ? surprise(a) < surprise(b) : above(a, b); });
    }
    if (s.top_p < 1) keep_mass(static_cast<double>(s.top_p), probabilities(1), above);
    if (s.min_p > 0) {
        const auto p = probabilities(1);
        double top = 0;
        for (const auto & [id, value] : p) top = std::max(top, value);
        std::set<Token> kept;
        for (const auto & [id, value] : p) {
            if (value >= static_cast<double>(s.min_p) * top) kept.insert(id);
            if (value < top) out.margin = std::min(out.margin, std::abs(std::log(value / top) - std::log(static_cast<double>(s.min_p))));
        }
        keep(kept);
    }
    out.p = probabilities(static_cast<double>(s.temperature));
    return out;
}

struct Drawn {
    std::map<Token, int> count;
    std::vector<Token> order;
};

Drawn draw(Sampler & sampler, const std::vector<float> & logits, Grammar * grammar, int n) {
    static SamplerScratch scratch;
    Drawn out;
    for (int i = 0; i < n; i++) {
        out.order.push_back(sampler.sample(logits.data(), logits.size(), grammar, scratch));
        out.count[out.order.back()]++;
    }
    return out;
}

Token draw_one(Sampler & sampler, const std::vector<float> & logits, Grammar * grammar = nullptr) { return draw(sampler, logits, grammar, 1).order[0]; }

std::vector<float> random_logits(std::mt19937 & rng, size_t n, float spread = 2.0f) {
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> out(n);
    for (float & x : out) x = normal(rng);
    return out;
}

// The survivors, as seen by drawing at an enormous temperature.
std::set<Token> survivors(const std::vector<float> & logits, SamplingParams params, const std::vector<Token> & history, Grammar * grammar, size_t n_expected) {
    params.temperature = flat;
    Sampler sampler(1234567);
    sampler.set_params(params);
    for (const Token token : history) sampler.accept(token);
    // The chance to miss one of n equally likely tokens in n (log n + 20) draws is e^-20.
    const int n = static_cast<int>(static_cast<double>(n_expected) * (std::log(static_cast<double>(n_expected) + 1) + 20)) + 10;
    std::set<Token> out;
    for (const auto & [id, count] : draw(sampler, logits, grammar, n).count) out.insert(id);
    return out;
}

std::set<Token> ids_of(const Reference & r) {
    std::set<Token> out;
    for (const auto & [id, p] : r.p) out.insert(id);
    return out;
}

bool fits(const Drawn & drawn, const Reference & r) {
    const auto n = static_cast<double>(drawn.order.size());
    double chi2 = 0, rest_expected = 0, rest_seen = 0;
    int df = -1;
    for (const auto & [id, count] : drawn.count) {
        if (!r.p.contains(id)) return false;
    }
    const auto add = [&](double expected, double seen) { chi2 += (seen - expected) * (seen - expected) / expected, df++; };
    for (const auto & [id, p] : r.p) {
        const double expected = p * n, seen = drawn.count.contains(id) ? drawn.count.at(id) : 0;
        if (expected >= 10) {
            add(expected, seen);
        } else {
            rest_expected += expected, rest_seen += seen;  // the usual rule: too rare to count alone
        }
    }
    if (rest_expected >= 1) add(rest_expected, rest_seen);
    return chi2 < df + 6 * std::sqrt(2.0 * std::max(df, 1)) + 10;  // more than six sigma: never by chance, always by mistake
}

// ------------------------------------------------------------------------------------------------------------------------

void test_greedy() {
    SamplingParams p = plain();
    for (const float temperature : {0.0f, -1.0f}) {
        p.temperature = temperature;
        Sampler s(1);
        s.set_params(p);
        CHECK_EQ(draw_one(s, {1, 3, 2}), 1);
        CHECK_EQ(draw_one(s, {1, 3, 3, 3}), 1);                  // ties: the lowest id
        CHECK_EQ(draw_one(s, {-7, -7}), 0);
        CHECK_EQ(draw_one(s, {nan, 2, nan, 5, nan}), 3);         // NaN never wins
        CHECK_EQ(draw_one(s, {nan, -inf, -3e38f}), 2);           // the lowest finite logit still beats nothing
        CHECK_EQ(draw_one(s, {-inf, -inf}), -1);
        CHECK_EQ(draw_one(s, {nan, nan}), -1);
        CHECK_EQ(draw_one(s, {1, inf, 5}), 1);
        CHECK_EQ(s.draws(), 0);                                  // greedy needs no randomness
        // Truncation cannot remove the best one, a grammar can.
        p.top_k = 1, p.top_p = 0.01f, p.min_p = 1, p.typical_p = 0.01f;
        s.set_params(p);
        CHECK_EQ(draw_one(s, {1, 3, 2}), 1);
        FakeGrammar odd([](Token t) { return t % 2 == 1; }), even([](Token t) { return t % 2 == 0; }), none([](Token) { return false; });
        CHECK_EQ(draw_one(s, {9, 3, 2, 3}, &odd), 1);
        CHECK_EQ(draw_one(s, {9, 3, 9, 3}, &even), 0);
        CHECK_EQ(draw_one(s, {9, 3, 2, 3}, &none), -1);
        CHECK_EQ(s.draws(), 0);
        p = plain();
    }
    // Against a plain scan, with many ties.
    std::mt19937 rng(5);
    p.temperature = 0;
    Sampler s(1);
    s.set_params(p);
    for (int round = 0; round < 500; round++) {
        std::vector<float> logits(1 + rng() % 80);
        for (float & x : logits) x = static_cast<float>(rng() % 6);
        FakeGrammar thirds([](Token t) { return t % 3 == 0; });
        CHECK_EQ(draw_one(s, logits), std::max_element(logits.begin(), logits.end()) - logits.begin());
        Token best = 0;
        for (size_t i = 0; i < logits.size(); i += 3) best = logits[i] > logits[static_cast<size_t>(best)] ? static_cast<Token>(i) : best;
        CHECK_EQ(draw_one(s, logits, &thirds), best);
    }
}

void test_nothing_to_draw() {
    Sampler s(3);
    s.set_params(plain());
    FakeGrammar none([](Token) { return false; });
    CHECK_EQ(draw_one(s, {-inf, -inf, nan}), -1);
    CHECK_EQ(draw_one(s, {1, 2, 3}, &none), -1);
    CHECK_EQ(draw_one(s, {nan, -inf, 0, -inf, nan}), 2);
    CHECK_EQ(s.draws(), 1);  // a draw that found nothing did not use the stream up
    s.rewind(0);
    // Only what is a number is ever drawn.
    for (const auto & [id, count] : draw(s, {nan, 1, -inf, 1, nan, 1}, nullptr, 300).count) CHECK(id == 1 || id == 3 || id == 5);
    // Plus infinity is more likely than anything finite, however the model or a penalty came by it.
    s.set_params(plain());
    for (const auto & [id, count] : draw(s, {0, inf, 1, 2, 3}, nullptr, 100).count) CHECK_EQ(id, 1);
}

void test_truncation_one_by_one() {
    const std::vector<float> logits{0, 3, 1, 3, 2, -5};  // two ties at the top
    SamplingParams p = plain();
    const auto left = [&](const SamplingParams & params) { return survivors(logits, params, {}, nullptr, logits.size()); };
    CHECK(left(p) == std::set<Token>{0, 1, 2, 3, 4, 5});
    p.top_k = 1, CHECK(left(p) == std::set<Token>{1});  // a tie at the cut: the lowest id stays
    p.top_k = 3, CHECK(left(p) == std::set<Token>{1, 3, 4});
    p.top_k = 1000, CHECK_EQ(left(p).size(), 6);
    p.top_k = std::numeric_limits<int32_t>::max(), CHECK_EQ(left(p).size(), 6);
    p.top_k = -1, CHECK_EQ(left(p).size(), 6);
    p = plain();
    p.top_p = 1e-6f, CHECK(left(p) == std::set<Token>{1});  // never empty
    p.top_p = 0.5f, CHECK(left(p) == std::set<Token>{1, 3});  // 0.396 each
    p.top_p = 0.8f, CHECK(left(p) == std::set<Token>{1, 3, 4});
    p = plain();
    p.min_p = 1.0f, CHECK(left(p) == std::set<Token>{1, 3});  // ties of the best stay
    p.min_p = 0.3f, CHECK(left(p) == std::set<Token>{1, 3, 4});  // e^-1 = 0.368
    p.min_p = 0.1f, CHECK(left(p) == std::set<Token>{1, 2, 3, 4});
    p = plain();
    p.typical_p = 1e-6f, CHECK_EQ(left(p).size(), 1);
    // Typical is not the top: three tokens of 0.2 surprise less than one of 0.4.
    const std::vector<float> spread{std::log(0.4f), std::log(0.2f), std::log(0.2f), std::log(0.2f)};
    p.typical_p = 0.55f;
    CHECK(survivors(spread, p, {}, nullptr, 4) == std::set<Token>({1, 2, 3}));
    // Truncation sees the distribution before temperature.
    p = plain();
    p.top_p = 0.5f, p.temperature = 0.01f;
    CHECK(ids_of(reference(logits, p, {}, nullptr)) == std::set<Token>({1, 3}));
    Sampler s(1);
    s.set_params(p);
    CHECK_EQ(draw(s, logits, nullptr, 200).count.size(), 2);
}

// All together, random settings, random logits with holes, random history: the same survivors and the same likelihoods.
void test_against_reference() {
    std::mt19937 rng(20240607);
    std::uniform_real_distribution<float> u(0, 1);
    int n_tested = 0;
    while (n_tested < 200) {
        std::vector<float> logits = random_logits(rng, 5 + rng() % 60);
        for (float & x : logits) {
            if (u(rng) < 0.08f) x = -inf;
            if (u(rng) < 0.05f) x = nan;
        }
        SamplingParams p = plain();
        p.temperature = 0.3f + 1.5f * u(rng);
        if (u(rng) < 0.5f) p.top_k = static_cast<int32_t>(rng() % 50);
        if (u(rng) < 0.5f) p.top_p = 0.05f + 0.94f * u(rng);
        if (u(rng) < 0.5f) p.min_p = 0.3f * u(rng);
        if (u(rng) < 0.5f) p.typical_p = 0.1f + 0.89f * u(rng);
        if (u(rng) < 0.5f) p.penalty_repeat = 0.7f + u(rng);
        if (u(rng) < 0.5f) p.penalty_frequency = u(rng) - 0.3f;
        if (u(rng) < 0.5f) p.penalty_presence = u(rng) - 0.3f;
        p.penalty_last_n = static_cast<int32_t>(rng() % 40);
        std::vector<Token> history(rng() % 60);
        for (Token & token : history) token = static_cast<Token>(rng() % logits.size());
        Legal legal;
        if (u(rng) < 0.4f) legal = [](Token t) { return t % 3 != 1; };
        p.validate();
        const Reference want = reference(logits, p, history, legal);
        if (want.margin < 1e-4 || want.p.empty()) continue;  // too close to call in float: other settings are drawn instead
        n_tested++;
        FakeGrammar fake(legal ? legal : [](Token) { return true; });
        Grammar * grammar = legal ? &fake : nullptr;
        bool ok = CHECK(survivors(logits, p, history, grammar, want.p.size()) == ids_of(want));
        Sampler s(rng());
        s.set_params(p);
        for (const Token token : history) s.accept(token);
        const Drawn drawn = draw(s, logits, grammar, 1500);
        ok = CHECK(fits(drawn, want)) && ok;
        if (!ok) {
            const auto d = [](float x) { return static_cast<double>(x); };
            std::fprintf(stderr, "    case %d: n %zu, temperature %g, top_k %d, top_p %g, min_p %g, typical_p %g, repeat %g, frequency %g, presence %g, last_n %d, margin %g\n", n_tested, logits.size(), d(p.temperature),
                         p.top_k, d(p.top_p), d(p.min_p), d(p.typical_p), d(p.penalty_repeat), d(p.penalty_frequency), d(p.penalty_presence), p.penalty_last_n, want.margin);
        }
        p.temperature = 0;  // greedy sees grammar and penalties, and nothing else
        s.set_params(p);
        SamplingParams untruncated = p;
        untruncated.temperature = 1, untruncated.top_k = 0, untruncated.top_p = 1, untruncated.min_p = 0, untruncated.typical_p = 1;
        const Reference all = reference(logits, untruncated, history, legal);
        const auto best = std::max_element(all.p.begin(), all.p.end(), [](const auto & a, const auto & b) { return a.second < b.second; });
        CHECK_EQ(draw_one(s, logits, grammar), best->first);
        CHECK_EQ(fake.n_accepted, 0);
    }
}

void test_penalties() {
    SamplingParams p = plain();
    p.temperature = 0;
    Sampler s(1);
    const auto best = [&](const std::vector<float> & logits) {
        s.set_params(p);
        return draw_one(s, logits);
    };
    s.accept(0), s.accept(0), s.accept(1);
    CHECK_EQ(best({5, 4, 3}), 0);
    p.penalty_repeat = 2, CHECK_EQ(best({5, 4, 3}), 2);             // 2.5, 2, 3
    CHECK_EQ(best({-1, -1, -1.5f}), 2);                             // a negative logit is pushed down too: -2, -2, -1.5
    p.penalty_repeat = 1, p.penalty_frequency = 1, CHECK_EQ(best({5, 4.5f, 3.2f}), 1);  // 3, 3.5, 3.2
    p.penalty_frequency = 0, p.penalty_presence = 1, CHECK_EQ(best({5, 4.5f, 3}), 0);   // 4, 3.5, 3
    p.penalty_last_n = 1, CHECK_EQ(best({5, 5.5f, 3}), 0);          // only the last one, token 1, is looked at
    p.penalty_last_n = 0, CHECK_EQ(best({5, 5.5f, 3}), 1);
    p.penalty_last_n = 64;
    CHECK_EQ(best({-inf, -inf, 0}), 2);                             // what is impossible stays impossible, also with a bonus
    p.penalty_presence = -100, CHECK_EQ(best({-inf, 0, 0}), 1);
    CHECK_EQ(best({nan, -inf, 0}), 2);
    CHECK_EQ(best({nan, -inf, nan}), -1);
}

// The window: exactly the last penalty_last_n tokens count, whatever came before them.
void test_penalty_window() {
    for (const int32_t last_n : {1, 2, 7, 64, 1023, 1024, 1025, 3000}) {
        SamplingParams p = plain();
        p.temperature = 0, p.penalty_presence = 10, p.penalty_last_n = last_n;
        Sampler s(1);
        s.set_params(p);
        std::vector<float> logits(8, 0.0f);
        logits[3] = 5;
        s.accept(3);
        for (int32_t age = 1; age <= last_n + 2; age++) {  // token 3 was accepted `age` tokens ago
            CHECK_EQ(draw_one(s, logits) == 3, age > last_n);
            s.accept(7);
        }
    }
}

void test_history() {
    for (const int32_t last_n : {0, 64, 1024, 3000, 5000}) {
        SamplingParams p = plain();
        p.penalty_last_n = last_n;
        Sampler s(1);
        s.set_params(p);
        std::vector<Token> all;
        const size_t keep = std::max<size_t>(Sampler::min_history, static_cast<size_t>(last_n));
        for (int i = 0; i < 20000; i++) {
            all.push_back(i % 1009);
            s.accept(all.back());
            const auto & h = s.history();
            const size_t n = h.size();
            if (n < std::min(all.size(), keep) || n > 2 * keep) CHECK(false && "the history keeps what the window needs, and is bounded");
            if (i % 97 == 0) CHECK(std::equal(h.begin(), h.end(), all.end() - static_cast<std::ptrdiff_t>(n)));
        }
    }
    // Setting the parameters or the seed anew leaves the history alone.
    Sampler s(1);
    s.accept(4), s.accept(2);
    s.set_params(plain());
    s.reseed(9);
    CHECK(s.history() == std::vector<Token>({4, 2}));
}

void test_stream() {
    const std::vector<float> level(64, 0.0f);
    Sampler a(77), b(77), c(78);
    for (Sampler * s : {&a, &b, &c}) s->set_params(plain());
    const auto first = draw(a, level, nullptr, 200).order;
    CHECK(draw(b, level, nullptr, 200).order == first);  // the same seed, the same stream
    CHECK(draw(c, level, nullptr, 200).order != first);
    CHECK_EQ(a.draws(), 200);
    a.rewind(50);
    const auto tail = draw(a, level, nullptr, 150).order;
    CHECK(std::equal(tail.begin(), tail.end(), first.begin() + 50));
    a.reseed(77);
    CHECK_EQ(a.draws(), 0);
    CHECK(draw(a, level, nullptr, 200).order == first);
    // A copy goes on exactly as the original would, with its history; then they are independent.
    a.accept(5);
    Sampler copy = a;
    CHECK(copy.history() == a.history());
    CHECK(draw(copy, level, nullptr, 100).order == draw(a, level, nullptr, 100).order);
    draw_one(copy, level);
    CHECK_EQ(copy.draws(), a.draws() + 1);
    // Neither penalties nor a grammar nor the size of the vocabulary use up more than one draw.
    SamplingParams p = plain();
    p.penalty_repeat = 1.5f;
    p.typical_p = 0.9f;
    a.set_params(p);
    FakeGrammar sevens([](Token t) { return t % 7 == 0; });
    const uint64_t before = a.draws();
    draw(a, level, &sevens, 10);
    CHECK_EQ(a.draws(), before + 10);
}

// Setting a temperature before every draw, as adaptive temperature does, must not replay one uniform.
void test_changing_temperature() {
    const std::vector<float> level(64, 1.5f);  // temperature changes nothing here, so the draws show the uniforms themselves
    SamplingParams p = plain();
    Sampler steady(5), changing(5);
    steady.set_params(p);
    const auto want = draw(steady, level, nullptr, 4000).order;
    std::map<Token, int> count, follows;
    Token before = -1;
    for (int i = 0; i < 4000; i++) {
        p.temperature = i % 2 ? 0.7f : 1.3f;
        p.top_k = i % 3 ? 64 : 0;
        changing.set_params(p);
        const Token token = draw_one(changing, level);
        if (token != want[static_cast<size_t>(i)]) CHECK(false && "the stream does not depend on the settings");
        count[token]++;
        follows[token - before]++;
        before = token;
    }
    CHECK_EQ(count.size(), 64);
    for (const auto & [id, n] : count) CHECK(n > 20 && n < 120);     // 62.5 expected, sigma 7.8
    CHECK(follows[0] > 20 && follows[0] < 120);                      // the same token twice in a row: as often as chance says
}

// The uniforms themselves: flat over one stream, over the first draw of many seeds, and uncorrelated from draw to draw.
void test_uniform() {
    const std::vector<float> level(16, 0.0f);
    Reference even;
    for (Token t = 0; t < 16; t++) even.p[t] = 1.0 / 16;
    Drawn firsts, seconds;
    for (uint64_t seed = 0; seed < 8000; seed++) {
        Sampler s(seed);
        s.set_params(plain());
        for (Drawn * drawn : {&firsts, &seconds}) {
            drawn->order.push_back(draw_one(s, level));
            drawn->count[drawn->order.back()]++;
        }
    }
    CHECK(fits(firsts, even));
    CHECK(fits(seconds, even));
    const auto pairs_fit = [&](const std::vector<Token> & a, const std::vector<Token> & b) {
        Drawn pairs;
        Reference pair;
        for (Token t = 0; t < 256; t++) pair.p[t] = 1.0 / 256;
        for (size_t i = 0; i < std::min(a.size(), b.size()); i++) {
            pairs.order.push_back(a[i] * 16 + b[i]);
            pairs.count[pairs.order.back()]++;
        }
        return fits(pairs, pair);
    };
    CHECK(pairs_fit(firsts.order, seconds.order));
    for (const uint64_t seed : {0ull, 1ull, 0xFFFFFFFFFFFFFFFFull}) {
        Sampler s(seed);
        s.set_params(plain());
        const Drawn drawn = draw(s, level, nullptr, 20000);
        CHECK(fits(drawn, even));
        CHECK(pairs_fit(drawn.order, std::vector<Token>(drawn.order.begin() + 1, drawn.order.end())));
    }
    CHECK(random_seed() != random_seed());
}

// The highest number a stream can give, against weights whose sum was rounded up at each step: taken off one by one they leave
// something over, and the draw must end on the last candidate, not on none. The seed is the mixing function turned round.
void test_rounding_past_the_last() {
    constexpr size_t n = 9;
    std::vector<float> logits(n, -36.33f);  // exp is 1.5 * 2^-53: added to 1 it counts as 2^-52, taken off as what it is
    logits[0] = 0;
    SamplerScratch scratch;
    Sampler sampler(0xD41B185E086AF635ull);
    sampler.set_params(plain());
    const Token drawn = sampler.sample(logits.data(), n, nullptr, scratch);
    double sum = 0, at;
    for (const Candidate & c : scratch.candidates) sum += static_cast<double>(c.p);
    at = (1 - 0x1p-53) * sum;
    for (const Candidate & c : scratch.candidates) at -= static_cast<double>(c.p);
    CHECK(scratch.candidates.size() == n && at > 0);  // or this tests nothing
    CHECK_EQ(drawn, scratch.candidates.back().id);
    CHECK_EQ(sampler.draws(), 1);
    const std::vector<float> alike(n, 0.0f);
    Sampler other(0xD41B185E086AF635ull);
    other.set_params(plain());
    CHECK_EQ(other.sample(alike.data(), n, nullptr, scratch), n - 1);  // it is the highest number
}

void test_frequencies() {
    std::mt19937 rng(99);
    for (int round = 0; round < 12; round++) {
        const auto logits = random_logits(rng, 40);
        SamplingParams p = plain();
        p.temperature = 0.5f + 0.25f * static_cast<float>(round % 4);
        if (round % 3 == 1) p.top_k = 10;
        if (round % 3 == 2) p.top_p = 0.9f;
        Sampler s(static_cast<uint64_t>(round));
        s.set_params(p);
        CHECK(fits(draw(s, logits, nullptr, 20000), reference(logits, p, {}, nullptr)));
    }
    // The extremes of temperature: the best one, and all alike.
    const std::vector<float> logits{1, 2, 1.5f, -90};
    SamplingParams p = plain();
    Sampler s(4);
    for (const float temperature : {1e-3f, 1e-30f, 1e-40f}) {
        p.temperature = temperature;
        s.set_params(p);
        const Drawn drawn = draw(s, logits, nullptr, 300);
        CHECK(drawn.count.size() == 1 && drawn.count.contains(1));
    }
    for (const float temperature : {1e6f, 3e38f}) {
        p.temperature = temperature;
        s.set_params(p);
        Reference even;
        for (Token t = 0; t < 4; t++) even.p[t] = 0.25;
        CHECK(fits(draw(s, logits, nullptr, 4000), even));
    }
    // Large logits cancel, they do not overflow.
    p = plain();
    s.set_params(p);
    CHECK(fits(draw(s, {3e38f, 3e38f, -3e38f}, nullptr, 1000), Reference{{{0, 0.5}, {1, 0.5}, {2, 0}}, 1}));
}

// Grammars are asked about candidates from the top, in growing batches: the survivors must be those of asking about everything
// first, also when the legal ones are rare or all at the bottom.
void test_grammar_and_top_k() {
    std::mt19937 rng(7);
    const Legal sevens = [](Token t) { return t % 7 == 0; };
    for (const size_t n_vocab : {8ul, 63ul, 64ul, 65ul, 700ul, 1500ul}) {
        for (const int32_t top_k : {1, 2, 5, 31, 32, 33, 40, 100, 0}) {
            auto logits = random_logits(rng, n_vocab);
            for (const bool at_the_bottom : {false, true}) {
                if (at_the_bottom) {
                    for (size_t i = 0; i < n_vocab; i += 7) logits[i] -= 50;
                }
                SamplingParams p = plain();
                p.top_k = top_k;
                FakeGrammar grammar(sevens);
                const Reference want = reference(logits, p, {}, sevens);
                CHECK(survivors(logits, p, {}, &grammar, want.p.size()) == ids_of(want));
            }
        }
    }
    // A single legal token at the very end of a large vocabulary is found; and an easy grammar is not asked about all of it.
    const auto logits = random_logits(rng, 50000);
    const auto worst = static_cast<Token>(std::min_element(logits.begin(), logits.end()) - logits.begin());
    SamplingParams p = plain();
    p.top_k = 40;
    Sampler s(1);
    s.set_params(p);
    FakeGrammar one([&](Token t) { return t == worst; }), all([](Token) { return true; });
    CHECK_EQ(draw_one(s, logits, &one), worst);
    draw_one(s, logits, &all);
    CHECK(all.n_asked < 1000);
    p.temperature = 0;
    s.set_params(p);
    CHECK_EQ(draw_one(s, logits, &one), worst);
    CHECK_EQ(one.n_accepted + all.n_accepted, 0);
    CHECK(one.allows(worst) && !one.allows(worst + 1));
}

// ------------------------------------------------------------------------------------------------------------------------
// Bit for bit: what the shortcuts give is what copying, masking and sorting the whole vocabulary gives.

using Bias = std::vector<std::pair<Token, float>>;

// All of it, the slow way: the candidates that may be drawn, in order, p being their weights.
std::vector<Candidate> whole(std::vector<float> row, const SamplingParams & s, const std::vector<Token> & history, const std::vector<Bias> & biases, const Legal & legal) {
    for (const Bias & bias : biases) {
        for (const auto & [token, by] : bias) row[static_cast<size_t>(token)] += by;
    }
    if (s.has_penalties()) {
        std::map<Token, int> window;
        for (size_t i = history.size() - std::min<size_t>(history.size(), static_cast<size_t>(s.penalty_last_n)); i < history.size(); i++) window[history[i]]++;
        for (const auto & [token, n] : window) {
            float & logit = row[static_cast<size_t>(token)];
            if (!(logit > -inf)) continue;
            logit = logit <= 0 ? logit * s.penalty_repeat : logit / s.penalty_repeat;
            logit -= static_cast<float>(n) * s.penalty_frequency + s.penalty_presence;
        }
    }
    std::vector<Candidate> c;
    for (size_t i = 0; i < row.size(); i++) {
        if (row[i] > -inf && (!legal || legal(static_cast<Token>(i)))) c.push_back({static_cast<Token>(i), row[i], 0});
    }
    if (c.empty()) return c;
    std::sort(c.begin(), c.end(), [](const Candidate & a, const Candidate & b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; });
    if (s.temperature <= 0) {
        c.resize(1);
        c[0].p = 1;
        return c;
    }
    if (s.top_k > 0 && c.size() > static_cast<size_t>(s.top_k)) c.resize(static_cast<size_t>(s.top_k));
    if (std::isinf(c[0].logit)) {
        std::erase_if(c, [](const Candidate & x) { return !std::isinf(x.logit); });
        for (Candidate & x : c) x.logit = 0;
    }
    const auto softmax = [&] {
        double sum = 0;
        for (Candidate & x : c) sum += static_cast<double>(x.p = std::exp(x.logit - c[0].logit));
        for (Candidate & x : c) x.p = static_cast<float>(static_cast<double>(x.p) / sum);
    };
    const auto keep_mass = [&](float enough) {
        double sum = 0;
        size_t n = 0;
        while (n < c.size() && sum < static_cast<double>(enough)) sum += static_cast<double>(c[n++].p);
        c.resize(n);
    };
    if (s.typical_p < 1) {
        softmax();
        double entropy = 0;
        for (const Candidate & x : c) entropy -= x.p > 0 ? static_cast<double>(x.p) * std::log(static_cast<double>(x.p)) : 0;
        const auto surprise = [&](const Candidate & x) { return std::abs(-std::log(static_cast<double>(x.p)) - entropy); };
        std::stable_sort(c.begin(), c.end(), [&](const Candidate & a, const Candidate & b) { return surprise(a) < surprise(b); });
        keep_mass(s.typical_p);
        std::sort(c.begin(), c.end(), [](const Candidate & a, const Candidate & b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; });
    }
    if (s.top_p < 1) softmax(), keep_mass(s.top_p);
    const float floor = s.min_p > 0 ? c[0].logit + std::log(s.min_p) : -inf;
    std::erase_if(c, [&](const Candidate & x) { return x.logit < floor; });
    for (Candidate & x : c) x.p = std::exp((x.logit - c[0].logit) / s.temperature);
    return c;
}

// The n-th uniform of a seed.
double uniform(uint64_t seed, uint64_t n) {
    const auto mix = [](uint64_t x) {
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
        return x ^ (x >> 31);
    };
    return static_cast<double>(mix(mix(seed ^ 0x6A09E667F3BCC909ull) + n * 0x9E3779B97F4A7C15ull) >> 11) * 0x1p-53;
}

// Knows all that it allows: at once, or only when asked for it.
class MaskedGrammar final : public Grammar {
public:
    MaskedGrammar(Legal legal, size_t n_vocab, bool knows) : legal_(std::move(legal)), knows_(knows), bits_((n_vocab + 63) / 64) {
        for (size_t i = 0; i < n_vocab; i++) bits_[i / 64] |= static_cast<uint64_t>(legal_(static_cast<Token>(i))) << i % 64;
    }
    std::unique_ptr<Grammar> clone() const override { return nullptr; }
    void filter(std::span<Candidate> candidates) override {
        for (Candidate & c : candidates) c.logit = legal_(c.id) ? c.logit : -inf;
    }
    void accept(Token) override {}
    const uint64_t * mask() override { return bits_.data(); }
    const uint64_t * known_mask() override { return knows_ ? bits_.data() : nullptr; }

private:
    Legal legal_;
    bool knows_;
    std::vector<uint64_t> bits_;
};

void test_bit_for_bit() {
    std::mt19937 rng(31);
    std::uniform_real_distribution<float> u(0, 1);
    SamplerScratch scratch;  // of one size now and of another then, as in a store
    for (int round = 0; round < 1500; round++) {
        const size_t n_vocab = round % 100 == 99 ? 20000 + rng() % 7000 : round % 10 == 9 ? 1000 + rng() % 5000 : 1 + rng() % 300;
        std::vector<float> logits = random_logits(rng, n_vocab, 3.0f);
        const bool is_large = n_vocab >= 20000;  // and then with all of them left to sort, the ties too
        const int kind = is_large ? 1 : static_cast<int>(rng() % 5);
        const float holes = u(rng) < 0.3f ? u(rng) : 0;
        for (size_t i = 0; i < n_vocab; i++) {
            float & x = logits[i];
            if (kind == 1) x = std::round(x);           // many ties, -0 among them
            if (kind == 2) x = static_cast<float>(i);   // every one above all before
            if (kind == 3) x = -static_cast<float>(i);
            if (kind == 4 && u(rng) < 0.01f) x = inf;
            if (u(rng) < holes) x = u(rng) < 0.5f ? -inf : nan;
        }
        SamplingParams p = plain();
        p.temperature = u(rng) < 0.2f ? 0 : is_large ? 50 : 0.1f + 1.5f * u(rng);
        if (u(rng) < (is_large ? 0.3f : 0.7f)) p.top_k = 1 + static_cast<int32_t>(rng() % (u(rng) < 0.8f ? 60 : n_vocab));
        if (u(rng) < 0.4f) p.top_p = 0.05f + 0.94f * u(rng);
        if (u(rng) < 0.4f) p.min_p = 0.3f * u(rng);
        if (u(rng) < 0.2f) p.typical_p = 0.1f + 0.89f * u(rng);
        if (u(rng) < 0.3f) p.penalty_repeat = 0.7f + u(rng);
        if (u(rng) < 0.3f) p.penalty_frequency = u(rng) - 0.3f;
        p.penalty_last_n = static_cast<int32_t>(rng() % 200);
        std::vector<Token> history(rng() % 300);
        for (Token & token : history) token = static_cast<Token>(rng() % n_vocab);
        std::vector<Bias> biases(rng() % 3);
        for (Bias & bias : biases) {
            bias.resize(rng() % (u(rng) < 0.8f ? 10 : n_vocab + 1));  // the same token twice, too
            for (auto & [token, by] : bias) token = static_cast<Token>(rng() % n_vocab), by = u(rng) < 0.2f ? -inf : 10 * u(rng) - 5;
        }
        Legal legal;
        if (const auto every = 1 + rng() % 40; u(rng) < 0.5f) legal = [every, shift = rng()](Token t) { return (static_cast<size_t>(t) / 64 % 2 ? t : t + static_cast<Token>(shift % 7)) % static_cast<Token>(every) == 0; };
        if (u(rng) < 0.1f) legal = [](Token t) { return t % 1000 < 500; };  // whole words of bits
        std::vector<std::unique_ptr<Grammar>> grammars;
        if (legal) {
            grammars.push_back(std::make_unique<FakeGrammar>(legal));
            for (const bool knows : {false, true}) grammars.push_back(std::make_unique<MaskedGrammar>(legal, n_vocab, knows));
        } else {
            grammars.push_back(nullptr);
        }
        const std::vector<Candidate> want = whole(logits, p, history, biases, legal);
        double sum = 0, entropy = 0;
        for (const Candidate & x : want) sum += static_cast<double>(x.p);
        for (const Candidate & x : want) {
            if (const double q = static_cast<double>(x.p) / sum; q > 0) entropy -= q * std::log(q);
        }
        std::vector<Biases> shared;
        for (const Bias & bias : biases) shared.push_back(std::make_shared<const Bias>(bias));
        shared.resize(2);
        for (const auto & grammar : grammars) {
            const uint64_t seed = rng();
            Sampler s(seed);
            s.set_params(p);
            for (const Token token : history) s.accept(token);
            for (uint64_t n = 1; n <= 3; n++) {
                Token token = want.empty() ? -1 : want.back().id;
                if (!want.empty() && p.temperature <= 0) token = want[0].id;
                if (!want.empty() && p.temperature > 0) {
                    double at = uniform(seed, n) * sum;
                    for (const Candidate & x : want) {
                        if ((at -= static_cast<double>(x.p)) >= 0) continue;
                        token = x.id;
                        break;
                    }
                }
                CHECK_EQ(s.sample(logits.data(), n_vocab, grammar.get(), scratch, {shared[0], shared[1]}), token);
                CHECK_EQ(s.draws(), want.empty() || p.temperature <= 0 ? 0 : n);
            }
            for (size_t i = 0; i < want.size(); i += 1 + want.size() / 5) {
                const Measure m = s.measure(want[i].id, logits.data(), n_vocab, grammar.get(), scratch, {shared[0], shared[1]});
                const double q = static_cast<double>(want[i].p) / sum;
                CHECK(m.surprisal == (q > 0 ? 0 - std::log(q) : std::numeric_limits<double>::infinity()) && m.entropy == entropy);
            }
        }
    }
}

void test_validate() {
    SamplingParams().validate();
    plain().validate();
    const auto refuses = [](auto && change) {
        SamplingParams p;
        change(p);
        return CHECK_THROWS(PYL_E_INVALID, p.validate()).code == PYL_E_INVALID;
    };
    for (const float bad : {nan, inf, -inf}) {
        refuses([&](SamplingParams & p) { p.temperature = bad; });
        refuses([&](SamplingParams & p) { p.top_p = bad; });
        refuses([&](SamplingParams & p) { p.min_p = bad; });
        refuses([&](SamplingParams & p) { p.typical_p = bad; });
        refuses([&](SamplingParams & p) { p.penalty_repeat = bad; });
        refuses([&](SamplingParams & p) { p.penalty_frequency = bad; });
        refuses([&](SamplingParams & p) { p.penalty_presence = bad; });
    }
    for (const float bad : {0.0f, -0.1f, 1.001f}) {
        refuses([&](SamplingParams & p) { p.top_p = bad; });
        refuses([&](SamplingParams & p) { p.typical_p = bad; });
    }
    refuses([](SamplingParams & p) { p.min_p = -0.01f; });
    refuses([](SamplingParams & p) { p.min_p = 1.01f; });
    refuses([](SamplingParams & p) { p.penalty_repeat = 0; });
    refuses([](SamplingParams & p) { p.penalty_repeat = -1; });
    refuses([](SamplingParams & p) { p.penalty_last_n = -1; });
    refuses([](SamplingParams & p) { p.penalty_last_n = 65537; });
    SamplingParams p;
    p.temperature = -3, p.top_k = -5, p.top_p = 1, p.min_p = 1, p.penalty_last_n = 65536, p.penalty_presence = -2;
    p.validate();
    p.top_p = 2;
    CHECK(std::string(CHECK_THROWS(PYL_E_INVALID, p.validate()).what()).find("top_p") != std::string::npos);  // names the field
}

}  // namespace

int main() {
    test_greedy();
    test_nothing_to_draw();
    test_truncation_one_by_one();
    test_against_reference();
    test_penalties();
    test_penalty_window();
    test_history();
    test_stream();
    test_changing_temperature();
    test_uniform();
    test_rounding_past_the_last();
    test_frequencies();
    test_grammar_and_top_k();
    test_bit_for_bit();
    test_validate();
    return check::result("test_sampler");
}
