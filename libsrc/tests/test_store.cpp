// The store on the stub engine, whose logits are a hash of exactly the cells a sequence can see: a branch that sees one cell too
// many, too few or in the wrong place has other logits. "As it should be" is always: bit for bit what a fresh store gives
// that decoded the same tokens and nothing else.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <span>
#include <utility>

#include "check.hpp"
#include "stub_store.hpp"

using namespace stub;

namespace {

constexpr Token eos = 257, eot = 258;

SamplingParams drawing(float temperature = 0.8f) {
    SamplingParams p;
    p.temperature = temperature;
    return p;
}

// The call is refused with this code, and nothing anyone can see has changed.
template <typename Call>
Error refused(Store & store, int32_t code, Call && call) {
    const Snapshot before = snapshot(store);
    const uint64_t sampled = pressure(store).n_tokens_sampled, dispatches = pressure(store).n_dispatches;
    const Error error = CHECK_THROWS(code, call());
    CHECK(snapshot(store) == before);
    CHECK_EQ(error.state, PYL_STATE_UNCHANGED);
    CHECK_EQ(error.partial, false);
    CHECK(!error.message.empty());
    CHECK_EQ(pressure(store).n_tokens_sampled, sampled);
    CHECK_EQ(pressure(store).n_dispatches, dispatches);
    return error;
}

// The engine has exactly as many free cells as the books say: that many can be decoded, and not one more.
void check_capacity(Store & store) {
    const uint32_t left = pressure(store).cells_remaining;
    const pyl_branch filler = store.create(0, greedy(), 1);
    if (left) prefill(store, filler, text(left, 99));
    const Error error = CHECK_THROWS(PYL_E_CONTEXT, prefill(store, filler, text(1)));
    CHECK_EQ(error.need, 1);
    CHECK_EQ(error.have, 0);
    store.prune(Branches{filler});
    CHECK_EQ(pressure(store).cells_remaining, left);
}

Token best_of(const Row & logits) { return static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin()); }

// A prompt after which a greedy branch draws this token.
Tokens prompt_for(Token token) {
    Store store(model(), context(8, 8, 1));
    for (uint32_t of = 1;; of++) {
        const Tokens prompt = text(3, of);
        const pyl_branch a = root(store, prompt);
        const bool found = best_of(row(store, a)) == token;
        store.prune(Branches{a});
        if (found) return prompt;
    }
}

void test_batched_equals_alone() {
    Store store(model(), context(512, 256, 16));
    Branches all;
    std::vector<Tokens> texts;
    std::vector<pyl_run> runs;
    for (uint32_t i = 0; i < 12; i++) {
        all.push_back(root(store));
        texts.push_back(text(1 + i * i % 17, i));
    }
    for (size_t i = 0; i < all.size(); i++) runs.push_back(run(all[i], texts[i]));
    CHECK_EQ(prefill(store, runs), 1);
    for (size_t i = 0; i < all.size(); i++) {
        CHECK(same_bits(row(store, all[i]), replay(texts[i])));
        CHECK_EQ(runs[i].n_landed, texts[i].size());
        CHECK_EQ(runs[i].state, PYL_STATE_ADVANCED);
    }
    for (Token step = 0; step < 3; step++) {  // one dispatch for all, in an order that is not that of their sequences
        Branches order = all;
        std::rotate(order.begin(), order.begin() + 5, order.end());
        Tokens next;
        for (size_t i = 0; i < order.size(); i++) next.push_back(static_cast<Token>(i * 3) + step);
        const uint64_t before = pressure(store).n_dispatches;
        commit(store, order, next);
        CHECK_EQ(pressure(store).n_dispatches, before + 1);
        for (size_t i = 0; i < order.size(); i++) {
            auto & t = texts[(i + 5) % all.size()];
            t.push_back(next[i]);
            CHECK(same_bits(row(store, order[i]), replay(t)));
            CHECK_EQ(store.get(order[i]).last_token, next[i]);
            CHECK_EQ(store.get(order[i]).position, t.size());
        }
    }
    CHECK(!same_bits(row(store, all[0]), row(store, all[1])));
}

void test_fork_equals_replay() {
    Store store(model(), context());
    const Tokens base = text(9);
    const pyl_branch parent = root(store, base, drawing(), 42);
    const auto kids = fork(store, parent, 3, {});
    for (const pyl_branch kid : kids) {
        CHECK(same_bits(row(store, kid), row(store, parent)));
        CHECK_EQ(store.get(kid).sampler.seed(), 42);
        CHECK_EQ(store.handle_of(store.get(kid).parent), parent);
    }
    CHECK(store.list(parent) == kids);
    commit(store, {kids[0], kids[1], kids[2]}, {10, 11, 12});
    for (size_t i = 0; i < 3; i++) CHECK(same_bits(row(store, kids[i]), replay(base + Tokens{static_cast<Token>(10 + i)})));
    CHECK(same_bits(row(store, parent), replay(base)));
    // The parent moves on: a child that was forked before does not see it.
    commit(store, {parent}, {99});
    prefill(store, kids[1], {5, 6, 7});
    CHECK(same_bits(row(store, parent), replay(base + Tokens{99})));
    CHECK(same_bits(row(store, kids[1]), replay(base + Tokens{11, 5, 6, 7})));
    // A grandchild, and a root that starts at a later position.
    const pyl_branch grandchild = fork(store, kids[1], 1)[0];
    commit(store, {grandchild}, {8});
    CHECK(same_bits(row(store, grandchild), replay(base + Tokens{11, 5, 6, 7, 8})));
    const pyl_branch late = store.create(50, greedy(), 1);
    prefill(store, late, {1, 2, 3});
    CHECK_EQ(store.get(late).position, 53);
    CHECK(same_bits(row(store, late), replay({1, 2, 3}, 50)));
    CHECK(!same_bits(row(store, late), replay({1, 2, 3})));
    refused(store, PYL_E_INVALID, [&] { store.create(-1, greedy(), 1); });
    // A branch without logits can be forked; so can nothing at all.
    const pyl_branch empty = root(store);
    CHECK(!store.get(fork(store, empty, 1)[0]).logits.any());
    CHECK(fork(store, empty, 0).empty());
}

// A fork continues exactly as its parent would: stream, penalty window, grammar, last token; a seed of its own changes the stream only.
void test_fork_clones() {
    Store store(model(), context());
    SamplingParams p = drawing(1.5f);
    p.penalty_presence = 0.7f;
    const pyl_branch parent = root(store, text(5), p, 42);
    Lanes first = lanes({parent}, 6);
    run_tick(store, first);
    CHECK_EQ(first.lanes[0].n_tokens, 6);
    CHECK_EQ(store.get(parent).sampler.history().size(), 6);
    const auto kids = fork(store, parent, 2), seeded = fork(store, parent, 2, {7, 8});
    for (const pyl_branch kid : {kids[0], kids[1], seeded[0], seeded[1]}) {
        CHECK(store.get(kid).sampler.history() == store.get(parent).sampler.history());
        CHECK(store.get(kid).sampler.params() == p);
        CHECK_EQ(store.get(kid).last_token, store.get(parent).last_token);
    }
    CHECK_EQ(store.get(kids[0]).sampler.draws(), 6);
    CHECK_EQ(store.get(seeded[0]).sampler.draws(), 0);
    CHECK_EQ(store.get(seeded[1]).sampler.seed(), 8);
    Lanes next = lanes({parent, kids[0], kids[1], seeded[0], seeded[1]}, 8);
    run_tick(store, next);
    CHECK(next.taken(0) == next.taken(1) && next.taken(0) == next.taken(2));
    CHECK(next.taken(0) != next.taken(3) && next.taken(3) != next.taken(4));
    // Grammar: each has its own place in it.
    const pyl_branch strict = root(store, text(4));
    store.set_grammar(strict, {false, "root ::= \"abc\"", "root"});
    commit(store, {strict}, {'a'});
    const pyl_branch clone = fork(store, strict, 1)[0];
    commit(store, {clone}, {'b'});
    refused(store, PYL_E_GRAMMAR, [&] { commit(store, {clone}, {'b'}); });
    commit(store, {strict, clone}, {'b', 'c'});
    refused(store, PYL_E_GRAMMAR, [&] { commit(store, {clone}, {'c'}); });
}

void test_pruning_siblings() {
    Store store(model(), context());
    const Tokens base = text(20);
    const pyl_branch parent = root(store, base);
    const auto kids = fork(store, parent, 4);
    for (size_t i = 0; i < 4; i++) prefill(store, kids[i], text(i + 1, static_cast<uint32_t>(i)));
    const auto twins = fork(store, kids[3], 2);
    std::map<pyl_branch, Facts> before;
    for (const pyl_branch b : {parent, kids[0], kids[2], kids[3], twins[0]}) before[b] = facts(store, b);
    store.prune(Branches{kids[1], twins[1]});
    before[parent].children = {kids[0], kids[2], kids[3]};
    before[kids[3]].children = {twins[0]};
    for (const auto & [b, f] : before) CHECK(facts(store, b) == f);
    CHECK_EQ(pressure(store).cells_used, 20 + 1 + 3 + 4);
    commit(store, {twins[0], kids[0]}, {1, 2});
    CHECK(same_bits(row(store, twins[0]), replay(base + text(4, 3) + Tokens{1})));
    CHECK(same_bits(row(store, kids[0]), replay(base + text(1, 0) + Tokens{2})));
    check_capacity(store);
}

void test_cells() {
    Store store(model(), context(64, 16, 8));
    const auto books = [&](pyl_branch b, Pos position, uint32_t own, uint32_t inherited) {
        CHECK_EQ(store.get(b).position, position);
        CHECK_EQ(store.get(b).cells_own, own);
        CHECK_EQ(store.get(b).cells_inherited, inherited);
    };
    const auto used = [&](uint32_t cells, uint32_t leases) {
        const pyl_pressure p = pressure(store);
        CHECK_EQ(p.cells_used, cells);
        CHECK_EQ(p.cells_remaining, 64 - cells);
        CHECK_EQ(p.leases_used, leases);
        CHECK_EQ(p.leases_remaining, 8 - leases);
    };
    used(0, 0);
    const pyl_branch a = root(store, text(10));
    books(a, 10, 10, 0), used(10, 1);
    const pyl_branch b = fork(store, a, 1)[0];
    books(b, 10, 0, 10), used(10, 2);  // forking adds no cell
    commit(store, {a, b}, {1, 2});
    books(a, 11, 11, 0), books(b, 11, 1, 10), used(12, 2);
    const pyl_branch c = fork(store, b, 1)[0];
    books(c, 11, 0, 11);
    prefill(store, c, text(5));
    books(c, 16, 5, 11), used(17, 3);
    const pyl_branch late = store.create(100, greedy(), 1);
    books(late, 100, 0, 0);
    prefill(store, late, text(3));
    books(late, 103, 3, 0), used(20, 4);
    check_capacity(store);
    store.prune(Branches{late});  // what was before start_pos was never charged, and is not refunded
    used(17, 3);
    store.retain_only(c);
    books(c, 16, 16, 0), used(16, 1);
    check_capacity(store);
    store.prune(Branches{c});
    used(0, 0);
    check_capacity(store);
    const pyl_pressure p = pressure(store);
    CHECK_EQ(p.struct_size, sizeof p);
    CHECK_EQ(p.n_ctx, 64);
    CHECK_EQ(p.n_batch, 16);
    CHECK_EQ(p.n_threads, 1);
    CHECK_EQ(p.flash_attn, PYL_FLASH_ATTN_ON);
    CHECK_EQ(p.is_draining, 0);
}

void test_counters() {
    Store store(model(), context(64, 4, 4));
    const pyl_branch a = root(store, text(10)), b = root(store, text(3));
    CHECK_EQ(pressure(store).n_dispatches, 3 + 1);
    CHECK_EQ(pressure(store).n_tokens_decoded, 13);
    CHECK_EQ(pressure(store).n_tokens_sampled, 0);
    Tokens drawn(2);
    store.sample(Branches{a, b}, drawn.data());
    commit(store, {a, b}, drawn);
    CHECK_EQ(pressure(store).n_dispatches, 5);
    CHECK_EQ(pressure(store).n_tokens_decoded, 15);
    CHECK_EQ(pressure(store).n_tokens_sampled, 2);
    CHECK(pressure(store).decode_s >= 0 && pressure(store).sample_s >= 0);
}

