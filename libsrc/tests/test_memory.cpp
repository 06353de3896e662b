// Out of memory at every allocation there is. Each operation is run again and again, the n-th allocation inside it failing (once,
// or from there on), until it gets through; after each failure what the exception and the outputs say must be what is so.
// The engine's own memory is left out: its failures are codes, and test_store has those.
#include <atomic>
#include <cstdlib>
#include <map>
#include <new>
#include <string>

#include "check.hpp"
#include "core/embedder.hpp"
#include "core/prompt.hpp"
#include "stub_store.hpp"

namespace {
// Also counted by the threads of a store.
std::atomic<bool> is_armed{false}, goes_on{false}, has_failed{false};
std::atomic<long> until_failure{0};
long n_th = 0;
std::atomic<size_t> n_bytes{0};  // asked for so far
}  // namespace

// Not inlined: GCC would then see malloc meet delete, and warn.
[[gnu::noinline]] void * operator new(size_t size) {
    if (const long left = is_armed ? --until_failure : 1; left == 0 || (left < 0 && goes_on)) {
        has_failed = true;
        throw std::bad_alloc();
    }
    n_bytes += size;
    if (void * memory = std::malloc(size ? size : 1)) return memory;
    throw std::bad_alloc();
}
// Sanitizers bring a nothrow form of their own, which would then meet our delete.
[[gnu::noinline]] void * operator new(size_t size, const std::nothrow_t &) noexcept { return std::malloc(size ? size : 1); }
[[gnu::noinline]] void operator delete(void * memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void * memory, size_t) noexcept { std::free(memory); }

using namespace stub;

namespace {

uint64_t engine_fails_at = 0;  // the dispatch that fails for good; World itself needs three
bool is_deterministic = false;

std::shared_ptr<Model> quiet_model() {
    return std::make_shared<Watched>(model("n_vocab=300;mrope=1;fail_rc=-2;fail_rows=1;fail_at=" + std::to_string(engine_fails_at)), [](const std::function<void()> & call) {
        const bool was = is_armed.exchange(false);
        call();
        is_armed = was;
    });
}

// A few branches in every state: a root, children with and without logits of their own, one with a grammar, an empty one.
ContextParams world_params() {
    ContextParams params = context(64, 4, 10);
    params.deterministic = is_deterministic;
    return params;
}

struct World {
    std::shared_ptr<Model> model = quiet_model();
    Store store{model, world_params()};
    std::map<pyl_branch, Tokens> paths;  // what each branch must see
    pyl_branch top, a, b, strict, empty;

    World() {
        SamplingParams p;
        p.penalty_repeat = 1.2f, p.typical_p = 0.9f;
        top = root(store, text(5), p, 7);
        paths[top] = text(5);
        const auto kids = fork(store, top, 3);
        a = kids[0], b = kids[1], strict = kids[2];
        for (const pyl_branch kid : kids) paths[kid] = text(5);
        store.set_grammar(strict, {false, "root ::= \"abcdefgh\"", "root"});
        commit(store, {b}, {1});
        paths[b].push_back(1);
        empty = root(store);
        paths[empty] = {};
    }

