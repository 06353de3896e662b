// pylloyal.hpp on the stub engine: every failure arrives as the type of its code with its numbers, and what goes out of scope, by whichever
// way, is given back, in any order.
#include <pylloyal.hpp>
#include <pylloyal.hpp>

#include <cstdio>
#include <optional>
#include <type_traits>

using namespace pylloyal;

static int n_failed;
static void that(bool ok, int line, const char * what) {
    if (!ok) n_failed++, std::fprintf(stderr, "%d: not so: %s\n", line, what);
}
#define CHECK(condition) that(bool(condition), __LINE__, #condition)

template <typename E, typename Body>
static std::optional<E> caught(Body && body) {
    try {
        body();
    } catch (const E & e) {
        return e;
    } catch (const std::exception & e) {
        std::fprintf(stderr, "    another exception: %s\n", e.what());
    }
    return std::nullopt;
}

static_assert(!std::is_copy_constructible_v<Model> && !std::is_copy_assignable_v<Store> && std::is_nothrow_move_constructible_v<Store> && std::is_nothrow_move_assignable_v<Prompt>);
static_assert(!std::is_copy_constructible_v<Branch> && std::is_nothrow_move_constructible_v<Branch> && std::is_nothrow_move_assignable_v<Branch>);
static_assert(std::is_base_of_v<Error, ContextFull> && std::is_base_of_v<std::runtime_error, Error> && !std::is_same_v<ContextFull, NoCells>);

static pyl_store_params small() {
    pyl_store_params p = store_params();
    p.n_ctx = 64, p.n_branches = 4;
    return p;
}

static void failures() {
    const auto unknown_option = caught<FormatError>([] { Model("stub:no_such=1"); });
    CHECK(unknown_option && unknown_option->code == PYL_E_FORMAT && unknown_option->state == State::unchanged && unknown_option->need == -1 && unknown_option->index == -1);
    CHECK(unknown_option && std::string_view(unknown_option->what()).find("no_such") != std::string_view::npos);
    const Model model("stub:n_vocab=300");
    CHECK(caught<ProjectorError>([&] { Projector(model, "stub:x"); }));
    auto rounded = small();
    rounded.n_batch = 2;
    const auto batch = caught<InvalidArgument>([&] { Store(model, rounded); });
    CHECK(batch && batch->need == 4 && batch->have == 2);

    Store store(model, small());
    Branch root = store.root(greedy());
    CHECK(caught<NoLogits>([&] {
        std::vector<Branch> fresh;
        fresh.push_back(store.root());
        store.tick(fresh, 1);
    }));
    const auto full = caught<ContextFull>([&] { root.prefill(std::vector<int32_t>(1000, 1)); });
    CHECK(full && full->need == 1000 && full->have > 0 && full->state == State::unchanged);
    root.prefill(std::vector<int32_t>{1, 2, 3});
    std::vector<Branch> kids = root.fork(2);
    CHECK(caught<NoLease>([&] { root.fork(2); }));
    CHECK(store.pressure().leases_used == 3);
    const pyl_branch id = root.id();
    CHECK(caught<HasChildren>([&] { check(pyl_branch_prune_n(store.get(), &id, 1)); }));
    kids.clear();
    CHECK(store.pressure().leases_used == 1 && root.describe().n_children == 0);
    CHECK(caught<Error>([&] { root.prefill(std::vector<int32_t>{-1}); }).has_value());

    const pyl_grammar bad = gbnf("root := ?"), good = gbnf("root ::= \"abc\"");
    CHECK(caught<GrammarError>([&] { root.set_grammar(&bad); }));
    CHECK(caught<GrammarError>([&] { store.root(greedy(), &bad); }));
    root.set_grammar(&good);
    CHECK(root.describe().has_grammar == 1 && root.fork(1, PYL_FORK_WITHOUT_LOGITS)[0].describe().has_logits == 0);
    root.set_grammar(nullptr);
    CHECK(root.describe().has_grammar == 0);

    pyl_error unknown{};
    unknown.code = -999, unknown.message = "of days to come";
    try {
        detail::raise<PYL_E_IO, PYL_E_CONTEXT>(unknown);
    } catch (const IOError &) {
        CHECK(false && "another type");
    } catch (const Error & e) {
        CHECK(e.code == -999 && std::string(e.what()) == "of days to come");
    }
}

static void moves() {
    std::optional<Model> model(std::in_place, "stub:n_vocab=300");
    Store store(*model, small()), other(*model, small());
    model.reset();  // parents outlive their children inside the library
    Branch a = store.root(), b = other.root();
    const pyl_branch ids[2] = {a.id(), b.id()};
    std::swap(a, b);
    CHECK(a.id() == ids[1] && b.id() == ids[0]);
    a.prefill(std::vector<int32_t>{1, 2});
    CHECK(other.pressure().cells_used == 2 && store.pressure().cells_used == 0);
    store = std::move(other);  // what the target held is given back with `other`, at the latest at the end
    CHECK(store.pressure().cells_used == 2);
    CHECK(a.fork(1)[0].release() != 0);
    CHECK(store.pressure().leases_used == 2);  // released: it lives on
    CHECK(a.fork(1).size() == 1);
    CHECK(store.pressure().leases_used == 2);  // not released: it does not
}

static void texts() {
    const Model model("stub:n_vocab=300");
    const std::string word = "h\xc3\xa9llo";
    const std::vector<int32_t> tokens = model.tokenize(word);
    CHECK(tokens.size() == 6 && model.detokenize(tokens.data(), tokens.size()) == word);
    CHECK(model.tokenize("").empty() && model.tokenize(std::string(5000, 'x'), PYL_TOKENIZE_ADD_SPECIAL).size() >= 5000);
    CHECK(caught<FormatError>([&] { model.tokenize("\xff"); }));
    CHECK(caught<InvalidArgument>([&] { const int32_t beyond = 300; model.detokenize(&beyond, 1); })->index == 0);
    CHECK(dry_run("stub:", small()).find("\"context_bytes\":") != std::string::npos);
    CHECK(caught<InvalidArgument>([&] { auto p = small(); p.n_branches = 257; dry_run("stub:", p); }));
    CHECK(model.describe().n_vocab == 300);

    Store store(model, small());
    Projector projector(model, "stub:");
    auto part = sized<pyl_part>();
    part.kind = PYL_PART_TEXT, part.text = "ab", part.n = 2;
    const Prompt prompt(model, &projector, {part});
    CHECK(prompt.quote().n_cells == 2 && Prompt(model, nullptr, {}).quote().n_segments == 0);
    Branch root = store.root(greedy());
    root.prefill(prompt);
    std::vector<Branch> both;
    both.push_back(std::move(root));
    both.push_back(std::move(both[0].fork(1)[0]));
    const std::vector<Said> said = store.tick(both, 3);
    CHECK(said.size() == 2 && said[0].tokens == said[1].tokens && said[0].finish == said[1].finish && (said[0].tokens.size() == 3 || said[0].finish == PYL_FINISH_EOG));
}

int main() {
    check_abi();
    failures();
    moves();
    texts();
    const pyl_live live = live_objects();
    CHECK(live.models + live.weights + live.stores + live.contexts + live.branches + live.texts + live.projectors + live.prompts == 0);
    return n_failed ? 1 : 0;
}