void test_restrict_and_cascade() {
    {  // deep: 200 levels, each with a cell of its own
        Store store(model(), context(512, 256, 256));
        Branches level{root(store, {1})};
        Tokens path{1};
        for (Token i = 1; i < 200; i++) {
            level.push_back(fork(store, level.back(), 1)[0]);
            commit(store, {level.back()}, {i});
            path.push_back(i);
        }
        CHECK(same_bits(row(store, level.back()), replay(path)));
        CHECK_EQ(pressure(store).cells_used, 200);
        CHECK_EQ(store.get(level[199]).cells_inherited, 199);
        const Error error = refused(store, PYL_E_HAS_CHILDREN, [&] { store.prune(Branches{level[199], level[100]}); });
        CHECK_EQ(error.index, 1);
        Branches upper(level.begin(), level.begin() + 150);
        CHECK_EQ(refused(store, PYL_E_HAS_CHILDREN, [&] { store.prune(upper); }).index, 149);  // the one whose child is not in the list
        store.prune_subtree(level[150]);
        CHECK_EQ(pressure(store).cells_used, 150);
        CHECK_EQ(pressure(store).leases_used, 150);
        CHECK(store.list(level[149]).empty());
        CHECK(same_bits(row(store, level[149]), replay(Tokens(path.begin(), path.begin() + 150))));
        store.prune_subtree(level[150]);  // stale: nothing to do
        CHECK_EQ(pressure(store).leases_used, 150);
        std::shuffle(upper.begin(), upper.end(), std::mt19937(3));
        upper.push_back(upper[7]);  // twice, and a stale one: no matter
        upper.push_back(level[180]);
        store.prune(upper);
        CHECK_EQ(pressure(store).cells_used, 0);
        CHECK_EQ(pressure(store).leases_used, 0);
        check_capacity(store);
    }
    {  // wide: every lease a child of one root, then a second level
        Store store(model(), context(512, 256, 256));
        const pyl_branch top = root(store, text(8));
        const auto kids = fork(store, top, 100);
        commit(store, kids, text(100));
        Branches grandkids;
        for (const pyl_branch kid : kids) grandkids.push_back(fork(store, kid, 1)[0]);
        commit(store, grandkids, text(100, 2));
        CHECK_EQ(pressure(store).cells_used, 208);
        CHECK_EQ(refused(store, PYL_E_HAS_CHILDREN, [&] { store.prune(Branches{top}); }).have, 100);
        CHECK(store.list(top) == kids);
        CHECK_EQ(store.list(0).size(), 201);
        CHECK_EQ(store.list(0)[0], top);
        for (size_t i = 0; i < 100; i += 3) store.prune_subtree(kids[i]);
        CHECK_EQ(pressure(store).cells_used, 208 - 2 * 34);
        for (size_t i = 1; i < 100; i += 3) CHECK(same_bits(row(store, grandkids[i]), replay(text(8) + Tokens{text(100)[i], text(100, 2)[i]})));
        check_capacity(store);
        store.prune_subtree(top);
        CHECK_EQ(pressure(store).cells_used, 0);
        CHECK_EQ(pressure(store).leases_remaining, 256);
        CHECK(store.list(0).empty());
        check_capacity(store);
    }
    {  // pruning nothing
        Store store(model(), context());
        store.prune({});
        store.prune(Branches{0, 12345, ~0ull});
        store.prune_subtree(0);
        store.prune_subtree(~0ull);
        CHECK_EQ(store.epoch(), 1);
    }
}

void test_retain_only() {
    for (const int which : {0, 1, 2, 3}) {  // the root, a branch in the middle, a leaf, another root
        Store store(model(), context(128, 32, 16));
        const Tokens base = text(12);
        const pyl_branch top = root(store, base), other = root(store, text(4, 9));
        const auto kids = fork(store, top, 3);
        commit(store, kids, {1, 2, 3});
        commit(store, {top}, {77});  // the root went on after the forks
        const auto leaves = fork(store, kids[1], 2);
        commit(store, leaves, {4, 5});
        const pyl_branch kept = std::vector{top, kids[1], leaves[0], other}[static_cast<size_t>(which)];
        const Tokens path = std::vector{base + Tokens{77}, base + Tokens{2}, base + Tokens{2, 4}, text(4, 9)}[static_cast<size_t>(which)];
        Facts want = facts(store, kept);
        const Branches all = store.list(0);
        store.retain_only(kept);
        want.parent = 0, want.children = {};
        want.cells_own = static_cast<uint32_t>(path.size()), want.cells_inherited = 0;
        CHECK(facts(store, kept) == want);
        CHECK(store.list(0) == Branches{kept});
        for (const pyl_branch b : all) {
            if (b != kept) CHECK_THROWS(PYL_E_STALE, store.get(b));
        }
        CHECK_EQ(pressure(store).cells_used, path.size());
        CHECK_EQ(pressure(store).leases_remaining, 15);
        check_capacity(store);
        CHECK(same_bits(row(store, kept), replay(path)));
        const pyl_branch again = fork(store, kept, 1)[0];
        commit(store, {kept, again}, {8, 9});
        CHECK(same_bits(row(store, kept), replay(path + Tokens{8})));
        CHECK(same_bits(row(store, again), replay(path + Tokens{9})));
        store.prune_subtree(kept);
        CHECK_EQ(pressure(store).cells_used, 0);
        refused(store, PYL_E_STALE, [&] { store.retain_only(kept); });
    }
}

void test_stale_handles() {
    Store store(model(), context(64, 8, 4));
    std::set<pyl_branch> seen;
    Branches alive;
    std::mt19937 rng(11);
    for (int i = 0; i < 6000; i++) {
        if (alive.size() < 4) {
            alive.push_back(alive.empty() || rng() % 2 ? root(store) : fork(store, alive[rng() % alive.size()], 1)[0]);
            CHECK(seen.insert(alive.back()).second);  // no handle is ever given out twice
            CHECK(alive.back() != 0);
        } else {
            store.retain_only(alive[rng() % 4]);
            store.prune_subtree(store.list(0)[0]);
            alive.clear();
        }
    }
    for (const pyl_branch handle : seen) {
        const bool is_alive = std::find(alive.begin(), alive.end(), handle) != alive.end();
        try {
            store.get(handle);
            CHECK(is_alive);
        } catch (const Error & error) {
            CHECK(!is_alive && error.code == PYL_E_STALE);
        }
    }
    // Every call says so, with the index, and leaves the living alone.
    store.prune(store.list(0));
    const pyl_branch good = root(store, {1, 2});
    const pyl_branch stale = *seen.begin();
    for (const pyl_branch bad : Branches{stale, 0, good + (1ull << 32), good + 4, ~0ull}) {
        const Branches both{good, bad};
        const Tokens one{5}, two{5, 6};
        Tokens out(2);
        std::vector<pyl_run> runs{run(good, one), run(bad, one)};
        CHECK_EQ(refused(store, PYL_E_STALE, [&] { prefill(store, runs); }).index, 1);
        CHECK_EQ(refused(store, PYL_E_STALE, [&] { commit(store, both, two); }).index, 1);
        CHECK_EQ(refused(store, PYL_E_STALE, [&] { store.sample(both, out.data()); }).index, 1);
        Lanes l = lanes(both, 1);
        CHECK_EQ(refused(store, PYL_E_STALE, [&] { run_tick(store, l); }).index, 1);
        CHECK_EQ(refused(store, PYL_E_STALE, [&] { fork(store, bad, 1); }).index, -1);
        refused(store, PYL_E_STALE, [&] { store.retain_only(bad); });
        refused(store, PYL_E_STALE, [&] { store.set_grammar(bad, {false, "root ::= \"a\"", "root"}); });
        if (bad) refused(store, PYL_E_STALE, [&] { store.list(bad); });
        const Snapshot before = snapshot(store);
        store.prune(Branches{bad, bad});
        store.prune_subtree(bad);
        CHECK(snapshot(store) == before);
    }
}

void test_leases() {
    Store store(model(), context(64, 8, 5));
    const pyl_branch a = root(store, text(4));
    Branches out(5, 4711);
    Error error = refused(store, PYL_E_NO_LEASE, [&] { store.fork(a, out, nullptr); });
    CHECK_EQ(error.need, 5);
    CHECK_EQ(error.have, 4);
    CHECK(out == Branches(5, 4711));  // all or none
    const auto kids = fork(store, a, 4);
    CHECK_EQ(std::set<pyl_branch>(kids.begin(), kids.end()).size(), 4);
    error = refused(store, PYL_E_NO_LEASE, [&] { root(store); });
    CHECK_EQ(error.need, 1);
    CHECK_EQ(error.have, 0);
    refused(store, PYL_E_NO_LEASE, [&] { fork(store, kids[0], 1); });
    CHECK_EQ(pressure(store).leases_remaining, 0);
    store.prune(Branches{kids[2]});
    CHECK_EQ(pressure(store).leases_remaining, 1);
    // The lease that was given back comes empty: its next owner sees nothing of the last one.
    const pyl_branch fresh = root(store, {1, 2, 3});
    CHECK(same_bits(row(store, fresh), replay({1, 2, 3})));
    CHECK_EQ(store.get(fresh).sampler.history().size(), 0);
    CHECK_EQ(store.get(fresh).last_token, -1);
}

void test_capacity_is_refused_before() {
    Store store(model(), context(20, 16, 4));
    const pyl_branch a = root(store, text(10), drawing(), 5), b = root(store, text(7, 2), drawing(), 6);
    Tokens drawn(2);
    store.sample(Branches{a, b}, drawn.data());
    const Tokens two = text(2), four = text(4);
    std::vector<pyl_run> runs{run(a, two), run(b, two)};
    Error error = refused(store, PYL_E_CONTEXT, [&] { prefill(store, runs); });
    CHECK_EQ(error.need, 4);
    CHECK_EQ(error.have, 3);
    for (const pyl_run & r : runs) CHECK(r.n_landed == 0 && r.state == PYL_STATE_UNCHANGED);
    error = refused(store, PYL_E_CONTEXT, [&] { prefill(store, a, four); });
    CHECK_EQ(error.need, 4);
    prefill(store, a, two);  // one cell left
    error = refused(store, PYL_E_CONTEXT, [&] { commit(store, {a, b}, {1, 2}); });
    CHECK_EQ(error.need, 2);
    CHECK_EQ(error.have, 1);
    Lanes l = lanes({a, b}, 4);
    error = refused(store, PYL_E_CONTEXT, [&] { run_tick(store, l); });
    CHECK_EQ(error.need, 2);
    CHECK_EQ(error.have, 1);
    commit(store, {b}, {3});
    refused(store, PYL_E_CONTEXT, [&] { commit(store, {b}, {3}); });
    CHECK_EQ(pressure(store).cells_remaining, 0);
    store.sample(Branches{a, b}, drawn.data());  // sampling takes no cell
    store.prune(Branches{a});
    CHECK_EQ(pressure(store).cells_remaining, 12);
}

void test_duplicates_and_bad_tokens() {
    Store store(model(), context(64, 8, 6));
    const pyl_branch a = root(store, text(3), drawing()), b = root(store, text(4), drawing());
    const Tokens one{1}, none;
    std::vector<pyl_run> twice{run(a, one), run(b, one), run(a, one)}, empties{run(a, none), run(a, none)}, half{run(a, none), run(b, one), run(a, one)};
    CHECK_EQ(refused(store, PYL_E_INVALID, [&] { prefill(store, twice); }).index, 2);
    refused(store, PYL_E_INVALID, [&] { prefill(store, empties); });  // a branch may stand only once
    refused(store, PYL_E_INVALID, [&] { prefill(store, half); });
    CHECK_EQ(refused(store, PYL_E_INVALID, [&] { commit(store, {a, b, a}, {1, 2, 3}); }).index, 2);
    Lanes l = lanes({b, a, b}, 2);
    CHECK_EQ(refused(store, PYL_E_INVALID, [&] { run_tick(store, l); }).index, 2);
    for (const Token bad : {-1, 300, 301, std::numeric_limits<Token>::max(), std::numeric_limits<Token>::min()}) {
        const Tokens tokens{1, 2, bad};
        std::vector<pyl_run> runs{run(a, one), run(b, tokens)};
        CHECK_EQ(refused(store, PYL_E_INVALID, [&] { prefill(store, runs); }).index, 1);
        CHECK_EQ(refused(store, PYL_E_INVALID, [&] { commit(store, {a, b}, {1, bad}); }).index, 1);
        const Tokens stops{1, bad};
        Lanes s = lanes({a}, 1, stops);
        refused(store, PYL_E_INVALID, [&] { run_tick(store, s); });
    }
    prefill(store, a, {299});  // the last id is fine
    // More branches than one dispatch takes: the kernel checks for itself, though a store from the ABI cannot be that narrow.
    Store narrow(model(), context(64, 2, 6));
    const pyl_branch top = root(narrow, text(3));
    const auto kids = fork(narrow, top, 3);
    refused(narrow, PYL_E_INVALID, [&] { commit(narrow, kids, {1, 2, 3}); });
    Lanes wide = lanes(kids, 1);
    refused(narrow, PYL_E_INVALID, [&] { run_tick(narrow, wide); });
    // Nothing to do is not an error.
    commit(store, {}, {});
    store.sample({}, nullptr);
    std::vector<pyl_run> no_runs;
    CHECK_EQ(prefill(store, no_runs), 0);
    Lanes nobody = lanes({}, 3);
    run_tick(store, nobody);
    CHECK_EQ(nobody.tick.n_ticks, 0);
}