    // Every branch is what `paths` says, or poisoned, or gone; and all of it can be given back.
    void check_sound() {
        for (const auto & [handle, path] : paths) {
            const Branch * branch = nullptr;
            try {
                branch = &store.get(handle);
            } catch (const Error &) {
                continue;
            }
            if (branch->is_poisoned) continue;
            CHECK_EQ(branch->position, path.size());
            CHECK_EQ(branch->cells_own + branch->cells_inherited, path.size());
            if (branch->logits.any()) CHECK(same_bits(row(store, handle), replay(path)));
        }
        uint32_t used = 0;
        for (const pyl_branch handle : store.list(0)) used += store.get(handle).cells_own;
        CHECK_EQ(pressure(store).cells_used, used);
        for (const pyl_branch handle : store.list(0)) store.prune_subtree(handle);
        CHECK_EQ(pressure(store).cells_used, 0);
        CHECK_EQ(pressure(store).leases_remaining, 10);
        while (engine_fails_at && pressure(store).n_dispatches < engine_fails_at) {  // it still has its failure before it
            const pyl_branch victim = root(store);
            try {
                prefill(store, victim, {1});
            } catch (const Error & error) {
                CHECK_EQ(error.code, PYL_E_DECODE);
            }
            store.prune(Branches{victim});
        }
        const pyl_branch filler = root(store, text(64));  // the cache is as empty as the books say
        CHECK(same_bits(row(store, filler), replay(text(64))));
    }
};

// `prepare` makes the arguments, `go` does the operation with them, `account` tells paths what has landed, also after a failure.
template <typename Prepare, typename Go, typename Account>
void sweep(const char * name, Prepare && prepare, Go && go, Account && account) {
    int n_failures = 0;
    for (const bool persistent : {false, true}) {
        for (has_failed = true; has_failed; n_failures += has_failed) {
            World world;
            auto arguments = prepare(world);
            const Snapshot before = snapshot(world.store);
            const int failed_before = check::n_failed;
            std::optional<Error> error;
            bool threw = false;
            has_failed = false, goes_on = persistent, until_failure = ++n_th;
            is_armed = true;
            try {
                go(world, arguments);
                is_armed = false;
            } catch (const Error & thrown) {
                is_armed = false;
                threw = true, error = thrown;
            } catch (const std::exception &) {
                is_armed = false;
                threw = true;
            }
            CHECK(has_failed || !threw || engine_fails_at);
            if (threw && (!error || error->state == PYL_STATE_UNCHANGED)) {
                CHECK(snapshot(world.store) == before);  // "an allocation failed. Unchanged."
            } else {
                account(world, arguments, threw);
            }
            world.check_sound();
            if (check::n_failed == failed_before) continue;
            const char * what = error ? error->what() : threw ? "bad_alloc" : "went through";
            std::fprintf(stderr, "    %s, allocation %ld failing%s: %s\n", name, n_th, persistent ? " and all after it" : "", what);
        }
        n_th = 0;
    }
    std::printf("%s: %d failures\n", name, n_failures);
}

// After a failed call that names several branches, each is as before or poisoned; none has quietly moved on.
void as_before_or_poisoned(World & world, const Branches & branches, const Snapshot & before) {
    for (const Facts & f : before.branches) {
        if (std::find(branches.begin(), branches.end(), f.handle) != branches.end() && !world.store.get(f.handle).is_poisoned) CHECK(facts(world.store, f.handle) == f);
    }
}

void test_each() {
    struct None {};
    const auto none = [](World &) { return None(); };
    const auto nothing = [](World &, None, bool) {};
    sweep("create", none, [](World & w, None) { w.store.create(0, greedy(), 1); }, nothing);
    sweep("prune_subtree", none, [](World & w, None) { w.store.prune_subtree(w.top); }, nothing);
    sweep("retain_only", none, [](World & w, None) { w.store.retain_only(w.b); }, nothing);
    sweep("list", none, [](World & w, None) { w.store.list(0); }, nothing);
    sweep("prune", [](World & w) { return Branches{w.a, w.empty}; }, [](World & w, const Branches & b) { w.store.prune(b); }, [](World &, const Branches &, bool) {});
    const std::string gbnf = "root ::= \"another, longer than a short string\"", name = "root";
    sweep("set_grammar", none, [&](World & w, None) { w.store.set_grammar(w.strict, {false, gbnf, name}); }, nothing);

    const std::vector<uint64_t> seeds{1, 2, 3};
    sweep(
        "fork", [](World &) { return Branches{0, 0, 0}; }, [&](World & w, Branches & out) { w.store.fork(w.strict, out, seeds.data()); },
        [](World & w, const Branches & out, bool) {
            for (const pyl_branch b : out) CHECK(b != 0 && w.store.get(b).grammar);
            for (const pyl_branch b : out) w.paths[b] = w.paths[w.strict];
        });

    struct Call {
        Branches branches;
        Tokens tokens;
        Snapshot before;
    };
    sweep(
        "sample", [](World & w) { return Call{{w.top, w.strict, w.b}, {-77, -77, -77}, {}}; }, [](World & w, Call & c) { w.store.sample(c.branches, c.tokens.data()); },
        [](World &, const Call & c, bool) { CHECK(c.tokens[0] >= 0 && c.tokens[1] == 'a' && c.tokens[2] >= 0); });
    sweep(
        "commit", [](World & w) { return Call{{w.strict, w.a, w.b}, {'a', 10, 11}, snapshot(w.store)}; }, [](World & w, Call & c) { w.store.commit(c.branches, c.tokens.data()); },
        [](World & w, const Call & c, bool threw) {
            if (threw) return as_before_or_poisoned(w, c.branches, c.before);
            for (size_t i = 0; i < c.branches.size(); i++) w.paths[c.branches[i]].push_back(c.tokens[i]);
        });

    struct Prefill {
        std::vector<Tokens> texts;
        std::vector<pyl_run> runs;
    };
    sweep(
        "prefill",
        [](World & w) {
            // Dispatches of 4 that begin and end runs: a finished one's logits must be kept through the ones after it.
            Prefill out{{text(3, 2), text(6, 3), text(1, 4), text(1, 5), text(1, 6)}, {}};
            const Branches branches{w.top, w.a, w.b, w.strict, w.empty};
            for (size_t i = 0; i < branches.size(); i++) out.runs.push_back(run(branches[i], out.texts[i]));
            return out;
        },
        [](World & w, Prefill & p) { prefill(w.store, p.runs); },
        [](World & w, const Prefill & p, bool) {
            for (const pyl_run & r : p.runs) {
                for (uint32_t k = 0; k < r.n_landed; k++) w.paths[r.branch].push_back(r.tokens[k]);
                CHECK_EQ(r.state == PYL_STATE_POISONED, w.store.get(r.branch).is_poisoned);
                CHECK_EQ(r.state == PYL_STATE_ADVANCED, r.n_landed > 0 && !w.store.get(r.branch).is_poisoned);
            }
        });

    for (const uint32_t n_steps : {1u, 5u}) {
        sweep(
            n_steps == 1 ? "tick" : "five ticks",
            [n_steps](World & w) {
                for (const pyl_branch b : {w.top, w.b}) w.store.get(b).grammar = std::make_unique<OnlyThese>(Tokens{65, 66, 67, 68});
                return lanes({w.top, w.b, w.strict}, n_steps, {}, {0, 2, 0});  // one ends on the way, and keeps its logits
            },
            [](World & w, Lanes & l) { run_tick(w.store, l); },
            [](World & w, const Lanes & l, bool threw) {
                for (size_t i = 0; i < l.lanes.size(); i++) {
                    const Branch & branch = w.store.get(l.lanes[i].branch);
                    const Tokens taken = l.taken(i), fed = i == 1 ? Tokens{1} + taken : taken;
                    w.paths[l.lanes[i].branch] = w.paths[l.lanes[i].branch] + taken;
                    CHECK_EQ(l.lanes[i].state, branch.is_poisoned ? PYL_STATE_POISONED : taken.empty() ? PYL_STATE_UNCHANGED : PYL_STATE_ADVANCED);
                    if (branch.is_poisoned) continue;
                    CHECK(branch.sampler.history() == fed);
                    CHECK_EQ(branch.sampler.draws(), taken.size());
                }
                CHECK(threw || l.lanes[0].n_tokens == l.tick.n_ticks);
            });
    }
}

constexpr float inf = std::numeric_limits<float>::infinity();

// Everything a branch can have that takes memory.
void adorn(World & w, pyl_branch branch) {
    w.store.set_grammar(branch, {false, "root ::= \"abcdefgh, and on until it is longer than any short string\"", "root"});
    for (const Token token : {'a', 'b', 'c'}) commit(w.store, {branch}, {token}), w.paths[branch].push_back(token);
    const Tokens tokens{257, 258, 7};
    const std::vector<float> by{-inf, -inf, 1.0f};
    w.store.set_bias(branch, PYL_BIAS, tokens, by.data());
    w.store.set_bias(branch, PYL_STEER, tokens, by.data());
    w.store.set_metrics(branch, PYL_METRICS_MODEL | PYL_METRICS_SAMPLING);
}

void test_saved() {
    struct Saved {
        std::string bytes;
        pyl_branch loaded = 0;
    };
    sweep(
        "save",
        [](World & w) {
            adorn(w, w.strict);
            return Saved();
        },
        [](World & w, Saved & s) { s.bytes = w.store.save(w.strict, true); },
        [](World & w, Saved & s, bool) {
            CHECK(s.bytes == w.store.save(w.strict, true));
            w.paths[w.store.load(s.bytes)] = w.paths[w.strict];
        });
    for (const bool with_logits : {true, false}) {
        sweep(
            with_logits ? "load with grammar, bias, logits" : "load without logits",
            [&](World & w) {
                adorn(w, w.strict);
                return Saved{w.store.save(w.strict, with_logits)};
            },
            [](World & w, Saved & s) { s.loaded = w.store.load(s.bytes); },
            [&](World & w, Saved & s, bool threw) {
                CHECK(!threw);  // all or nothing: there is no failure after which something has changed
                w.paths[s.loaded] = w.paths[w.strict];
                CHECK(w.store.save(s.loaded, with_logits) == s.bytes);
            });
    }
    CHECK_EQ(live_counts().grammars, 0);
}

// What a fork carries by now: metrics, and what its grammar has seen.
void test_forks_that_carry_much() {
    sweep(
        "fork with metrics and a grammar half-way",
        [](World & w) {
            adorn(w, w.strict);
            return Branches{0, 0, 0};
        },
        [](World & w, Branches & out) { w.store.fork(w.strict, out, nullptr); },
        [](World & w, const Branches & out, bool threw) {
            CHECK(!threw);
            for (const pyl_branch b : out) {
                w.paths[b] = w.paths[w.strict];
                CHECK(w.store.get(b).grammar_taken.tokens() == Tokens({'a', 'b', 'c'}) && same_metrics(w.store.get(b).metrics, w.store.get(w.strict).metrics));
            }
            commit(w.store, out, {'d', 'd', 'd'});
            for (const pyl_branch b : out) w.paths[b].push_back('d');
        });
}

// What a fork asks for does not grow with what was read, and neither does what its first token asks for.
void test_forks_of_long_texts() {
    const auto cost = [](size_t n) {
        World w;
        Branch & strict = w.store.get(w.strict);
        for (size_t i = 0; i < n; i++) strict.grammar_taken.push_back('a');
        const size_t before = n_bytes;
        const Branches kids = fork(w.store, w.strict, 3);
        commit(w.store, kids, {'a', 'a', 'a'});
        const size_t bytes = n_bytes - before;
        Tokens want(n + 1, 'a');
        for (const pyl_branch kid : kids) CHECK(w.store.get(kid).grammar_taken.tokens() == want);
        want.pop_back();
        CHECK(w.store.get(w.strict).grammar_taken.tokens() == want);
        return bytes;
    };
    CHECK_EQ(cost(100000), cost(20));
}

// Draws that are shared out: whichever thread's allocation fails, no stream has advanced, or all have.
void test_shared_draws() {
    int n_failures = 0;
    for (const bool persistent : {false, true}) {
        for (n_th = 0, has_failed = true; has_failed;) {
            ContextParams params = context();
            params.n_threads = 2;
            Store store(model("n_vocab=210000"), params);
            Branches all;
            for (uint32_t i = 0; i < 4; i++) all.push_back(root(store, text(3, i), i < 2 ? SamplingParams() : greedy(), i));
            for (const size_t i : {1u, 2u}) store.get(all[i]).grammar = std::make_unique<OnlyThese>(text(9, 3));
            const Snapshot before = snapshot(store);
            Tokens drawn(4, -7);
            has_failed = false, goes_on = persistent, until_failure = ++n_th;
            bool threw = false;
            is_armed = true;
            try {
                store.sample(all, drawn.data());
            } catch (const std::exception &) {
                threw = true;
            }
            is_armed = false;
            n_failures += has_failed;
            if (threw) {
                CHECK(snapshot(store) == before && drawn == Tokens(4, -7));
            } else {  // a thread that could not be started is done without
                CHECK_EQ(store.get(all[0]).sampler.draws(), 1);
                CHECK(std::find(drawn.begin(), drawn.end(), -7) == drawn.end());
            }
            Tokens again(4);
            for (const pyl_branch b : all) store.get(b).sampler.rewind(0);
            store.sample(all, again.data());
            CHECK(threw || again == drawn);
        }
    }
    CHECK(n_failures > 20);
    n_th = 0;
}

void test_measures() {
    struct None {};
    const auto none = [](World &) { return None(); };
    sweep("set_metrics", none, [](World & w, None) { w.store.set_metrics(w.a, PYL_METRICS_MODEL); }, [](World &, None, bool) {});
    struct Priors {
        Tokens tokens = Tokens(300, -7);
        std::vector<float> log_probs = std::vector<float>(300, -7);
        Row at = Row(2, -7);
        Snapshot before;
    };
    const auto prepare = [](World & w) {
        adorn(w, w.strict);
        Priors out;
        out.before = snapshot(w.store);
        return out;
    };
    sweep(
        "priors", prepare, [](World & w, Priors & p) { w.store.priors(w.strict, p.tokens, p.log_probs.data()); },
        [](World & w, Priors & p, bool) { CHECK(p.tokens[0] == 'd' && p.tokens[1] == -7 && snapshot(w.store) == p.before); });
    sweep(
        "logits_at", prepare, [](World & w, Priors & p) { w.store.logits_at(w.strict, Tokens{0, 299}, p.at.data()); }, [](World & w, Priors & p, bool) { CHECK(p.at[1] == row(w.store, w.strict)[299]); });
}

// Prompts that take several rounds of leases and several dispatches; the store must not show it.
void test_score() {
    struct Scores {
        std::vector<Tokens> texts;
        std::vector<std::span<const Token>> spans;
        Row out;
        Snapshot before;
    };
    for (const bool continues : {false, true}) {
        sweep(
            continues ? "score after a branch" : "score from nothing",
            [](World & w) {
                adorn(w, w.strict);
                Scores s;
                for (uint32_t i = 0; i < 12; i++) s.texts.push_back(text(1 + i % 5, 50 + i));
                s.spans.assign(s.texts.begin(), s.texts.end());
                s.out.assign(24, -7);
                s.before = snapshot(w.store);
                return s;
            },
            [&](World & w, Scores & s) { w.store.score(continues ? w.strict : 0, s.spans, Tokens{3, 299}, s.out.data()); },
            [&](World & w, Scores & s, bool threw) {
                CHECK(!threw && snapshot(w.store) == s.before);
                for (size_t i = 0; i < s.texts.size(); i++) {
                    const Row want = replay((continues ? w.paths[w.strict] : Tokens()) + s.texts[i]);
                    CHECK(s.out[2 * i] == want[3] && s.out[2 * i + 1] == want[299]);
                }
            });
    }
}

void test_reseed() {
    struct Reseed {
        uint32_t landed = 77;
        Facts before;
    };
    for (const bool inherits : {true, false}) {
        sweep(
            inherits ? "reseed_kv of a fork" : "reseed_kv of a branch of its own",
            [&](World & w) {
                if (!inherits) {
                    w.empty = root(w.store, text(6, 7));
                    w.paths[w.empty] = text(6, 7);
                }
                return Reseed{77, facts(w.store, inherits ? w.b : w.empty)};
            },
            [&](World & w, Reseed & r) { w.store.reseed_kv(inherits ? w.b : w.empty, text(11, 9), r.landed); },
            [&](World & w, Reseed & r, bool threw) {
                const pyl_branch branch = inherits ? w.b : w.empty;
                const Facts after = facts(w.store, branch);
                CHECK(after.position == static_cast<Pos>(r.landed) && after.cells_own == r.landed && after.cells_inherited == 0 && !after.is_poisoned);
                CHECK(after.history == r.before.history && after.draws == r.before.draws && after.last_token == r.before.last_token);
                CHECK(threw ? r.landed % 4 == 0 && r.landed < 11 : r.landed == 11);
                const Tokens whole = text(11, 9);
                w.paths[branch] = Tokens(whole.begin(), whole.begin() + r.landed);
            });
    }
}

// Words, a picture of six rows in two dispatches, and two tokens.
std::vector<Part> some_parts() {
    std::vector<Part> out(3);
    out[0].text = "words, more of them than a short string holds";
    out[0].text.resize(9);
    out[1].kind = PYL_PART_IMAGE, out[1].width = 24, out[1].height = 16, out[1].rgb.assign(24 * 16 * 3, 7), out[1].id = "longer than any short string is";
    out[2].kind = PYL_PART_TOKENS, out[2].tokens = {1, 2};
    return out;
}

void test_prompts() {
    const auto projector_of = [](World & w) -> std::shared_ptr<const Projector> { return w.model->open_projector(w.model, "stub:", {}); };
    struct Made {
        std::shared_ptr<const Projector> projector;
        std::vector<Part> parts;
        std::shared_ptr<const Prompt> prompt;
    };
    sweep(
        "make_prompt", [&](World & w) { return Made{projector_of(w), some_parts(), nullptr}; }, [](World & w, Made & m) { m.prompt = make_prompt(w.model, m.projector, m.parts, true); },
        [](World &, const Made & m, bool threw) { CHECK(!threw && m.prompt->quote().n_cells == 1 + 9 + 6 + 2 && m.prompt->quote().n_pos == 1 + 9 + 3 + 2); });

    struct Call {
        std::shared_ptr<const Prompt> prompt;
        std::vector<PromptItem> items;
        Snapshot before;
    };
    sweep(
        "decode_prompts",
        [&](World & w) {
            Call out{make_prompt(w.model, projector_of(w), some_parts(), false), {}, snapshot(w.store)};
            for (const pyl_branch b : {w.a, w.empty, w.strict}) out.items.push_back({b, out.prompt, 0, 0, std::nullopt});
            return out;
        },
        [](World & w, Call & c) { w.store.decode_prompts(c.items); },
        [](World & w, const Call & c, bool threw) {
            CHECK(!threw);
            for (const PromptItem & item : c.items) {
                const Branch & branch = w.store.get(item.branch);
                const Facts & was = *std::find_if(c.before.branches.begin(), c.before.branches.end(), [&](const Facts & f) { return f.handle == item.branch; });
                if (!item.error) {
                    CHECK_EQ(item.n_cells_landed, c.prompt->quote().n_cells);
                    CHECK_EQ(item.n_segments_landed, 3);
                } else {
                    CHECK_EQ(item.error->code, PYL_E_OUT_OF_MEMORY);
                    CHECK_EQ(item.error->state, item.n_cells_landed ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED);
                    if (item.error->state == PYL_STATE_UNCHANGED) CHECK(facts(w.store, item.branch) == was);
                }
                CHECK(!branch.is_poisoned);  // never between a picture's two dispatches
                CHECK_EQ(branch.cells_own, was.cells_own + item.n_cells_landed);
                CHECK_EQ(branch.position, was.position + static_cast<Pos>(item.n_cells_landed) - (item.n_segments_landed > 1 ? 3 : 0));
                Tokens & path = w.paths[item.branch];
                if (item.n_segments_landed <= 1) {
                    const Tokens & words = c.prompt->segments()[0].tokens;
                    path.insert(path.end(), words.begin(), words.begin() + item.n_cells_landed);
                    continue;
                }
                if (!item.error) {
                    Store fresh(w.model, world_params());
                    std::vector<PromptItem> alone{{root(fresh, path), c.prompt, 0, 0, std::nullopt}};
                    fresh.decode_prompts(alone);
                    CHECK(!alone[0].error && same_bits(row(w.store, item.branch), row(fresh, alone[0].branch)));
                }
                w.paths.erase(item.branch);  // no tokens tell it
            }
        });
}

// Branches with metrics, and in a deterministic store, where the first of a call may be in and the others not.
void test_decoding() {
    struct Call {
        Branches branches;
        Tokens tokens;
        Snapshot before;
    };
    for (const bool alone : {false, true}) {
        is_deterministic = alone;
        sweep(
            alone ? "deterministic commit with metrics" : "commit with metrics",
            [](World & w) {
                for (const pyl_branch b : {w.strict, w.a, w.b}) w.store.set_metrics(b, PYL_METRICS_MODEL | PYL_METRICS_SAMPLING);
                return Call{{w.strict, w.a, w.b}, {'a', 10, 11}, snapshot(w.store)};
            },
            [](World & w, Call & c) { w.store.commit(c.branches, c.tokens.data()); },
            [&](World & w, const Call & c, bool threw) {
                CHECK(!threw || alone);  // one dispatch is all or nothing here
                size_t n_landed = 0;
                for (size_t i = 0; i < 3; i++) {
                    const auto was = std::find_if(c.before.branches.begin(), c.before.branches.end(), [&](const Facts & f) { return f.handle == c.branches[i]; });
                    const Facts now = facts(w.store, c.branches[i]);
                    if (now == *was) continue;
                    CHECK_EQ(i, n_landed++);  // the first ones, and whole
                    CHECK(now.position == was->position + 1 && now.last_token == c.tokens[i] && now.history.size() == was->history.size() + 1);
                    CHECK_EQ(now.metrics.n_tokens, 1);
                    w.paths[c.branches[i]].push_back(c.tokens[i]);
                }
                CHECK(threw ? n_landed > 0 && n_landed < 3 : n_landed == 3);
            });
        sweep(
            alone ? "deterministic ticks with metrics" : "ticks with metrics",
            [](World & w) {
                for (const pyl_branch b : {w.top, w.b}) w.store.get(b).grammar = std::make_unique<OnlyThese>(Tokens{65, 66, 67, 68});
                for (const pyl_branch b : {w.top, w.b, w.strict}) w.store.set_metrics(b, PYL_METRICS_MODEL | PYL_METRICS_SAMPLING);
                return lanes({w.top, w.b, w.strict}, 4, {}, {0, 2, 0});
            },
            [](World & w, Lanes & l) { run_tick(w.store, l); },
            [](World & w, const Lanes & l, bool threw) {
                for (size_t i = 0; i < l.lanes.size(); i++) {
                    const Branch & branch = w.store.get(l.lanes[i].branch);
                    const Tokens taken = l.taken(i);
                    w.paths[l.lanes[i].branch] = w.paths[l.lanes[i].branch] + taken;
                    CHECK_EQ(l.lanes[i].state, branch.is_poisoned ? PYL_STATE_POISONED : taken.empty() ? PYL_STATE_UNCHANGED : PYL_STATE_ADVANCED);
                    if (branch.is_poisoned) continue;
                    CHECK(branch.sampler.history() == (i == 1 ? Tokens{1} + taken : taken));
                    CHECK_EQ(branch.sampler.draws(), taken.size());
                    CHECK_EQ(branch.metrics.n_tokens, taken.size());
                    CHECK(i != 2 || branch.grammar_taken.tokens() == taken);
                }
                CHECK(threw || l.lanes[0].n_tokens == l.tick.n_ticks);
            });
    }
    is_deterministic = false;
}

void test_embeddings() {
    std::vector<Tokens> texts;
    for (uint32_t i = 0; i < 9; i++) texts.push_back(text(1 + i, 50 + i));
    const std::vector<std::span<const Token>> spans(texts.begin(), texts.end());
    Row want(9 * 8);
    Embedder(model(), {32, 1, PYL_POOLING_MODEL, PYL_FLASH_ATTN_AUTO}).embed(spans, true, want.data());
    int n_failures = 0;
    for (has_failed = true; has_failed; n_failures += has_failed) {
        Embedder one(model(), {32, 1, PYL_POOLING_MODEL, PYL_FLASH_ATTN_AUTO});
        Row out(9 * 8, -7);
        has_failed = false, goes_on = false, until_failure = ++n_th;
        is_armed = true;
        try {
            one.embed(spans, true, out.data());
            is_armed = false;
            CHECK(same_bits(out, want));
        } catch (const std::bad_alloc &) {
            is_armed = false;
            CHECK(has_failed && out == Row(9 * 8, -7));
        }
        one.embed(spans, true, out.data());  // nothing is left locked or half filled
        CHECK(same_bits(out, want));
    }
    n_th = 0;
    std::printf("embed: %d failures\n", n_failures);
    for (has_failed = true; has_failed;) {
        has_failed = false, goes_on = false, until_failure = ++n_th;
        const auto of = model();
        is_armed = true;
        try {
            const Embedder opened(of, {32, 1, PYL_POOLING_MODEL, PYL_FLASH_ATTN_AUTO});
            is_armed = false;
        } catch (const std::bad_alloc &) {
            is_armed = false;
        }
        CHECK_EQ(live_counts().contexts, 0);
    }
    n_th = 0;
}

// Telling of a failure of the engine takes memory too; when there is none, what is said must still not be "unchanged".
void test_telling_of_failures() {
    struct Call {
        Branches branches;
        Tokens tokens;
    };
    engine_fails_at = 4;
    sweep(
        "commit that the engine fails", [](World & w) { return Call{{w.strict, w.a, w.b}, {'a', 10, 11}}; }, [](World & w, Call & c) { w.store.commit(c.branches, c.tokens.data()); },
        [](World & w, const Call & c, bool threw) {
            CHECK(threw);
            for (const pyl_branch b : c.branches) CHECK(w.store.get(b).is_poisoned);
        });
    engine_fails_at = 5;
    sweep(
        "tick of which the second step fails",
        [](World & w) {
            for (const pyl_branch b : {w.top, w.b}) w.store.get(b).grammar = std::make_unique<OnlyThese>(Tokens{65, 66, 67, 68});
            return lanes({w.top, w.b, w.strict}, 4, {}, {0, 1, 0});
        },
        [](World & w, Lanes & l) { run_tick(w.store, l); },
        [](World & w, const Lanes & l, bool threw) {
            CHECK(threw);
            for (size_t i = 0; i < l.lanes.size(); i++) {
                const pyl_branch b = l.lanes[i].branch;
                w.paths[b] = w.paths[b] + l.taken(i);
                CHECK_EQ(l.lanes[i].state == PYL_STATE_POISONED, w.store.get(b).is_poisoned);
            }
        });
    sweep(
        "prefill of which the second dispatch fails",
        [](World & w) { return Call{{w.top, w.empty}, text(7, 2)}; },
        [](World & w, Call & c) {
            pyl_run runs[2] = {{sizeof(pyl_run), 5, c.branches[0], c.tokens.data(), 0, 0}, {sizeof(pyl_run), 2, c.branches[1], c.tokens.data(), 0, 0}};
            uint32_t n = 0;
            w.store.prefill(runs, 0, n);
        },
        [](World & w, const Call & c, bool threw) {
            CHECK(threw);
            const bool began = w.store.get(c.branches[0]).position > 5;  // the first dispatch landed before memory ran out
            if (!w.store.get(c.branches[0]).is_poisoned && began) w.paths[c.branches[0]] = w.paths[c.branches[0]] + Tokens(c.tokens.begin(), c.tokens.begin() + 4);
            CHECK_EQ(w.store.get(c.branches[0]).is_poisoned, w.store.get(c.branches[1]).is_poisoned);
        });
    engine_fails_at = 0;
}

// A grammar that breaks when it is fed a token the cache holds already: rare, and still no lie may be told about it.
class Breaks final : public Grammar {
public:
    explicit Breaks(int after) : after_(after) {}
    std::unique_ptr<Grammar> clone() const override { return std::make_unique<Breaks>(after_); }
    void filter(std::span<Candidate>) override {}
    void accept(Token) override {
        if (after_-- == 0) throw std::bad_alloc();
    }

private:
    int after_;
};

void test_a_landed_token_that_cannot_be_recorded() {
    for (const int after : {0, 2}) {
        World w;
        w.store.get(w.a).grammar = std::make_unique<Breaks>(after);
        w.store.get(w.top).grammar = std::make_unique<OnlyThese>(Tokens{65, 66});
        w.store.get(w.b).grammar = std::make_unique<OnlyThese>(Tokens{65, 66});
        Lanes l = lanes({w.top, w.a, w.b}, 6);
        const Error error = CHECK_THROWS(PYL_E_OUT_OF_MEMORY, run_tick(w.store, l));
        CHECK_EQ(error.state, PYL_STATE_POISONED);
        CHECK_EQ(error.partial, after > 0);
        CHECK(w.store.get(w.a).is_poisoned);
        for (size_t i = 0; i < 3; i++) {
            const pyl_branch b = l.lanes[i].branch;
            const Branch & branch = w.store.get(b);
            for (const Token token : l.taken(i)) w.paths[b].push_back(token);
            CHECK_EQ(l.lanes[i].state, branch.is_poisoned ? PYL_STATE_POISONED : l.lanes[i].n_tokens ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED);
            CHECK(branch.is_poisoned || branch.sampler.history() == l.taken(i));
        }
        w.check_sound();
    }
    World w;
    w.store.get(w.a).grammar = std::make_unique<Breaks>(0);
    const Snapshot before = snapshot(w.store);
    const Error error = CHECK_THROWS(PYL_E_OUT_OF_MEMORY, commit(w.store, {w.top, w.a, w.b}, {1, 2, 3}));
    CHECK_EQ(error.state, PYL_STATE_POISONED);
    as_before_or_poisoned(w, {w.top, w.a, w.b}, before);
    CHECK(w.store.get(w.a).is_poisoned);
}

}  // namespace

int main() {
    test_each();
    test_saved();
    test_forks_that_carry_much();
    test_forks_of_long_texts();
    test_shared_draws();
    test_measures();
    test_score();
    test_reseed();
    test_prompts();
    test_decoding();
    test_embeddings();
    test_telling_of_failures();
    test_a_landed_token_that_cannot_be_recorded();
    return check::result("test_memory");
}
