// Fixed pieces of work on the stub engine, for counting instructions (tools/instructions.py): what the kernel itself takes, whatever the machine is
// doing. Through the C ABI, as a user calls it.
//   stub_tick SCENARIO...      runs each, or `all`; without one, lists them
// What is to be counted happens in measured(); what comes before it has set everything up, and done the same once.
#include <pylloyal.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace {

constexpr char model_path[] = "stub:n_vocab=8192";
constexpr size_t n_steps = 16;

void check(int32_t code, const char * what) {
    if (code == PYL_OK) return;
    std::fprintf(stderr, "%s failed (%d): %s\n", what, code, pyl_error_last()->message);
    std::exit(1);
}

std::vector<int32_t> text(size_t n, uint32_t of) {
    std::vector<int32_t> out;
    for (uint32_t x = of; out.size() < n;) out.push_back(static_cast<int32_t>((x = x * 1664525u + 1013904223u) >> 24));
    return out;
}

// A store of one thread, and the calls with the arguments that are always the same.
class Bench {
public:
    Bench() {
        check(pyl_model_open(&model_, model_path, std::strlen(model_path), nullptr), "pyl_model_open");
        pyl_store_params params;
        pyl_store_params_init(&params, sizeof params);
        params.n_ctx = 4096, params.n_branches = 40, params.n_threads = 1;
        check(pyl_store_open(&store_, model_, &params), "pyl_store_open");
    }
    ~Bench() {
        pyl_store_free(store_);
        pyl_model_free(model_);
    }
    Bench(const Bench &) = delete;
    Bench & operator=(const Bench &) = delete;

    // No token ends a generation, so that every run is as long.
    pyl_branch root(pyl_sampling sampling) {
        pyl_branch root = 0;
        sampling.ignore_eog = 1;
        check(pyl_branch_create(store_, &root, 0, &sampling, nullptr), "pyl_branch_create");
        return root;
    }
    void grammar(pyl_branch branch, const std::string & gbnf) {
        const pyl_grammar g = {sizeof g, PYL_GRAMMAR_GBNF, gbnf.data(), gbnf.size(), nullptr, nullptr, 0};
        check(pyl_branch_set_grammar(store_, branch, &g), "pyl_branch_set_grammar");
    }
    std::vector<pyl_branch> fork(pyl_branch source, size_t n) {
        std::vector<pyl_branch> out(n);
        std::vector<uint64_t> seeds(n);
        for (size_t i = 0; i < n; i++) seeds[i] = i + 1;
        check(pyl_branch_fork_n(store_, source, out.data(), n, seeds.data(), 0), "pyl_branch_fork_n");
        return out;
    }
    void prune(const std::vector<pyl_branch> & branches) { check(pyl_branch_prune_n(store_, branches.data(), branches.size()), "pyl_branch_prune_n"); }
    void prefill(const std::vector<pyl_branch> & branches, size_t n_tokens) {
        std::vector<std::vector<int32_t>> texts;
        std::vector<pyl_run> runs;
        while (texts.size() < branches.size()) texts.push_back(text(n_tokens, static_cast<uint32_t>(texts.size() + 1)));
        for (size_t i = 0; i < branches.size(); i++) runs.push_back({sizeof(pyl_run), static_cast<uint32_t>(n_tokens), branches[i], texts[i].data(), 0, 0});
        check(pyl_prefill_n(store_, runs.data(), runs.size(), 0, nullptr), "pyl_prefill_n");
    }
    void tick(const std::vector<pyl_branch> & branches) {
        std::vector<int32_t> tokens(branches.size() * n_steps);
        std::vector<pyl_lane> lanes(branches.size());
        pyl_tick tick = {sizeof tick, n_steps, nullptr, 0, 0, 0, 0, 0, nullptr, 0};
        for (size_t i = 0; i < branches.size(); i++) lanes[i].struct_size = sizeof lanes[i], lanes[i].branch = branches[i];
        check(pyl_tick_n(store_, &tick, lanes.data(), lanes.size(), tokens.data()), "pyl_tick_n");
        for (const pyl_lane & lane : lanes) {
            if (lane.n_tokens == n_steps) continue;
            std::fprintf(stderr, "a branch took %u tokens, not %zu\n", lane.n_tokens, n_steps);
            std::exit(1);
        }
    }

private:
    pyl_model * model_ = nullptr;
    pyl_store * store_ = nullptr;
};

pyl_sampling sampled() {
    pyl_sampling out;
    pyl_sampling_init(&out, sizeof out);
    out.temperature = 0.8f, out.top_k = 40, out.top_p = 0.95f, out.min_p = 0.05f, out.seed_mode = PYL_SEED_SET, out.seed = 1;
    return out;
}

using Work = std::function<void()>;

}  // namespace

// By this name the counting begins and ends; it must be a call of its own.
extern "C" __attribute__((noinline, used)) void measured(const Work & work) {
    work();
    asm volatile("" ::: "memory");  // and no tail call
}

namespace {

void twice(const Work & work) {
    work();
    measured(work);
}

void ticks(size_t n, const pyl_sampling & sampling, const std::string & gbnf) {
    Bench bench;
    const pyl_branch root = bench.root(sampling);
    if (!gbnf.empty()) bench.grammar(root, gbnf);
    bench.prefill({root}, 64);
    const auto branches = bench.fork(root, n);
    twice([&] { bench.tick(branches); });
}

void forks(size_t n) {
    Bench bench;
    const pyl_branch root = bench.root(sampled());
    bench.prefill({root}, 64);
    twice([&] { bench.prune(bench.fork(root, n)); });
}

void prefills(size_t n, size_t n_tokens) {
    Bench bench;
    const pyl_branch root = bench.root(sampled());
    bench.prefill({root}, 64);
    const auto branches = bench.fork(root, n);
    twice([&] { bench.prefill(branches, n_tokens); });
}

pyl_sampling greedy() {
    pyl_sampling out = sampled();
    out.temperature = 0;
    return out;
}

const std::map<std::string, Work> scenarios = {
    {"fork-8", [] { forks(8); }},
    {"fork-32", [] { forks(32); }},
    {"prefill-1x1000", [] { prefills(1, 1000); }},
    {"prefill-8x100", [] { prefills(8, 100); }},
    {"tick-8-greedy", [] { ticks(8, greedy(), ""); }},
    {"tick-8-sampled", [] { ticks(8, sampled(), ""); }},
    {"tick-32-sampled", [] { ticks(32, sampled(), ""); }},
    {"tick-8-grammar", [] { ticks(8, sampled(), "root ::= \"" + std::string(2 * n_steps, 'a') + "\""); }},
};

}  // namespace

int main(int argc, char ** argv) {
    for (int i = 1; i < argc; i++) {
        bool is_known = false;
        for (const auto & [name, work] : scenarios)
            if (argv[i] == name || !std::strcmp(argv[i], "all")) work(), is_known = true;
        if (!is_known) return std::fprintf(stderr, "no scenario is called %s\n", argv[i]), 1;
    }
    if (argc == 1)
        for (const auto & [name, work] : scenarios) std::printf("%s\n", name.c_str());
    return 0;
}