// What a refused call says of its runs and lanes is true of every one, whatever the structs held before: nothing has landed.
void test_refused_calls_fill_in_their_outputs() {
    Store store(model(), context(64, 8, 6));
    const pyl_branch a = root(store, text(3)), b = root(store, text(4));
    const Tokens one{1};
    for (const size_t bad : {0u, 1u, 2u}) {
        std::vector<pyl_run> runs{run(a, one), run(b, one)};
        runs.insert(runs.begin() + static_cast<std::ptrdiff_t>(bad), run(0, one));
        refused(store, PYL_E_STALE, [&] { prefill(store, runs); });
        for (const pyl_run & r : runs) {
            CHECK_EQ(r.n_landed, 0);
            CHECK_EQ(r.state, PYL_STATE_UNCHANGED);
        }
        Branches branches{a, b};
        branches.insert(branches.begin() + static_cast<std::ptrdiff_t>(bad), 0);
        Lanes l = lanes(branches, 2);
        refused(store, PYL_E_STALE, [&] { run_tick(store, l); });
        for (const pyl_lane & lane : l.lanes) {
            CHECK_EQ(lane.n_tokens, 0);
            CHECK_EQ(lane.state, PYL_STATE_UNCHANGED);
            CHECK_EQ(lane.finish, PYL_FINISH_NONE);
            CHECK_EQ(lane.final_token, -1);
        }
        CHECK_EQ(l.tick.n_ticks + l.tick.n_dispatches, 0);
        CHECK_EQ(l.tick.out_of_cells, 0);
    }
}

void test_chunking() {
    const Tokens longest = text(30);
    const std::vector<Tokens> texts{text(3, 1), text(11, 2), text(1, 3), text(6, 4)};
    for (uint32_t n_batch = 1; n_batch <= 9; n_batch++) {
        for (size_t n = 1; n <= longest.size(); n++) {
            Store store(model(), context(64, n_batch, 1));
            const Tokens tokens(longest.begin(), longest.begin() + static_cast<std::ptrdiff_t>(n));
            const pyl_branch a = root(store);
            CHECK_EQ(prefill(store, a, tokens), (n + n_batch - 1) / n_batch);
            CHECK(same_bits(row(store, a), replay(tokens)));
            CHECK_EQ(store.get(a).position, n);
            CHECK_EQ(pressure(store).cells_used, n);
        }
        // Many runs share dispatches: 21 tokens take 21 / n_batch, however they are spread.
        Store store(model(), context(64, n_batch, 8));
        std::vector<pyl_run> runs;
        for (const Tokens & t : texts) runs.push_back(run(root(store), t));
        std::rotate(runs.begin(), runs.begin() + 2, runs.end());
        CHECK_EQ(prefill(store, runs), (21 + n_batch - 1) / n_batch);
        CHECK_EQ(pressure(store).n_dispatches, (21 + n_batch - 1) / n_batch);
        for (size_t i = 0; i < runs.size(); i++) {
            CHECK(same_bits(row(store, runs[i].branch), replay(texts[(i + 2) % 4])));
            CHECK_EQ(runs[i].n_landed, runs[i].n_tokens);
        }
    }
}

void test_max_dispatches() {
    const std::vector<Tokens> texts{text(5, 1), text(9, 2), text(2, 3)};
    for (uint32_t n_batch = 1; n_batch <= 9; n_batch++) {
        for (uint32_t at_once = 1; at_once <= 3; at_once++) {
            Store store(model(), context(64, n_batch, 4));
            std::vector<pyl_run> runs;
            for (const Tokens & t : texts) runs.push_back(run(root(store, {7}), t));
            uint32_t left = 16, total = 0;
            while (left) {
                const uint32_t n = prefill(store, runs, at_once);
                total += n;
                const uint32_t landed = std::min(left, at_once * n_batch);
                CHECK_EQ(n, (landed + n_batch - 1) / n_batch);
                left -= landed;
                CHECK_EQ(pressure(store).cells_used, 3 + 16 - left);
                for (pyl_run & r : runs) {  // as a caller goes on
                    if (r.n_landed) CHECK_EQ(store.get(r.branch).logits.any(), r.n_landed == r.n_tokens);  // half-way there is nothing to sample from
                    CHECK_EQ(r.state, r.n_landed ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED);
                    r.tokens += r.n_landed, r.n_tokens -= r.n_landed;
                }
            }
            CHECK_EQ(total, (16 + n_batch - 1) / n_batch);
            for (size_t i = 0; i < 3; i++) CHECK(same_bits(row(store, runs[i].branch), replay(Tokens{7} + texts[i])));
        }
    }
}

void test_packing() {
    Store store(model(), context(128, 10, 8));
    const Tokens none;
    const std::vector<Tokens> texts{text(4, 1), none, text(3, 2), text(8, 3), none, text(5, 4)};
    std::vector<pyl_run> runs;
    for (size_t i = 0; i < texts.size(); i++) runs.push_back(run(root(store, i == 1 ? Tokens{5, 6} : none), texts[i]));
    const Row untouched = row(store, runs[1].branch);
    CHECK_EQ(prefill(store, runs), 2);  // 10 + 10
    for (size_t i = 0; i < texts.size(); i++) {
        if (!texts[i].empty()) CHECK(same_bits(row(store, runs[i].branch), replay(texts[i])));
        CHECK_EQ(runs[i].n_landed, texts[i].size());
    }
    CHECK(same_bits(row(store, runs[1].branch), untouched));  // an empty run is no run: its logits stay
    CHECK_EQ(runs[1].state, PYL_STATE_UNCHANGED);
    CHECK(!store.get(runs[4].branch).logits.any());
    // Prefill feeds neither the penalty window nor last_token nor the grammar.
    const pyl_branch strict = root(store);
    store.set_grammar(strict, {false, "root ::= \"xy\"", "root"});
    prefill(store, strict, {'x', 'y', 'z'});
    CHECK(store.get(strict).sampler.history().empty());
    CHECK_EQ(store.get(strict).last_token, -1);
    commit(store, {strict}, {'x'});
    CHECK_EQ(store.get(strict).sampler.history().size(), 1);
}

// A row of logits costs the engine a pass over the vocabulary: it is asked for the last token of a finished run, and no other.
void test_outputs_asked_for() {
    std::vector<std::vector<size_t>> asked;
    const auto sees = [&](const Batch & batch) {
        asked.emplace_back();
        for (size_t i = 0; i < batch.size(); i++) {
            if (batch.output[i]) asked.back().push_back(i);
        }
    };
    Store store(std::make_shared<Watched>(model(), [](const std::function<void()> & call) { call(); }, sees), context(64, 4, 8));
    const std::vector<Tokens> texts{text(6, 1), text(1, 2), text(1, 3), text(5, 4)};
    std::vector<pyl_run> runs;
    for (const Tokens & t : texts) runs.push_back(run(root(store), t));
    prefill(store, runs);  // 4 | 2 1 1 | 4 | 1
    CHECK(asked == std::vector<std::vector<size_t>>({{}, {1, 2, 3}, {}, {0}}));
    asked.clear();
    commit(store, {runs[2].branch, runs[0].branch}, {1, 2});
    CHECK(asked == std::vector<std::vector<size_t>>({{0, 1}}));
}

// Logits are rows of the engine's last output until somebody else decodes, and copies after: nobody can tell.
void test_logits_survive() {
    Store store(model(), context(128, 16, 12));
    const Tokens base = text(6);
    const pyl_branch a = root(store, base), b = root(store, text(5, 2));
    const Row row_a = replay(base), row_b = replay(text(5, 2));
    const auto kids = fork(store, a, 3);
    commit(store, {kids[0]}, {1});
    for (const pyl_branch x : {a, kids[1], kids[2]}) CHECK(same_bits(row(store, x), row_a));
    CHECK(same_bits(row(store, b), row_b));
    CHECK(store.logits(store.get(a)) == store.logits(store.get(kids[1])));  // one copy serves them all
    prefill(store, kids[1], {2, 3});
    commit(store, {b}, {9});
    CHECK(same_bits(row(store, a), row_a));
    CHECK(same_bits(row(store, kids[2]), row_a));
    CHECK(same_bits(row(store, kids[0]), replay(base + Tokens{1})));
    CHECK(same_bits(row(store, kids[1]), replay(base + Tokens{2, 3})));
    store.prune(Branches{kids[2]});
    store.retain_only(a);
    CHECK(same_bits(row(store, a), row_a));
    // A child may decode while its parent's row is still in the engine's output, and the other way round.
    commit(store, {a}, {4});
    const pyl_branch kid = fork(store, a, 1)[0];
    commit(store, {a}, {5});
    CHECK(same_bits(row(store, kid), replay(base + Tokens{4})));
    CHECK(same_bits(row(store, a), replay(base + Tokens{4, 5})));
    store.prune(Branches{kid});
    CHECK(same_bits(row(store, a), replay(base + Tokens{4, 5})));
    const pyl_branch empty = root(store);
    CHECK_THROWS(PYL_E_NO_LOGITS, store.logits(store.get(empty)));
}

void test_epoch() {
    Store store(model(), context());
    const pyl_branch a = root(store, text(3)), b = fork(store, a, 1)[0];
    uint64_t epoch = store.epoch();
    const auto moved = [&] { return std::exchange(epoch, store.epoch()) != store.epoch(); };
    CHECK(!moved());
    Tokens drawn(1);
    store.sample(Branches{a}, drawn.data());
    CHECK(!moved());
    commit(store, {a}, {1}), CHECK(moved());
    prefill(store, b, {1}), CHECK(moved());
    Lanes l = lanes({a}, 1);
    run_tick(store, l), CHECK(moved());
    const pyl_branch c = fork(store, a, 1)[0], d = fork(store, a, 1)[0];
    moved();
    store.prune(Branches{c}), CHECK(moved());
    store.prune_subtree(d), CHECK(moved());
    store.retain_only(a), CHECK(moved());
    store.drain(), CHECK(moved());
}

void test_sample() {
    Store store(model(), context());
    const Tokens base = text(7);
    const pyl_branch a = root(store, base, drawing(), 3), b = root(store, text(6, 5), greedy()), empty = root(store);
    Sampler twin(3);
    twin.set_params(drawing());
    SamplerScratch scratch;
    const Row logits = replay(base);
    Tokens out(3, -77);
    for (int i = 0; i < 50; i++) {
        const Facts before = facts(store, a);
        store.sample(Branches{a, b}, out.data());
        CHECK_EQ(out[0], twin.sample(logits.data(), logits.size(), nullptr, scratch));
        CHECK_EQ(out[1], best_of(row(store, b)));
        Facts after = facts(store, a);
        CHECK_EQ(after.draws, before.draws + 1);
        after.draws = before.draws;
        CHECK(after == before);  // only the stream has moved
    }
    out.assign(3, -77);
    CHECK_EQ(refused(store, PYL_E_NO_LOGITS, [&] { store.sample(Branches{a, empty, b}, out.data()); }).index, 1);
    // Nothing legal on one of them: no stream has advanced, not even of those drawn before it.
    const pyl_branch stuck = root(store, text(4), drawing(), 9);
    store.get(stuck).grammar = std::make_unique<OnlyThese>(Tokens{});
    CHECK_EQ(refused(store, PYL_E_ILLEGAL, [&] { store.sample(Branches{a, stuck, b}, out.data()); }).index, 1);
    CHECK(out == Tokens(3, -77));
    Tokens four(4);
    CHECK_EQ(refused(store, PYL_E_ILLEGAL, [&] { store.sample(Branches{a, b, a, stuck}, four.data()); }).index, 3);  // also when one of them had drawn twice
    // The same branch twice draws twice.
    store.sample(Branches{a, a}, out.data());
    CHECK_EQ(out[0], twin.sample(logits.data(), logits.size(), nullptr, scratch));
    CHECK_EQ(out[1], twin.sample(logits.data(), logits.size(), nullptr, scratch));
    store.get(stuck).grammar = std::make_unique<OnlyThese>(Tokens{33});
    store.sample(Branches{stuck}, out.data());
    CHECK_EQ(out[0], 33);
}

void test_tick_ends() {
    {  // end of generation and stop tokens: not decoded, not counted, told apart
        for (const Token ender : {eos, eot, Token{65}}) {
            Store store(model(), context());
            const Tokens prompt = prompt_for(ender), stops{65, 299};
            const pyl_branch a = root(store, prompt), b = root(store, text(5, 8));
            const Facts before = facts(store, a);
            Lanes l = lanes({a, b}, 1, stops);
            run_tick(store, l);
            CHECK_EQ(l.lanes[0].finish, ender == 65 ? PYL_FINISH_STOP : PYL_FINISH_EOG);
            CHECK_EQ(l.lanes[0].final_token, ender);
            CHECK_EQ(l.lanes[0].n_tokens, 0);
            CHECK_EQ(l.lanes[0].state, PYL_STATE_UNCHANGED);
            CHECK(facts(store, a) == before);
            CHECK_EQ(l.lanes[1].finish, PYL_FINISH_NONE);
            CHECK_EQ(l.lanes[1].final_token, -1);
            CHECK_EQ(l.lanes[1].n_tokens, 1);
            CHECK_EQ(l.lanes[1].state, PYL_STATE_ADVANCED);
            CHECK_EQ(l.tokens[0], -77);
            CHECK_EQ(l.tokens[1], best_of(replay(text(5, 8))));
            CHECK_EQ(l.tick.n_ticks, 1);
            CHECK_EQ(l.tick.n_dispatches, 1);
            CHECK_EQ(l.tick.out_of_cells, 0);
            CHECK(same_bits(row(store, b), replay(text(5, 8) + Tokens{l.tokens[1]})));
        }
    }
    {  // all end at once: a tick without a dispatch
        Store store(model(), context());
        const pyl_branch a = root(store, prompt_for(eos)), b = fork(store, a, 1)[0];
        Lanes l = lanes({a, b}, 5);
        run_tick(store, l);
        CHECK_EQ(l.tick.n_ticks, 1);
        CHECK_EQ(l.tick.n_dispatches, 0);
        CHECK(l.tokens == Tokens(10, -77));
        Lanes both = lanes({a}, 5, {eos});  // a stop token that also ends a generation was asked for by name
        run_tick(store, both);
        CHECK_EQ(both.lanes[0].finish, PYL_FINISH_STOP);
    }
    {  // length: of one lane, of the call; the others go on
        Store store(model("n_vocab=300"), context());
        const pyl_branch top = root(store, text(5));
        const auto kids = fork(store, top, 3);
        for (const pyl_branch kid : kids) store.get(kid).grammar = std::make_unique<OnlyThese>(Tokens{65, 66});
        Lanes l = lanes(kids, 6, {}, {2, 0, 6});
        run_tick(store, l);
        CHECK_EQ(l.lanes[0].finish, PYL_FINISH_LENGTH);
        CHECK_EQ(l.lanes[1].finish, PYL_FINISH_NONE);  // no limit of its own: it can go on
        CHECK_EQ(l.lanes[2].finish, PYL_FINISH_LENGTH);
        CHECK_EQ(l.lanes[0].n_tokens, 2);
        CHECK_EQ(l.lanes[1].n_tokens, 6);
        CHECK_EQ(l.lanes[2].n_tokens, 6);
        CHECK(l.taken(1) == l.taken(2));
        CHECK(std::equal(l.tokens.begin(), l.tokens.begin() + 2, l.tokens.begin() + 6));
        CHECK(std::all_of(l.tokens.begin() + 2, l.tokens.begin() + 6, [](Token t) { return t == -77; }));  // beyond n_tokens nothing is written
        CHECK_EQ(l.tick.n_ticks, 6);
        CHECK_EQ(l.tick.n_dispatches, 6);
        for (size_t i = 0; i < 3; i++) {
            CHECK(same_bits(row(store, kids[i]), replay(text(5) + l.taken(i))));
            CHECK_EQ(store.get(kids[i]).cells_own, l.lanes[i].n_tokens);
            CHECK_EQ(store.get(kids[i]).last_token, l.taken(i).back());
            CHECK(store.get(kids[i]).sampler.history() == l.taken(i));
        }
        Lanes all_done = lanes(kids, 9, {}, {1, 1, 2});
        run_tick(store, all_done);
        CHECK_EQ(all_done.tick.n_ticks, 2);  // stops when no lane can go on
        Lanes zero = lanes({kids[0]}, 1);
        zero.tick.n_steps = 0;  // counts as one
        run_tick(store, zero);
        CHECK_EQ(zero.lanes[0].n_tokens, 1);
    }
    {  // nothing legal: that lane ends, its stream has not moved, the others go on
        Store store(model(), context());
        const pyl_branch a = root(store, text(5), drawing(), 1), b = root(store, text(6), greedy());
        store.get(a).grammar = std::make_unique<OnlyThese>(Tokens{});
        store.get(b).grammar = std::make_unique<OnlyThese>(Tokens{66});
        const Facts before = facts(store, a);
        Lanes l = lanes({a, b}, 3);
        run_tick(store, l);
        CHECK_EQ(l.lanes[0].finish, PYL_FINISH_ILLEGAL);
        CHECK_EQ(l.lanes[0].final_token, -1);
        CHECK_EQ(l.lanes[0].n_tokens, 0);
        CHECK(facts(store, a) == before);
        CHECK(l.taken(1) == Tokens({66, 66, 66}));
        CHECK_EQ(pressure(store).n_tokens_sampled, 3);  // who found nothing has not sampled a token
    }
    {  // out of cells: full ticks only, and not a draw more
        Store store(model(), context(15, 8, 4));
        const pyl_branch a = root(store, text(5), drawing(), 1), b = root(store, text(5, 2), drawing(), 2);
        for (const pyl_branch x : {a, b}) store.get(x).grammar = std::make_unique<OnlyThese>(Tokens{65, 66, 67, 68});
        Lanes l = lanes({a, b}, 10, {}, {1, 0});
        run_tick(store, l);  // 2, then 1 at a time: the last cell is used
        CHECK_EQ(l.tick.out_of_cells, 1);
        CHECK_EQ(l.tick.n_ticks, 4);
        CHECK_EQ(l.lanes[1].n_tokens, 4);
        CHECK_EQ(l.lanes[1].finish, PYL_FINISH_NONE);
        CHECK_EQ(store.get(b).sampler.draws(), 4);
        CHECK_EQ(pressure(store).cells_remaining, 0);
        const pyl_branch c = fork(store, b, 1)[0];
        store.prune(Branches{c, a});
        Lanes two = lanes({b}, 6);  // 6 cells came back: all of them, and no complaint when the work ends with them
        run_tick(store, two);
        CHECK_EQ(two.lanes[0].n_tokens, 6);
        CHECK_EQ(two.tick.out_of_cells, 0);
        CHECK_EQ(pressure(store).cells_remaining, 0);
    }
    {  // refusals before anything runs
        Store store(model(), context());
        const pyl_branch a = root(store, text(5), drawing()), empty = root(store);
        Lanes l = lanes({a, empty}, 2);
        CHECK_EQ(refused(store, PYL_E_NO_LOGITS, [&] { run_tick(store, l); }).index, 1);
        CHECK(l.tokens == Tokens(4, -77));
    }
}

// One call of N steps and N calls of one step: the same tokens, streams and books; and both what sampler and engine give step by step.
void test_steps() {
    const Tokens stops{70, 71, 72, 73, 74, 75};
    for (const float temperature : {0.0f, 0.8f, 2.0f}) {
        SamplingParams p = drawing(temperature);
        p.penalty_repeat = 1.3f;
        p.top_k = 0;
        Store many(model(), context(512, 64, 16)), single(model(), context(512, 64, 16));
        std::vector<Branches> branches;
        for (Store * store : {&many, &single}) {
            const pyl_branch top = root(*store, text(8), p, 5);
            Branches b = fork(*store, top, 7, {1, 2, 3, 4, 5, 6, 7});
            for (uint32_t i = 0; i < 7; i++) prefill(*store, b[i], text(1 + i % 3, i));
            branches.push_back(b);
        }
        constexpr uint32_t n_steps = 24;
        Lanes whole = lanes(branches[0], n_steps, stops, {0, 0, 0, 5, 1, 0, 23});
        run_tick(many, whole);
        std::vector<Tokens> taken(7);
        std::vector<int32_t> finish(7, PYL_FINISH_NONE), final_token(7, -1);
        uint32_t ticks = 0;
        for (uint32_t step = 0; step < n_steps; step++) {
            Branches going;
            std::vector<size_t> which;
            const std::vector<uint32_t> limit{n_steps, n_steps, n_steps, 5, 1, n_steps, 23};
            for (size_t i = 0; i < 7; i++) {
                if (finish[i] == PYL_FINISH_NONE) going.push_back(branches[1][i]), which.push_back(i);
            }
            if (going.empty()) break;
            ticks++;
            Lanes one = lanes(going, 1, stops);
            run_tick(single, one);
            for (size_t k = 0; k < which.size(); k++) {
                const size_t i = which[k];
                for (const Token t : one.taken(k)) taken[i].push_back(t);
                finish[i] = one.lanes[k].finish, final_token[i] = one.lanes[k].final_token;
                if (taken[i].size() == limit[i] && limit[i] < n_steps) finish[i] = PYL_FINISH_LENGTH;
            }
        }
        CHECK_EQ(whole.tick.n_ticks, ticks);
        for (size_t i = 0; i < 7; i++) {
            CHECK(whole.taken(i) == taken[i]);
            CHECK_EQ(whole.lanes[i].finish, finish[i]);
            CHECK_EQ(whole.lanes[i].final_token, final_token[i]);
            Facts a = facts(many, branches[0][i]), b = facts(single, branches[1][i]);
            CHECK(a == b);  // the handles are the same too: both stores did the same things
        }
        // And by hand: a sampler of the same state, on the logits of a store that decoded nothing else.
        const pyl_branch x = fork(many, branches[0][2], 1, {77})[0];
        Sampler twin = many.get(x).sampler;
        SamplerScratch scratch;
        for (int step = 0; step < 10; step++) {
            const Row logits = replay(text(8) + text(3, 2) + many.get(x).sampler.history());
            CHECK(same_bits(row(many, x), logits));
            const Token token = twin.sample(logits.data(), logits.size(), nullptr, scratch);
            Lanes one = lanes({x}, 1);
            run_tick(many, one);
            const bool ends = token == eos || token == eot;
            CHECK_EQ(ends ? one.lanes[0].final_token : one.tokens[0], token);
            if (ends) break;
            twin.accept(token);
            CHECK(many.get(x).sampler.history() == twin.history());
        }
    }
}

void test_grammar() {
    Store store(model(), context());
    const pyl_branch a = root(store, text(4), drawing(), 1), b = root(store, text(5), greedy());
    store.set_grammar(a, {false, "root ::= \"hello\"", "root"});
    store.set_grammar(b, {false, "start ::= \"hi\"", "start"});
    Lanes l = lanes({a, b}, 20);
    run_tick(store, l);
    CHECK(l.taken(0) == Tokens({'h', 'e', 'l', 'l', 'o'}));
    CHECK(l.taken(1) == Tokens({'h', 'i'}));
    for (const pyl_lane & lane : l.lanes) {
        CHECK_EQ(lane.finish, PYL_FINISH_EOG);
        CHECK(lane.final_token == eos || lane.final_token == eot);
    }
    CHECK_EQ(l.tick.n_ticks, 6);
    CHECK_EQ(l.tick.n_dispatches, 5);
    // A grammar that does not parse leaves the one in force.
    const pyl_branch c = root(store, text(6));
    store.set_grammar(c, {false, "root ::= \"ab\"", "root"});
    commit(store, {c}, {'a'});
    refused(store, PYL_E_GRAMMAR, [&] { store.set_grammar(c, {false, "nonsense", "root"}); });
    CHECK_EQ(refused(store, PYL_E_GRAMMAR, [&] { commit(store, {a, c}, {eos, 'x'}); }).index, 1);
    commit(store, {c}, {'b'});
    // Checking what is legal, sampling and being refused do not feed it.
    const pyl_branch d = root(store, text(6), drawing());
    store.set_grammar(d, {false, "root ::= \"xyz\"", "root"});
    Tokens out(1);
    for (int i = 0; i < 5; i++) {
        store.sample(Branches{d}, out.data());
        CHECK_EQ(out[0], 'x');
        refused(store, PYL_E_GRAMMAR, [&] { commit(store, {d}, {'y'}); });
    }
    // Lifting it, and putting another in its place half-way.
    commit(store, {d}, {'x'});
    store.set_grammar(d, {false, "root ::= \"q\"", "root"});
    commit(store, {d}, {'q'});
    store.set_grammar(d, {false, "", "root"});
    CHECK(!store.get(d).grammar);
    commit(store, {d}, {'w'});
    // With its grammar from the beginning, or not at all.
    const pyl_pressure before = pressure(store);
    refused(store, PYL_E_GRAMMAR, [&] { store.create(0, drawing(), 1, {false, "nonsense", "root"}); });
    CHECK_EQ(pressure(store).leases_used, before.leases_used);
    const pyl_branch e = store.create(0, drawing(), 1, {false, "start ::= \"ok\"", "start"});
    prefill(store, e, text(3));
    Lanes m = lanes({e}, 5);
    run_tick(store, m);
    CHECK(m.taken(0) == Tokens({'o', 'k'}));
    CHECK_EQ(m.lanes[0].finish, PYL_FINISH_EOG);
}

void test_fork_without_logits() {
    Store store(model(), context());
    const pyl_branch a = root(store, text(4), drawing(), 1);
    Branches kids(2);
    store.fork(a, kids, nullptr, false);
    CHECK(store.get(a).logits.any());
    for (const pyl_branch kid : kids) {
        CHECK(!store.get(kid).logits.any());
        Token token = -7;
        CHECK_EQ(refused(store, PYL_E_NO_LOGITS, [&] { store.sample(Branches{kid}, &token); }).index, 0);
        CHECK_EQ(token, -7);
        refused(store, PYL_E_NO_LOGITS, [&] { store.distribution(kid); });
        CHECK_EQ(store.get(kid).position, 4);
    }
    // From the next decode on there is no telling it from another.
    Branches other(1);
    store.fork(a, other, nullptr);
    commit(store, {kids[0], other[0]}, {'x', 'x'});
    CHECK(same_bits(row(store, kids[0]), row(store, other[0])));
    CHECK(store.get(a).logits.any());
}

// A fork costs no call into the cache until it or what it came from goes on; and whoever goes first, everyone keeps what he had.
void test_forks_borrow() {
    int n_calls = 0;
    const auto around = [&](const std::function<void()> & call) {
        n_calls++;
        call();
    };
    const Tokens base = text(6);
    const auto counted = [&](auto && work) {
        n_calls = 0;
        work();
        return n_calls;
    };
    Store store(std::make_shared<Watched>(model(), around), context(256, 64, 12));
    const pyl_branch a = root(store, base);
    Branches kids, grandkids;
    CHECK_EQ(counted([&] { kids = fork(store, a, 4), grandkids = fork(store, kids[0], 2); }), 0);
    CHECK_EQ(counted([&] { store.prune(Branches{grandkids[1], kids[3]}); }), 0);
    CHECK_EQ(counted([&] { commit(store, {a}, {1}); }), 2);  // one of the four takes what there was, and lends it to the rest
    CHECK_EQ(counted([&] { commit(store, {kids[1], kids[2]}, {2, 3}); }) <= 4, true);
    CHECK_EQ(counted([&] { commit(store, {grandkids[0]}, {4}); }) <= 2, true);
    CHECK(same_bits(row(store, a), replay(base + Tokens{1})));
    CHECK(same_bits(row(store, kids[1]), replay(base + Tokens{2})));
    CHECK(same_bits(row(store, kids[2]), replay(base + Tokens{3})));
    CHECK(same_bits(row(store, grandkids[0]), replay(base + Tokens{4})));
    CHECK(same_bits(row(store, kids[0]), replay(base)));
    commit(store, {kids[0]}, {5});
    CHECK(same_bits(row(store, kids[0]), replay(base + Tokens{5})));
    // What is pruned while others borrow from it is theirs, without a call.
    const Branches heirs = fork(store, kids[1], 3);
    store.fast_forward(kids[1], heirs[0]);
    CHECK_EQ(counted([&] { store.prune(Branches{kids[1], heirs[1], heirs[2]}); }), 1);
    const Branches others = fork(store, kids[2], 3);
    commit(store, {kids[2]}, {6});
    CHECK_EQ(counted([&] { store.prune(Branches{others[0]}); }), 0);
    commit(store, {others[1], others[2]}, {7, 8});
    CHECK(same_bits(row(store, others[1]), replay(base + Tokens{3, 7})));
    CHECK(same_bits(row(store, others[2]), replay(base + Tokens{3, 8})));
    // One that borrows is saved, kept alone, read anew, and taken over, as if it had cells of its own.
    const pyl_branch borrower = fork(store, others[1], 1)[0];
    const pyl_branch loaded = store.load(store.save(borrower, true));
    commit(store, {loaded}, {9});
    CHECK(same_bits(row(store, loaded), replay(base + Tokens{3, 7, 9})));
    const pyl_branch twin = fork(store, others[1], 1)[0];
    uint32_t n_landed = 0;
    store.reseed_kv(borrower, text(3, 4), n_landed);
    CHECK(same_bits(row(store, borrower), replay(text(3, 4))));
    store.fast_forward(others[1], twin);
    commit(store, {others[1]}, {9});
    CHECK(same_bits(row(store, others[1]), replay(base + Tokens{3, 7, 9})));
    const pyl_branch last = fork(store, others[2], 1)[0];
    store.retain_only(last);
    CHECK_EQ(pressure(store).cells_used, 8);
    commit(store, {last}, {9});
    CHECK(same_bits(row(store, last), replay(base + Tokens{3, 8, 9})));
    CHECK_EQ(store.list(0).size(), 1);
    check_capacity(store);
}

// A recurrent model's rows are computed together only where their sequences' numbers follow each other without a gap.
void test_ranks_are_closed() {
    std::vector<Seq> seqs;
    const auto gaps = [&] {
        size_t n = 0;
        for (size_t i = 1; i < seqs.size(); i++) n += seqs[i] != seqs[i - 1] + 1;
        return n;
    };
    const auto sees = [&](const Batch & batch) { seqs = batch.seq; };
    for (const bool is_recurrent : {true, false}) {
        const std::string options = is_recurrent ? "n_vocab=300;recurrent=1" : "n_vocab=300";
        Store store(std::make_shared<Watched>(model(options), [](const std::function<void()> & call) { call(); }, sees), context(256, 64, 12));
        const pyl_branch a = root(store, text(5));
        const Branches kids = fork(store, a, 11);
        Branches some{kids[0], kids[2], kids[3], kids[5], kids[8]};
        commit(store, some, {1, 2, 3, 4, 5});
        CHECK_EQ(gaps(), 3);  // all the numbers between theirs are taken
        store.prune(Branches{kids[1], kids[4]});
        const Snapshot before = snapshot(store);
        commit(store, some, {6, 7, 8, 9, 10});
        CHECK_EQ(gaps(), is_recurrent ? 0 : 3);
        for (size_t i = 0; i < some.size(); i++) {
            CHECK(same_bits(row(store, some[i]), replay(text(5) + Tokens{static_cast<Token>(i + 1), static_cast<Token>(i + 6)})));
            CHECK_EQ(store.get(some[i]).position, 7);
        }
        CHECK_EQ(pressure(store).cells_used, before.cells_used + 5);
        // Nobody has lost or doubled a number: as many branches as there can be, each with its own.
        Branches more(pressure(store).leases_remaining);
        store.fork(a, more, nullptr);
        std::set<Seq> all;
        for (const pyl_branch branch : store.list(0)) all.insert(store.get(branch).seat.seq);
        CHECK_EQ(all.size(), 12);
        for (const pyl_branch kid : more) commit(store, {kid}, {3});
        CHECK(same_bits(row(store, more.back()), replay(text(5) + Tokens{3})));
    }
}

// Prompts of others are read in the dispatches of those who speak, and nobody can tell from what comes of it.
void test_reading_along() {
    const auto speak = [](std::span<pyl_run> runs, uint32_t most, uint32_t n_steps, Store & store, Lanes & l) {
        const pyl_branch a = root(store, text(5), drawing(), 7);
        SamplingParams endless = drawing();
        endless.ignore_eog = true;
        store.get(a).sampler.set_params(endless);
        for (pyl_run & run : runs) run.branch = store.create(0, greedy(), 1);
        l = lanes({a}, n_steps);
        l.tick.runs = runs.data(), l.tick.n_runs = runs.size(), l.tick.max_run_tokens = most;
        run_tick(store, l);
        return l.taken(0);
    };
    const Tokens longer = text(20, 3), shorter = text(4, 9);
    const auto runs_of = [&] {
        return std::array<pyl_run, 2>{pyl_run{sizeof(pyl_run), 20, 0, longer.data(), 77, 77}, pyl_run{sizeof(pyl_run), 4, 0, shorter.data(), 77, 77}};
    };
    Store alone(model(), context(256, 8, 4)), along(model(), context(256, 8, 4)), slowly(model(), context(256, 8, 4));
    Lanes l, m, n;
    const Tokens said = speak({}, 0, 5, alone, l);
    CHECK_EQ(said.size(), 5);
    // 7 beside each token of the one who speaks: 7, 7, 6 and 1, 3.
    auto runs = runs_of();
    CHECK(speak(runs, 0, 5, along, m) == said);
    CHECK_EQ(m.tick.n_dispatches, 5);
    CHECK_EQ(m.tick.n_ticks, 5);
    CHECK(runs[0].n_landed == 20 && runs[1].n_landed == 4 && runs[0].state == PYL_STATE_ADVANCED && runs[1].state == PYL_STATE_ADVANCED);
    CHECK(same_bits(row(along, runs[0].branch), replay(longer)));
    CHECK(same_bits(row(along, runs[1].branch), replay(shorter)));
    CHECK(same_bits(row(along, m.lanes[0].branch), row(alone, l.lanes[0].branch)));
    CHECK_EQ(pressure(along).cells_used, 5 + 5 + 20 + 4);
    // At most three in a dispatch, in their order; the rest can be read later.
    auto some = runs_of();
    CHECK(speak(some, 3, 5, slowly, n) == said);
    CHECK(some[0].n_landed == 15 && some[1].n_landed == 0 && some[0].state == PYL_STATE_ADVANCED && some[1].state == PYL_STATE_UNCHANGED);
    CHECK(!slowly.get(some[0].branch).logits.any());
    prefill(slowly, some[0].branch, Tokens(longer.begin() + 15, longer.end()));
    CHECK(same_bits(row(slowly, some[0].branch), replay(longer)));
    // Refused, with nothing changed: no room for all of it, a branch that does both, a token that is none, a store that never mixes.
    const auto refused_with = [&](int32_t code, int32_t index, Store & store, std::span<pyl_run> given, pyl_branch speaker) {
        const pyl_pressure before = pressure(store);
        Lanes k = lanes({speaker}, 2);
        k.tick.runs = given.data(), k.tick.n_runs = given.size();
        CHECK_EQ(refused(store, code, [&] { run_tick(store, k); }).index, index);
        CHECK_EQ(pressure(store).cells_used, before.cells_used);
        CHECK_EQ(pressure(store).n_dispatches, before.n_dispatches);
    };
    const pyl_branch a = m.lanes[0].branch;
    const Tokens many = text(300);
    std::array<pyl_run, 1> one{pyl_run{sizeof(pyl_run), 300, runs[0].branch, many.data(), 0, 0}};
    refused_with(PYL_E_CONTEXT, -1, along, one, a);
    one[0].n_tokens = 2, one[0].branch = a;
    refused_with(PYL_E_INVALID, 1, along, one, a);
    const Tokens strange{1, 4711};
    one[0].tokens = strange.data(), one[0].branch = runs[0].branch;
    refused_with(PYL_E_INVALID, 1, along, one, a);
    ContextParams unmixed = context(256, 8, 4);
    unmixed.deterministic = true;
    Store apart(model(), unmixed);
    const pyl_branch b = root(apart, text(5), drawing(), 7);
    one[0].tokens = many.data(), one[0].branch = apart.create(0, greedy(), 1);
    refused_with(PYL_E_UNSUPPORTED, -1, apart, one, b);
}

// Every token that ends a generation, not one of them.
void test_ignoring_the_end() {
    Store store(model(), context());
    const size_t n_vocab = store.n_vocab();
    const pyl_branch a = root(store, text(4), greedy());
    std::vector<float> logits(n_vocab, 0.0f);
    logits[eos] = 9, logits[eot] = 8, logits['m'] = 7;
    const auto next = [&](pyl_branch b) {
        store.set_logits(b, logits);
        Token token = -1;
        store.sample(Branches{b}, &token);
        return token;
    };
    CHECK_EQ(next(a), eos);
    SamplingParams endless = store.get(a).sampler.params();
    endless.ignore_eog = true;
    store.get(a).sampler.set_params(endless);
    CHECK_EQ(next(a), 'm');
    Branches kid(1);
    store.fork(a, kid, nullptr);
    CHECK_EQ(next(kid[0]), 'm');
    std::array<uint8_t, 3> legal{};
    const Tokens asked{eos, eot, 'm'};
    store.legal(a, asked, legal.data());
    CHECK(legal == (std::array<uint8_t, 3>{0, 0, 1}));
    Tokens likely(n_vocab);
    std::vector<float> log_probs(n_vocab);
    CHECK_EQ(store.priors(a, likely, log_probs.data()).n_legal, n_vocab - 2);
    CHECK_EQ(likely[0], 'm');
    // Nothing is left where a grammar wants the end and nothing else.
    store.set_grammar(a, {false, "root ::= \"\"", "root"});
    Token token = -1;
    refused(store, PYL_E_ILLEGAL, [&] { store.sample(Branches{a}, &token); });
    Lanes l = lanes({kid[0]}, 30);
    run_tick(store, l);
    CHECK_EQ(l.taken(0).size(), 30);
    CHECK_EQ(l.lanes[0].finish, PYL_FINISH_NONE);
}

// A cancel that arrives in the middle of dispatch number `at`: that one lands, and no other begins.
void test_cancel() {
    const Tokens base = text(3), more = text(14, 2), other = text(3, 3);
    for (int at = 1; at <= 5; at++) {
        for (const uint32_t max_dispatches : {0u, 1u, 2u, 5u}) {
            int n = -1;  // the first dispatch prefills the base
            Store * running = nullptr;
            Store store(std::make_shared<Watched>(model(),
                                                  [&](const std::function<void()> & call) {
                                                      call();
                                                      if (running && ++n == at) running->cancel();
                                                  }),
                        context(64, 4, 4));
            const pyl_branch a = root(store, base), b = root(store);
            running = &store;
            n = 0;
            std::vector<pyl_run> runs{run(a, more), run(b, other)};  // 17 tokens in dispatches of 4: a 4, a 4, a 4, a 2 b 2, b 1
            uint32_t told = 77;
            const uint32_t limit = max_dispatches ? max_dispatches : 5;
            const uint32_t landed = std::min<uint32_t>(limit, static_cast<uint32_t>(at)) * 4;
            {
                const Store::Call call(store);
                const auto go = [&] { store.prefill(runs, max_dispatches, told); };
                if (static_cast<uint32_t>(at) <= limit && at < 5) {  // seen also when the call would have returned here anyhow
                    const Error error = CHECK_THROWS(PYL_E_CANCELLED, go());
                    CHECK_EQ(error.state, PYL_STATE_ADVANCED);
                    CHECK_EQ(error.partial, true);
                } else {
                    go();  // all of it was done, or the limit was reached, before anybody asked
                }
            }
            running = nullptr;
            CHECK_EQ(told, std::min<uint32_t>(limit, static_cast<uint32_t>(at)));
            CHECK_EQ(runs[0].n_landed + runs[1].n_landed, std::min(landed, 17u));
            CHECK_EQ(runs[0].n_landed, std::min(landed, 14u));
            CHECK_EQ(runs[1].state, runs[1].n_landed ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED);
            // The next call is its own: the flag is down, and the rest lands as if nothing had been.
            const Store::Call call(store);
            for (pyl_run & r : runs) r.tokens += r.n_landed, r.n_tokens -= r.n_landed;
            prefill(store, runs);
            CHECK(same_bits(row(store, a), replay(base + more)));
            CHECK(same_bits(row(store, b), replay(other)));
        }
    }
    for (int at = 1; at <= 6; at++) {  // the same for ticks: 6 steps, the last dispatch has nobody to stop
        int n = 0;
        Store * running = nullptr;
        Store store(std::make_shared<Watched>(model(),
                                              [&](const std::function<void()> & call) {
                                                  call();
                                                  if (running && ++n == at) running->cancel();
                                              }),
                    context());
        const pyl_branch a = root(store, base, drawing(), 3), b = root(store, text(4, 5), drawing(), 4);
        for (const pyl_branch x : {a, b}) store.get(x).grammar = std::make_unique<OnlyThese>(Tokens{65, 66, 67});
        running = &store;
        Lanes l = lanes({a, b}, 6, {}, {0, 3});
        {
            const Store::Call call(store);
            if (at < 6) {
                const Error error = CHECK_THROWS(PYL_E_CANCELLED, run_tick(store, l));
                CHECK_EQ(error.state, PYL_STATE_ADVANCED);
                CHECK_EQ(error.partial, true);
            } else {
                run_tick(store, l);
            }
        }
        CHECK_EQ(l.tick.n_ticks, at);
        CHECK_EQ(l.tick.n_dispatches, at);
        CHECK_EQ(l.lanes[0].n_tokens, at);
        CHECK_EQ(l.lanes[1].n_tokens, std::min(at, 3));
        CHECK_EQ(l.lanes[1].finish, at >= 3 ? PYL_FINISH_LENGTH : PYL_FINISH_NONE);
        for (const pyl_lane & lane : l.lanes) CHECK_EQ(lane.state, PYL_STATE_ADVANCED);
        CHECK_EQ(store.get(a).sampler.draws(), at);
        CHECK(same_bits(row(store, a), replay(base + l.taken(0))));
        CHECK(same_bits(row(store, b), replay(text(4, 5) + l.taken(1))));
    }
}

// ------------------------------------------------------------------------------------------------- without decoding

void test_fast_forward() {
    Store store(model(), context());
    const Tokens base = text(6);
    SamplingParams p = drawing();
    p.penalty_presence = 0.5f;
    const pyl_branch top = root(store, text(2)), parent = fork(store, top, 1)[0];
    prefill(store, parent, base);
    const pyl_branch child = fork(store, parent, 1)[0];
    const pyl_branch grandchild = fork(store, child, 1)[0], sibling = fork(store, parent, 1)[0];
    store.get(child).sampler.set_params(p);
    store.get(child).sampler.reseed(77);
    store.set_grammar(child, {false, "root ::= \"xyz\"", "root"});
    const float by = 2.0f, against = -3.0f;
    const Token token = 'q', other = 'r';
    store.set_bias(child, PYL_BIAS, Tokens{token}, &by);
    store.set_bias(child, PYL_STEER, Tokens{other}, &against);
    commit(store, {child, grandchild, sibling}, {'x', 2, 3});
    const Facts want = facts(store, child), before = facts(store, parent), spared = facts(store, sibling);
    const Snapshot whole = snapshot(store);
    store.fast_forward(parent, child);
    CHECK_THROWS(PYL_E_STALE, store.get(child));
    Facts now = facts(store, parent);
    CHECK_EQ(now.handle, parent);
    CHECK_EQ(now.parent, top);
    CHECK_EQ(now.cells_own, before.cells_own + 1);
    CHECK_EQ(now.cells_inherited, before.cells_inherited);
    CHECK(now.children == Branches({grandchild, sibling}));  // oldest first, whoever they came from
    now.handle = want.handle, now.parent = want.parent, now.children = want.children, now.cells_own = want.cells_own, now.cells_inherited = want.cells_inherited;
    CHECK(now == want);  // everything else is the child's
    CHECK(store.get(parent).steer && (*store.get(parent).steer)[0].first == other && store.get(parent).bias && (*store.get(parent).bias)[0].first == token);
    CHECK(facts(store, sibling) == spared);
    CHECK_EQ(pressure(store).cells_used, whole.cells_used);
    CHECK_EQ(pressure(store).leases_remaining, whole.leases_remaining + 1);
    commit(store, {parent, grandchild, sibling}, {'y', 4, 5});
    CHECK(same_bits(row(store, parent), replay(text(2) + base + Tokens{'x', 'y'})));
    CHECK(same_bits(row(store, grandchild), replay(text(2) + base + Tokens{2, 4})));
    CHECK(same_bits(row(store, sibling), replay(text(2) + base + Tokens{3, 5})));
    check_capacity(store);

    // Not a direct child, nobody's child, itself, and a child of a parent that went on.
    const pyl_branch stranger = root(store);
    for (const auto & [a, b] : {std::pair{top, sibling}, std::pair{parent, stranger}, std::pair{parent, parent}, std::pair{sibling, parent}, std::pair{parent, sibling}}) {
        refused(store, PYL_E_DIVERGED, [&] { store.fast_forward(a, b); });
    }
    refused(store, PYL_E_STALE, [&] { store.fast_forward(parent, child); });
    refused(store, PYL_E_STALE, [&] { store.fast_forward(child, sibling); });
    // A child that did nothing: only the lease changes hands.
    const pyl_branch idle = fork(store, sibling, 1)[0];
    const Facts as_before = facts(store, sibling);
    store.fast_forward(sibling, idle);
    Facts after = facts(store, sibling);
    after.children = as_before.children;
    CHECK(after == as_before);
    store.prune_subtree(top);
    store.prune(Branches{stranger});
    CHECK_EQ(pressure(store).cells_used, 0);
    check_capacity(store);
}

// A poisoned parent is repaired by a child that was forked before the dispatch that failed, and only by such a one.
void test_fast_forward_repairs() {
    for (const int rows : {0, 1, 2, 9}) {
        for (const bool had_landed : {false, true}) {
            Store store(model("n_vocab=300;fail_at=" + std::to_string(had_landed ? 3 : 2) + ";fail_rc=-2;fail_rows=" + std::to_string(rows)), context(32, 4, 8));
            const Tokens base = text(4);
            const pyl_branch top = root(store, base);
            const auto kids = fork(store, top, 2);
            CHECK_THROWS(PYL_E_DECODE, prefill(store, top, text(had_landed ? 6 : 3, 2)));  // 4 that land and 2 that do not; or 3 that do not
            CHECK(store.get(top).is_poisoned);
            CHECK_EQ(pressure(store).cells_used, had_landed ? 10 : 7);
            commit(store, {kids[0]}, {9});
            if (had_landed) {  // the four went into the parent after the fork
                refused(store, PYL_E_DIVERGED, [&] { store.fast_forward(top, kids[0]); });
            } else {
                store.fast_forward(top, kids[0]);
                CHECK(!store.get(top).is_poisoned);
                CHECK_EQ(store.get(top).cells_own, 5);
                CHECK_EQ(pressure(store).cells_used, 5);
                check_capacity(store);
                commit(store, {top, kids[1]}, {8, 7});
                CHECK(same_bits(row(store, top), replay(base + Tokens{9, 8})));
                CHECK(same_bits(row(store, kids[1]), replay(base + Tokens{7})));
            }
            store.prune_subtree(top);
            CHECK_EQ(pressure(store).cells_used, 0);
            check_capacity(store);
        }
    }
}

void test_changing_logits() {
    constexpr float inf = std::numeric_limits<float>::infinity(), most = std::numeric_limits<float>::max(), nan = std::numeric_limits<float>::quiet_NaN();
    Store store(model("n_vocab=260"), context());
    const pyl_branch a = root(store, text(4)), b = root(store, text(5, 2)), empty = root(store);
    const pyl_branch twin = fork(store, a, 1)[0];
    const Row row_a = row(store, a);
    // Setting: this branch only, though it shared a row with its child, and until it decodes.
    Row made(260, 1.0f);
    made[7] = 2.0f, made[9] = -inf;
    uint64_t epoch = store.epoch();
    store.set_logits(a, made);
    CHECK(store.epoch() != epoch);
    CHECK(same_bits(row(store, a), made));
    CHECK(same_bits(row(store, twin), row_a));
    store.set_logits(empty, made);  // also one that never had any
    CHECK(same_bits(row(store, empty), made));
    Tokens drawn(1);
    store.sample(Branches{a}, drawn.data());
    CHECK_EQ(drawn[0], 7);
    CHECK(same_bits(row(store, fork(store, a, 1)[0]), made));
    commit(store, {b}, {1});
    CHECK(same_bits(row(store, a), made));
    for (const float bad : {nan, inf}) {
        Row wrong = made;
        wrong[100] = bad;
        CHECK_EQ(refused(store, PYL_E_INVALID, [&] { store.set_logits(a, wrong); }).index, 100);
    }
    refused(store, PYL_E_INVALID, [&] { store.set_logits(a, Row(259, 0.0f)); });
    refused(store, PYL_E_INVALID, [&] { store.set_logits(a, Row()); });

    // Merging: what the header says of every kind of logit, and nothing that is not a number ever comes of it.
    const auto merged = [&](float own, float expert, float alpha) {
        Row x(260, 0.0f), y(260, 0.0f);
        x[5] = own, y[5] = expert;
        store.set_logits(a, x);
        store.set_logits(b, y);
        epoch = store.epoch();
        store.merge_logits(a, Branches{b}, alpha);
        CHECK(store.epoch() != epoch);
        CHECK(same_bits(row(store, b), y));
        const Row out = row(store, a);
        return out[5];
    };
    CHECK(merged(1, 2, 0.5f) == 2);
    CHECK(merged(1, 2, -0.5f) == 0);
    CHECK(merged(-inf, 2, 1) == -inf);     // a ban of its own stays
    CHECK(merged(-inf, -inf, -1) == -inf);
    CHECK(merged(3, -inf, 1) == -inf);     // an expert's ban counts when it is followed
    CHECK(merged(3, -inf, -1) == 3);       // and says nothing when it is not
    CHECK(merged(3, -inf, 0) == 3);
    int n_overflowed = 0;  // finite from finite
    for (const float alpha : {most, -most, 1e38f, -1e38f, 1.0f, -1.0f}) {
        for (const float own : {most, -most, 4.0f, -4.0f}) {
            for (const float expert : {most, -most, 5.0f, -5.0f}) n_overflowed += !(std::abs(merged(own, expert, alpha)) <= most);
        }
    }
    CHECK_EQ(n_overflowed, 0);
    store.set_logits(a, row_a);
    store.merge_logits(a, Branches{a, a}, 0.5f);  // its own expert, twice
    for (size_t i = 0; i < 260; i++) CHECK(std::abs(row(store, a)[i] - 2 * row_a[i]) < 1e-5f);
    const Row doubled = row(store, a);
    store.merge_logits(a, {}, 3.0f);
    CHECK(same_bits(row(store, a), doubled));
    const pyl_branch blank = root(store);
    CHECK_EQ(refused(store, PYL_E_NO_LOGITS, [&] { store.merge_logits(a, Branches{b, blank}, 1); }).index, 1);
    refused(store, PYL_E_NO_LOGITS, [&] { store.merge_logits(blank, Branches{b}, 1); });
    CHECK_EQ(refused(store, PYL_E_STALE, [&] { store.merge_logits(a, Branches{b, 0}, 1); }).index, 1);
    for (const float bad : {nan, inf, -inf}) refused(store, PYL_E_INVALID, [&] { store.merge_logits(a, Branches{b}, bad); });

    // The distribution, against what can be worked out by hand.
    Row four(260, -inf);
    four[3] = four[4] = four[5] = four[250] = 100.0f;
    store.set_logits(a, four);
    pyl_distribution d = store.distribution(a);
    CHECK_EQ(d.most_likely, 3);
    CHECK(std::abs(d.entropy - std::log(4.0)) < 1e-12 && std::abs(d.log_sum - (100 + std::log(4.0))) < 1e-12 && std::abs(d.max_logit - 100) == 0);
    store.set_logits(a, Row(260, -inf));
    refused(store, PYL_E_ILLEGAL, [&] { store.distribution(a); });
    refused(store, PYL_E_ILLEGAL, [&] { store.sample(Branches{a}, drawn.data()); });
    refused(store, PYL_E_NO_LOGITS, [&] { store.distribution(blank); });
}

void test_bias() {
    constexpr float inf = std::numeric_limits<float>::infinity();
    Store store(model(), context());
    const pyl_branch a = root(store, text(4));
    const Row logits = row(store, a);
    const Token best = best_of(logits);
    const auto draws = [&](pyl_branch b) {
        Tokens out(1);
        store.sample(Branches{b}, out.data());
        return out[0];
    };
    const Tokens one{best}, pair{42, best};
    const std::vector<float> ban{-inf}, both{100.0f, 100.0f}, steer{-200.0f};
    CHECK_EQ(draws(a), best);
    store.set_bias(a, PYL_BIAS, one, ban.data());
    CHECK(draws(a) != best);
    CHECK(same_bits(row(store, a), logits));  // what the model said is not touched
    store.set_bias(a, PYL_BIAS, pair, both.data());  // replaces, does not add up
    CHECK_EQ(draws(a), best);
    store.set_bias(a, PYL_STEER, one, steer.data());  // and steering comes on top
    CHECK_EQ(draws(a), 42);
    const pyl_branch kid = fork(store, a, 1)[0];
    CHECK_EQ(draws(kid), best);  // a fork carries the bias, not the steering
    store.set_bias(a, PYL_BIAS, {}, nullptr);
    CHECK(draws(a) != 42 && draws(a) != best);
    CHECK_EQ(draws(kid), best);
    store.set_bias(a, PYL_STEER, {}, nullptr);
    CHECK_EQ(draws(a), best);
    for (const auto & [token, by] : {std::pair{Token{-1}, 0.0f}, std::pair{Token{300}, 0.0f}, std::pair{Token{1}, inf}, std::pair{Token{1}, std::numeric_limits<float>::quiet_NaN()}}) {
        const Tokens tokens{1, token};
        const std::vector<float> bias{0.0f, by};
        CHECK_EQ(refused(store, PYL_E_INVALID, [&] { store.set_bias(a, PYL_BIAS, tokens, bias.data()); }).index, 1);
    }
    CHECK_EQ(draws(a), best);
    // Legality: grammar, bias and steering together; asking changes nothing.
    store.set_grammar(a, {false, "root ::= \"ab\"", "root"});
    const Tokens asked{'a', 'b', eos};
    std::vector<uint8_t> legal(3, 7);
    const Facts before = facts(store, a);
    store.legal(a, asked, legal.data());
    CHECK(legal == std::vector<uint8_t>({1, 0, 0}));
    store.set_bias(a, PYL_STEER, Tokens{'a'}, ban.data());
    store.legal(a, asked, legal.data());
    CHECK(legal == std::vector<uint8_t>({0, 0, 0}));
    CHECK(facts(store, a) == before);
    Tokens out(1);
    refused(store, PYL_E_ILLEGAL, [&] { store.sample(Branches{a}, out.data()); });
    Lanes l = lanes({a}, 3);
    run_tick(store, l);
    CHECK_EQ(l.lanes[0].finish, PYL_FINISH_ILLEGAL);
    const Tokens bad{'a', -1};
    CHECK_EQ(refused(store, PYL_E_INVALID, [&] { store.legal(a, bad, legal.data()); }).index, 1);
}

// ------------------------------------------------------------------------------------------------------- the failure rule

struct Failure {
    int32_t rc;
    int rows;
    bool intact() const { return rc == 1 || rc == -1; }
    int32_t code() const { return rc == 1 ? PYL_E_NO_CELLS : rc == -1 ? PYL_E_INTERNAL : PYL_E_DECODE; }
    std::shared_ptr<Model> model(uint64_t at) const { return stub::model("n_vocab=300;fail_at=" + std::to_string(at) + ";fail_rc=" + std::to_string(rc) + ";fail_rows=" + std::to_string(rows)); }
};

std::vector<Failure> failures() {
    std::vector<Failure> out;
    for (const int32_t rc : {1, -1, 2, -2, -3}) {
        for (const int rows : {0, 1, 2, 100}) out.push_back({rc, rows});
    }
    return out;
}

template <typename Call>
Error fails(const Failure & failure, int32_t state, bool partial, Call && call) {
    const Error error = CHECK_THROWS(failure.code(), call());
    CHECK_EQ(error.engine_rc, failure.rc);
    CHECK_EQ(error.state, state);
    CHECK_EQ(error.partial, partial);
    return error;
}

// A poisoned branch refuses everything but being looked at and pruned.
void check_poisoned(Store & store, pyl_branch bad, pyl_branch good) {
    CHECK(store.get(bad).is_poisoned);
    CHECK(!store.get(bad).logits.any());
    const Tokens one{1}, none;
    Tokens out(2);
    std::vector<pyl_run> runs{run(good, one), run(bad, one)}, empty{run(good, one), run(bad, none)};
    CHECK_EQ(refused(store, PYL_E_POISONED, [&] { prefill(store, runs); }).index, 1);
    CHECK_EQ(refused(store, PYL_E_POISONED, [&] { prefill(store, empty); }).index, 1);
    CHECK_EQ(refused(store, PYL_E_POISONED, [&] { commit(store, {good, bad}, {1, 2}); }).index, 1);
    CHECK_EQ(refused(store, PYL_E_POISONED, [&] { store.sample(Branches{good, bad}, out.data()); }).index, 1);
    Lanes l = lanes({good, bad}, 1);
    CHECK_EQ(refused(store, PYL_E_POISONED, [&] { run_tick(store, l); }).index, 1);
    refused(store, PYL_E_POISONED, [&] { fork(store, bad, 1); });
    refused(store, PYL_E_POISONED, [&] { store.retain_only(bad); });
    refused(store, PYL_E_POISONED, [&] { store.set_grammar(bad, {false, "root ::= \"a\"", "root"}); });
    refused(store, PYL_E_POISONED, [&] { store.get_healthy(bad); });
}

void test_failed_prefill() {
    for (const Failure & failure : failures()) {
        Store store(failure.model(2), context(64, 16, 8));
        const Tokens base = text(5), more_a = text(3, 2), more_b = text(2, 3);
        const pyl_branch top = root(store, base);
        const auto kids = fork(store, top, 3);  // a and b will fail, c only stands by
        const pyl_branch a = kids[0], b = kids[1], c = kids[2];
        std::vector<pyl_run> runs{run(a, more_a), run(b, more_b)};
        const Snapshot before = snapshot(store);
        uint32_t n = 77;
        fails(failure, failure.intact() ? PYL_STATE_UNCHANGED : PYL_STATE_POISONED, false, [&] { store.prefill(runs, 0, n); });
        CHECK_EQ(n, 1);
        for (const pyl_run & r : runs) {
            CHECK_EQ(r.n_landed, 0);
            CHECK_EQ(r.state, failure.intact() ? PYL_STATE_UNCHANGED : PYL_STATE_POISONED);
        }
        if (failure.intact()) {
            CHECK(snapshot(store) == before);
            prefill(store, runs);  // and it can be tried again
            CHECK(same_bits(row(store, a), replay(base + more_a)));
            CHECK(same_bits(row(store, b), replay(base + more_b)));
            CHECK_EQ(pressure(store).cells_used, 10);
        } else {
            for (const pyl_branch x : {top, c}) CHECK(facts(store, x) == (x == top ? before.branches[0] : before.branches[3]));
            CHECK_EQ(store.get(a).cells_own, 3);  // charged for what may have landed
            CHECK_EQ(store.get(b).cells_own, 2);
            CHECK_EQ(store.get(a).position, 5);
            CHECK_EQ(pressure(store).cells_used, 10);
            check_poisoned(store, a, c);
            check_poisoned(store, b, top);
            refused(store, PYL_E_HAS_CHILDREN, [&] { store.prune(Branches{top}); });
            store.prune(Branches{a, b});
            CHECK_EQ(pressure(store).cells_used, 5);
            CHECK_EQ(pressure(store).leases_used, 2);
        }
        check_capacity(store);
        commit(store, {top, c}, {1, 2});
        CHECK(same_bits(row(store, top), replay(base + Tokens{1})));
        CHECK(same_bits(row(store, c), replay(base + Tokens{2})));
        store.prune_subtree(top);
        CHECK_EQ(pressure(store).cells_used, 0);
        check_capacity(store);
    }
}

// Several dispatches, of which one fails: what landed before it stands, what comes after never began.
void test_failed_prefill_in_chunks() {
    const std::vector<Tokens> texts{text(6, 2), text(3, 3), text(5, 4)};
    const Tokens base = text(4);
    // What 14 tokens in dispatches of 4 do to the three runs: {run, tokens} of each dispatch.
    const std::vector<std::vector<std::pair<size_t, uint32_t>>> dispatches{{{0, 4}}, {{0, 2}, {1, 2}}, {{1, 1}, {2, 3}}, {{2, 2}}};
    for (const Failure & failure : failures()) {
        for (size_t at = 0; at < dispatches.size(); at++) {
            Store store(failure.model(at + 2), context(64, 4, 8));
            const pyl_branch top = root(store, base);
            const auto kids = fork(store, top, 3);
            std::vector<pyl_run> runs;
            for (size_t i = 0; i < 3; i++) runs.push_back(run(kids[i], texts[i]));
            std::rotate(runs.begin(), runs.begin() + 1, runs.end());  // the order of the sequences decides, not that of the array
            const auto run_of = [&](size_t i) -> pyl_run & { return runs[(i + 2) % 3]; };
            const Snapshot before = snapshot(store);
            std::vector<uint32_t> landed(3), charged(3);
            std::vector<bool> hit(3);
            for (size_t d = 0; d <= at; d++) {
                for (const auto & [i, n] : dispatches[d]) (d < at ? landed[i] : charged[i]) += n, hit[i] = hit[i] || d == at;
            }
            uint32_t n = 77;
            const int32_t state = !failure.intact() ? PYL_STATE_POISONED : at ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED;
            fails(failure, state, at > 0, [&] { store.prefill(runs, 0, n); });
            CHECK_EQ(n, at + 1);
            uint32_t used = 4;
            for (size_t i = 0; i < 3; i++) {
                const Branch & branch = store.get(kids[i]);
                const bool poisoned = hit[i] && !failure.intact();
                const uint32_t own = landed[i] + (poisoned ? charged[i] : 0);
                used += own;
                CHECK_EQ(run_of(i).n_landed, landed[i]);
                CHECK_EQ(run_of(i).state, poisoned ? PYL_STATE_POISONED : landed[i] ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED);
                CHECK_EQ(branch.is_poisoned, poisoned);
                CHECK_EQ(branch.cells_own, own);
                CHECK_EQ(branch.position, 4 + landed[i]);
                if (poisoned) {
                    check_poisoned(store, kids[i], top);
                } else if (landed[i] == 0) {
                    CHECK(facts(store, kids[i]) == before.branches[i + 1]);
                } else {
                    CHECK_EQ(branch.logits.any(), landed[i] == texts[i].size());  // half-way there are none
                    if (branch.logits.any()) CHECK(same_bits(row(store, kids[i]), replay(base + texts[i])));
                }
            }
            CHECK_EQ(pressure(store).cells_used, used);
            CHECK(facts(store, top) == before.branches[0]);
            // Whoever is not poisoned goes on as if nothing had been.
            std::vector<pyl_run> rest;
            for (size_t i = 0; i < 3; i++) {
                if (!store.get(kids[i]).is_poisoned) rest.push_back({sizeof(pyl_run), run_of(i).n_tokens - landed[i], kids[i], run_of(i).tokens + landed[i], 0, 0});
            }
            prefill(store, rest);
            for (const pyl_branch kid : kids) {
                if (store.get(kid).is_poisoned) continue;
                commit(store, {kid}, {33});
                const size_t i = static_cast<size_t>(std::find(kids.begin(), kids.end(), kid) - kids.begin());
                CHECK(same_bits(row(store, kid), replay(base + texts[i] + Tokens{33})));
            }
            for (const pyl_branch kid : kids) {
                if (store.get(kid).is_poisoned) store.prune(Branches{kid});
            }
            check_capacity(store);
            store.prune_subtree(top);
            CHECK_EQ(pressure(store).cells_used, 0);
            check_capacity(store);
        }
    }
}

void test_failed_commit() {
    for (const Failure & failure : failures()) {
        Store store(failure.model(2), context(64, 16, 8));
        const Tokens base = text(5);
        const pyl_branch top = root(store, base);
        const auto kids = fork(store, top, 3);
        const pyl_branch a = kids[0], b = kids[1], c = kids[2];
        store.set_grammar(a, {false, "root ::= \"ab\"", "root"});
        const Snapshot before = snapshot(store);
        fails(failure, failure.intact() ? PYL_STATE_UNCHANGED : PYL_STATE_POISONED, false, [&] { commit(store, {b, a}, {'x', 'a'}); });
        if (failure.intact()) {
            CHECK(snapshot(store) == before);
            commit(store, {b, a}, {'x', 'a'});  // the grammar was not fed: 'a' is still what comes next
            CHECK(same_bits(row(store, a), replay(base + Tokens{'a'})));
            CHECK(store.get(a).sampler.history() == Tokens{'a'});
        } else {
            CHECK(facts(store, top) == before.branches[0]);
            CHECK(facts(store, c) == before.branches[3]);
            for (const pyl_branch x : {a, b}) {
                check_poisoned(store, x, c);
                CHECK_EQ(store.get(x).cells_own, 1);
                CHECK_EQ(store.get(x).position, 5);
                CHECK_EQ(store.get(x).last_token, -1);
                CHECK(store.get(x).sampler.history().empty());
            }
            CHECK_EQ(pressure(store).cells_used, 7);
            store.prune_subtree(a);
            store.prune(Branches{b});
            CHECK_EQ(pressure(store).cells_used, 5);
        }
        check_capacity(store);
        commit(store, {c, top}, {1, 2});
        CHECK(same_bits(row(store, c), replay(base + Tokens{1})));
        CHECK(same_bits(row(store, top), replay(base + Tokens{2})));
        // A poisoned branch is released with the rest.
        store.retain_only(c);
        CHECK_EQ(pressure(store).cells_used, 6);
        check_capacity(store);
    }
}

void test_failed_tick() {
    constexpr uint32_t n_steps = 6;
    const Tokens base = text(5);
    const auto setup = [&](Store & store) {
        const pyl_branch top = root(store, base, drawing(2.0f), 1);
        Branches out = fork(store, top, 4, {11, 12, 13, 14});
        out.push_back(top);
        return out;
    };
    Store undisturbed(model(), context(64, 16, 8));
    const Branches r = setup(undisturbed);
    Lanes want = lanes({r[0], r[1], r[2]}, n_steps);
    run_tick(undisturbed, want);
    for (size_t i = 0; i < 3; i++) CHECK_EQ(want.lanes[i].n_tokens, n_steps);
    for (const Failure & failure : failures()) {
        for (const uint32_t at : {0u, 1u, 3u}) {
            // Lane 1 draws a stop token in the very tick that fails.
            const Tokens stops{want.taken(1)[at]};
            for (size_t i = 0; i < 3; i++) {
                const auto from = want.tokens.begin() + static_cast<std::ptrdiff_t>(i * n_steps);
                CHECK_EQ(std::count(from, from + at + 1, stops[0]), i == 1);  // nobody else draws it, nor lane 1 earlier
            }
            Store store(failure.model(2 + at), context(64, 16, 8));
            const Branches b = setup(store);
            const Facts bystander = facts(store, b[3]), top = facts(store, b[4]), lane1 = facts(store, b[1]);
            Lanes l = lanes({b[0], b[1], b[2]}, n_steps, stops);
            const int32_t before = at ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED;
            fails(failure, failure.intact() ? before : PYL_STATE_POISONED, at > 0, [&] { run_tick(store, l); });
            CHECK_EQ(l.tick.n_ticks, at);
            CHECK_EQ(l.tick.n_dispatches, at + 1);
            CHECK_EQ(l.tick.out_of_cells, 0);
            CHECK(facts(store, b[3]) == bystander);
            CHECK(facts(store, b[4]) == top);
            for (size_t i = 0; i < 3; i++) {
                const auto from = want.tokens.begin() + static_cast<std::ptrdiff_t>(i * n_steps);
                const Tokens taken(from, from + at);
                const bool poisoned = !failure.intact() && i != 1;
                const Branch & branch = store.get(b[i]);
                CHECK_EQ(l.lanes[i].n_tokens, at);
                CHECK(l.taken(i) == taken);
                CHECK_EQ(l.tokens[i * n_steps + at], -77);
                CHECK_EQ(l.lanes[i].state, poisoned ? PYL_STATE_POISONED : before);
                CHECK_EQ(branch.is_poisoned, poisoned);
                CHECK_EQ(branch.position, 5 + at);
                CHECK_EQ(branch.cells_own, at + poisoned);
                CHECK(branch.sampler.history() == taken);
                CHECK_EQ(branch.last_token, at ? taken.back() : -1);
                const bool stopped = !failure.intact() && i == 1;  // its draw stands: it was not part of the dispatch
                CHECK_EQ(l.lanes[i].finish, stopped ? PYL_FINISH_STOP : PYL_FINISH_NONE);
                CHECK_EQ(l.lanes[i].final_token, stopped ? stops[0] : -1);
                if (!poisoned) {
                    CHECK(same_bits(row(store, b[i]), replay(base + taken)));
                    CHECK_EQ(branch.sampler.draws(), at + stopped);
                } else {
                    check_poisoned(store, b[i], b[3]);
                }
            }
            if (at == 0 && failure.intact()) CHECK(facts(store, b[1]) == lane1);
            CHECK_EQ(pressure(store).cells_used, 5 + 3 * at + (failure.intact() ? 0 : 2));
            if (failure.intact()) {  // trying again gives what would have been
                Lanes rest = lanes({b[0], b[2]}, n_steps - at);
                run_tick(store, rest);
                CHECK(l.taken(0) + rest.taken(0) == want.taken(0));
                CHECK(l.taken(2) + rest.taken(1) == want.taken(2));
            } else {
                store.prune(Branches{b[0], b[2]});
            }
            check_capacity(store);
            store.prune_subtree(b[4]);
            CHECK_EQ(pressure(store).cells_used, 0);
            check_capacity(store);
        }
    }
}

// An engine that throws has failed as much as one that says so.
void test_engine_that_throws() {
    int breaks_in = 0;  // calls into the cache
    Store store(std::make_shared<Watched>(model(),
                                          [&](const std::function<void()> & call) {
                                              call();
                                              if (breaks_in > 0 && --breaks_in == 0) throw std::bad_alloc();
                                          }),
                context());
    const pyl_branch top = root(store, text(4)), kid = fork(store, top, 1)[0];
    const Snapshot before = snapshot(store);
    breaks_in = 1;  // the kid is given cells of its own: nothing was decoded yet
    try {
        commit(store, {kid}, {1});
        CHECK(false);
    } catch (const std::bad_alloc &) {
    }
    CHECK(snapshot(store) == before);
    breaks_in = 2;
    const Error error = CHECK_THROWS(PYL_E_DECODE, commit(store, {kid}, {1}));
    CHECK_EQ(error.state, PYL_STATE_POISONED);
    CHECK(error.engine_rc < -1);
    check_poisoned(store, kid, top);
    store.prune(Branches{kid});
    CHECK_EQ(pressure(store).cells_used, 4);
    check_capacity(store);
    commit(store, {top}, {2});
    CHECK(same_bits(row(store, top), replay(text(4) + Tokens{2})));
}

// A failure after a fork point: the child keeps its cells when its parent is poisoned, and retain_only makes them its own.
void test_poisoned_parent() {
    for (const int rows : {0, 1, 2}) {
        Store store(Failure{-2, rows}.model(2), context(32, 8, 8));
        const Tokens base = text(4);
        const pyl_branch top = root(store, base), kid = fork(store, top, 1)[0];
        CHECK_THROWS(PYL_E_DECODE, prefill(store, top, {1, 2}));
        CHECK(store.get(top).is_poisoned);
        CHECK_EQ(store.get(top).cells_own, 6);
        commit(store, {kid}, {9});
        CHECK(same_bits(row(store, kid), replay(base + Tokens{9})));
        CHECK_EQ(pressure(store).cells_used, 7);
        refused(store, PYL_E_HAS_CHILDREN, [&] { store.prune(Branches{top}); });
        store.retain_only(kid);
        CHECK_EQ(pressure(store).cells_used, 5);
        check_capacity(store);
        commit(store, {kid}, {8});
        CHECK(same_bits(row(store, kid), replay(base + Tokens{9, 8})));
    }
}

void check_nothing_alive() {
    CHECK_EQ(live_counts().branches, 0);
    CHECK_EQ(live_counts().grammars, 0);
    CHECK_EQ(live_counts().contexts, 0);
    CHECK_EQ(live_counts().weights, 0);
}

void test_drain() {
    {
        Store store(Failure{-2, 1}.model(3), context());
        const pyl_branch a = root(store, text(5), drawing());
        const auto kids = fork(store, a, 3);
        store.set_grammar(kids[0], {false, "root ::= \"xx\"", "root"});
        const pyl_branch deep = fork(store, kids[0], 1)[0];
        commit(store, {kids[1]}, {1});
        CHECK_THROWS(PYL_E_DECODE, commit(store, {kids[2]}, {2}));
        CHECK_EQ(live_counts().branches, 5);
        CHECK_EQ(live_counts().grammars, 2);
        CHECK_EQ(live_counts().contexts, 1);
        CHECK_EQ(live_counts().weights, 1);
        CHECK(deep != 0);
        store.drain();
        CHECK_EQ(live_counts().branches, 0);
        CHECK_EQ(live_counts().grammars, 0);
        CHECK_EQ(live_counts().contexts, 0);
        CHECK_THROWS(PYL_E_CLOSED, store.pressure());
        CHECK_THROWS(PYL_E_CLOSED, store.cancel());
        CHECK_EQ(store.epoch(), 0);
        CHECK_THROWS(PYL_E_CLOSED, const Store::Call call(store));
        store.drain();  // again is fine
        CHECK_THROWS(PYL_E_CLOSED, const Store::Call call(store));
    }
    check_nothing_alive();
}

void test_calls_exclude_each_other() {
    Store store(model(), context());
    {
        const Store::Call call(store);
        CHECK_THROWS(PYL_E_BUSY, const Store::Call second(store));
        CHECK_EQ(store.pressure().n_ctx, 256);  // looking needs no turn
    }
    const Store::Call after(store);
}

void test_weights_are_shared() {
    const auto shared = model();
    Store one(shared, context()), two(shared, context());
    const pyl_branch a = root(one, text(5)), b = root(two, text(5));
    CHECK(same_bits(row(one, a), row(two, b)));
    CHECK_EQ(live_counts().weights, 1);
    CHECK_EQ(live_counts().contexts, 2);
    commit(one, {a}, {1});
    CHECK(same_bits(row(two, b), replay(text(5))));
}

}  // namespace

int main() {
    const auto tests = {
        test_batched_equals_alone, test_fork_equals_replay, test_fork_clones, test_pruning_siblings, test_cells, test_counters, test_restrict_and_cascade, test_retain_only, test_stale_handles,
        test_leases, test_capacity_is_refused_before, test_duplicates_and_bad_tokens, test_refused_calls_fill_in_their_outputs, test_chunking, test_max_dispatches, test_packing, test_outputs_asked_for,
        test_logits_survive, test_epoch, test_sample, test_tick_ends, test_steps, test_grammar, test_fork_without_logits, test_ignoring_the_end, test_reading_along, test_ranks_are_closed, test_forks_borrow, test_fast_forward, test_fast_forward_repairs,
        test_changing_logits, test_bias, test_cancel, test_failed_prefill, test_failed_prefill_in_chunks, test_failed_commit,
        test_failed_tick, test_engine_that_throws, test_poisoned_parent, test_drain, test_calls_exclude_each_other, test_weights_are_shared,
    };
    for (const auto test : tests) {
        test();
        check_nothing_alive();
    }
    return check::result("test_store");
}
