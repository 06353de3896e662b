// Attention of ours inside ggml's CPU backend (src/engine/ggml_cpu/attention.hpp), asked through a flash attention node of a graph as
// llama.cpp makes them: beside the definition in double, and beside itself, bit for bit, where a query sees the same.
// `test_attention times` prints what nodes take; built with -DPYL_ATTENTION=stock it prints what ggml's take, and tests nothing.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "ggml-cpu.h"
#include "ggml.h"

namespace {

using Floats = std::vector<float>;
constexpr float hidden = -INFINITY;

// A node's inputs as numbers. mask[token][cell]; q[head][token][d], k and v[head][cell][d].
struct Node {
    int n_key = 64, n_value = 64, n_heads = 4, n_shared = 2;  // n_shared: heads of K and V
    int n_tokens = 1, n_cells = 1;
    float cap = 0, bias = 0;
    ggml_type k_type = GGML_TYPE_F16, v_type = GGML_TYPE_F16;
    Floats q{}, k{}, v{}, mask{}, sinks{};
    bool masked = true;
};

Floats random(size_t n, std::mt19937 & from, float scale) {
    std::normal_distribution<float> normal(0, scale);
    Floats out(n);
    for (float & x : out) x = normal(from);
    return out;
}

// Every token sees the cells for which `sees` says so.
Node make(Node of, unsigned seed, const std::function<bool(int token, int cell)> & sees = [](int, int) { return true; }) {
    std::mt19937 from(seed);
    of.q = random(size_t(of.n_heads) * of.n_tokens * of.n_key, from, 1.5f);
    of.k = random(size_t(of.n_shared) * of.n_cells * of.n_key, from, 1.0f);
    of.v = random(size_t(of.n_shared) * of.n_cells * of.n_value, from, 1.0f);
    of.mask.resize(size_t(of.n_tokens) * of.n_cells);
    for (int t = 0; t < of.n_tokens; t++) {
        for (int c = 0; c < of.n_cells; c++) of.mask[size_t(t) * of.n_cells + c] = sees(t, c) ? (of.bias > 0 ? -0.125f * float((t + of.n_cells - c) % 512) : 0.0f) : hidden;
    }
    return of;
}

// What the engine has of these numbers once they are of a tensor's type.
void fill(ggml_tensor * t, Floats & from) {
    if (t->type == GGML_TYPE_F32) {
        std::memcpy(t->data, from.data(), from.size() * sizeof(float));
        return;
    }
    const auto n = static_cast<int64_t>(from.size());
    ggml_quantize_chunk(t->type, from.data(), t->data, 0, n / t->ne[0], t->ne[0], nullptr);
    if (t->type == GGML_TYPE_F16) ggml_fp16_to_fp32_row(static_cast<const ggml_fp16_t *>(t->data), from.data(), n);
    else if (t->type == GGML_TYPE_BF16) ggml_bf16_to_fp32_row(static_cast<const ggml_bf16_t *>(t->data), from.data(), n);
    else ggml_get_type_traits(t->type)->to_float(t->data, from.data(), n);
}

// [token][head][d]; `of` is left with the numbers as they were rounded. *ms is set to the median of five times ten runs.
Floats computed(Node & of, int n_threads = 1, double * ms = nullptr) {
    const size_t bytes = 8 * (of.q.size() + of.k.size() + of.v.size() + of.mask.size()) + size_t(of.n_tokens) * of.n_heads * of.n_value * 4 + (4u << 20);
    ggml_context * ctx = ggml_init({bytes, nullptr, false});
    ggml_tensor * q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, of.n_key, of.n_tokens, of.n_heads);
    // As a cache has them: the heads of a cell side by side.
    ggml_tensor * k = ggml_permute(ctx, ggml_new_tensor_3d(ctx, of.k_type, of.n_key, of.n_shared, of.n_cells), 0, 2, 1, 3);
    ggml_tensor * v = ggml_permute(ctx, ggml_new_tensor_3d(ctx, of.v_type, of.n_value, of.n_shared, of.n_cells), 0, 2, 1, 3);
    ggml_tensor * mask = of.masked ? ggml_new_tensor_2d(ctx, GGML_TYPE_F16, of.n_cells, of.n_tokens) : nullptr;
    fill(q, of.q);
    const auto fill_cells = [&](ggml_tensor * t, Floats & from, int n_dims) {
        Floats turned(from.size());
        const auto turn = [&](const Floats & a, Floats & b, bool back) {
            for (int h = 0; h < of.n_shared; h++) {
                for (int c = 0; c < of.n_cells; c++) {
                    const size_t one = (size_t(h) * of.n_cells + c) * n_dims, other = (size_t(c) * of.n_shared + h) * n_dims;
                    for (int d = 0; d < n_dims; d++) (back ? b[one + d] = a[other + d] : b[other + d] = a[one + d]);
                }
            }
        };
        turn(from, turned, false);
        fill(t->view_src ? t->view_src : t, turned);
        turn(turned, from, true);
    };
    fill_cells(k, of.k, of.n_key);
    fill_cells(v, of.v, of.n_value);
    if (mask) fill(mask, of.mask);
    ggml_tensor * out = ggml_flash_attn_ext(ctx, q, k, v, mask, 1 / std::sqrt(float(of.n_key)), of.bias, of.cap);
    if (!of.sinks.empty()) {
        ggml_tensor * sinks = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, of.n_heads);
        fill(sinks, of.sinks);
        ggml_flash_attn_ext_add_sinks(out, sinks);
    }
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_cplan plan = ggml_graph_plan(graph, n_threads, nullptr);
    constexpr size_t beyond = 4096;
    std::vector<uint8_t> work(plan.work_size + beyond, 0xA5);
    plan.work_data = work.data();
    ggml_graph_compute(graph, &plan);
    if (ms) {
        std::vector<double> took;
        for (int i = 0; i < 5; i++) {
            const auto start = std::chrono::steady_clock::now();
            for (int n = 0; n < 10; n++) ggml_graph_compute(graph, &plan);
            took.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() / 10);
        }
        std::sort(took.begin(), took.end());
        *ms = took[2];
    }
    bool kept = true;
    for (size_t i = plan.work_size; i < work.size(); i++) kept &= work[i] == 0xA5;
    CHECK(kept);  // no thread wrote beyond the node's memory
    const float * data = static_cast<const float *>(out->data);
    Floats result(data, data + size_t(of.n_tokens) * of.n_heads * of.n_value);
    ggml_free(ctx);
    return result;
}

// The definition.
Floats defined(const Node & of) {
    Floats out;
    const int power = 1 << int(std::floor(std::log2(of.n_heads)));
    for (int t = 0; t < of.n_tokens; t++) {
        for (int h = 0; h < of.n_heads; h++) {
            const double slope = of.bias <= 0 ? 1 : h < power ? std::pow(2.0, -double(of.bias) / power * (h + 1)) : std::pow(2.0, -double(of.bias) / 2 / power * (2 * (h - power) + 1));
            const size_t shared = size_t(h / (of.n_heads / of.n_shared));
            std::vector<double> scores(size_t(of.n_cells), hidden);
            double most = of.sinks.empty() ? -1e300 : of.sinks[size_t(h)];
            for (int c = 0; c < of.n_cells; c++) {
                const double seen = of.masked ? of.mask[size_t(t) * of.n_cells + c] : 0;
                if (std::isinf(seen)) continue;
                double dot = 0;
                for (int d = 0; d < of.n_key; d++) dot += double(of.q[(size_t(h) * of.n_tokens + t) * of.n_key + d]) * of.k[(shared * of.n_cells + c) * of.n_key + d];
                dot /= std::sqrt(double(of.n_key));
                if (of.cap > 0) dot = of.cap * std::tanh(dot / of.cap);
                scores[size_t(c)] = dot + slope * seen;
                most = std::max(most, scores[size_t(c)]);
            }
            double sum = of.sinks.empty() ? 0 : std::exp(of.sinks[size_t(h)] - most);
            std::vector<double> mixed(size_t(of.n_value), 0);
            for (int c = 0; c < of.n_cells; c++) {
                const double weight = std::exp(scores[size_t(c)] - most);
                if (std::isinf(scores[size_t(c)])) continue;
                sum += weight;
                for (int d = 0; d < of.n_value; d++) mixed[size_t(d)] += weight * of.v[(shared * of.n_cells + c) * of.n_value + d];
            }
            for (const double x : mixed) out.push_back(float(sum > 0 ? x / sum : 0));
        }
    }
    return out;
}

float apart(const Floats & a, const Floats & b) {
    if (a.size() != b.size()) return INFINITY;
    float most = 0;
    for (size_t i = 0; i < a.size(); i++) {
        if (!(std::fabs(a[i] - b[i]) <= most)) most = std::isnan(a[i] - b[i]) ? INFINITY : std::fabs(a[i] - b[i]);
    }
    return most;
}

void near(const std::string & what, Node of, int n_threads = 1, float within = 3e-5f) {
    const Floats got = computed(of, n_threads), want = defined(of);
    const float far = apart(got, want);
    if (!CHECK(far < within)) std::fprintf(stderr, "    %s: %g apart\n", what.c_str(), far);
}

bool same_bits(const Floats & a, const Floats & b) { return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; }

// A token's part of a result, and of a node.
Floats row_of(const Floats & result, const Node & of, int token) {
    const auto size = std::ptrdiff_t(of.n_heads) * of.n_value;
    return {result.begin() + token * size, result.begin() + (token + 1) * size};
}

Node alone(const Node & of, int token) {
    Node one = of;
    one.n_tokens = 1;
    one.q.clear();
    for (int h = 0; h < of.n_heads; h++) {
        const auto at = (std::ptrdiff_t(h) * of.n_tokens + token) * of.n_key;
        one.q.insert(one.q.end(), of.q.begin() + at, of.q.begin() + at + of.n_key);
    }
    one.mask.assign(of.mask.begin() + std::ptrdiff_t(token) * of.n_cells, of.mask.begin() + std::ptrdiff_t(token + 1) * of.n_cells);
    return one;
}

// The same cells with others between them, which nobody sees and which hold `rubbish`: cell c stands at places[c] of n.
Node spread(const Node & of, const std::vector<int> & places, int n, float rubbish) {
    Node wide = of;
    wide.n_cells = n;
    wide.k.assign(size_t(of.n_shared) * n * of.n_key, rubbish);
    wide.v.assign(size_t(of.n_shared) * n * of.n_value, rubbish);
    wide.mask.assign(size_t(of.n_tokens) * n, hidden);
    for (int c = 0; c < of.n_cells; c++) {
        const int to = places[size_t(c)];
        for (int h = 0; h < of.n_shared; h++) {
            std::memcpy(&wide.k[(size_t(h) * n + to) * of.n_key], &of.k[(size_t(h) * of.n_cells + c) * of.n_key], size_t(of.n_key) * sizeof(float));
            std::memcpy(&wide.v[(size_t(h) * n + to) * of.n_value], &of.v[(size_t(h) * of.n_cells + c) * of.n_value], size_t(of.n_value) * sizeof(float));
        }
        for (int t = 0; t < of.n_tokens; t++) wide.mask[size_t(t) * n + to] = of.mask[size_t(t) * of.n_cells + c];
    }
    return wide;
}

// Forks: `prefix` cells that all see, then each token's own, side by side in turn.
std::function<bool(int, int)> forks(int prefix, int n) {
    return [=](int token, int cell) { return cell < prefix || (cell - prefix) % n == token; };
}

void what_it_is() {
    unsigned seed = 0;
    for (const int n_dims : {8, 24, 64, 80, 128, 256}) {
        for (const int n_tokens : {1, 2, 7, 33}) near("dims " + std::to_string(n_dims), make({.n_key = n_dims, .n_value = n_dims, .n_tokens = n_tokens, .n_cells = 300}, seed++, forks(260, n_tokens)));
    }
    near("K and V of other widths", make({.n_key = 192, .n_value = 128, .n_heads = 5, .n_shared = 1, .n_tokens = 9, .n_cells = 130}, seed++, forks(100, 9)));
    near("as with latent attention", make({.n_key = 576, .n_value = 512, .n_heads = 3, .n_shared = 1, .n_tokens = 5, .n_cells = 70}, seed++));
    near("a width that is ggml's", make({.n_key = 20, .n_value = 20, .n_tokens = 3, .n_cells = 70, .k_type = GGML_TYPE_F32, .v_type = GGML_TYPE_F32}, seed++));
    for (const int n_cells : {1, 3, 63, 64, 65, 127, 128, 700}) {
        for (const int n_tokens : {1, 5}) near("cells " + std::to_string(n_cells), make({.n_tokens = n_tokens, .n_cells = n_cells}, seed++));
    }
    for (const int n_tokens : {63, 64, 65, 200}) {
        near("a causal read of " + std::to_string(n_tokens), make({.n_tokens = n_tokens, .n_cells = 256}, seed++, [=](int t, int c) { return c <= 256 - n_tokens + t; }), 2);
        near("with a window", make({.n_tokens = n_tokens, .n_cells = 256}, seed++, [=](int t, int c) { return c <= 256 - n_tokens + t && c > 256 - n_tokens + t - 30; }));
    }
    for (const int n_tokens : {1, 6, 70}) {
        const auto some = [&](int t, int c) { return (t * 31 + c * 17 + c / 5) % 7 < 3; };
        near("nothing hidden, and no mask", [&] { Node of = make({.n_tokens = n_tokens, .n_cells = 96}, seed++); of.masked = false; return of; }());
        near("any cells", make({.n_tokens = n_tokens, .n_cells = 613}, seed++, some));
        near("capped", make({.n_tokens = n_tokens, .n_cells = 613, .cap = 2}, seed++, some));
        near("biased", make({.n_heads = 6, .n_tokens = n_tokens, .n_cells = 613, .bias = 8}, seed++, some));
        Node sunk = make({.n_tokens = n_tokens, .n_cells = 613, .cap = 5, .bias = 4}, seed++, some);
        sunk.sinks = {-3, 0, 2, 30};
        near("with sinks", sunk, 2);
        near("one sees nothing", make({.n_tokens = n_tokens, .n_cells = 130}, seed++, [=](int t, int) { return t != n_tokens - 1; }));
        for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
            near("K and V as " + std::string(ggml_type_name(type)), make({.n_tokens = n_tokens, .n_cells = 613, .k_type = type, .v_type = type}, seed++, forks(500, n_tokens)), 2);
        }
        near("K and V of two types", make({.n_tokens = n_tokens, .n_cells = 613, .k_type = GGML_TYPE_Q8_0}, seed++, forks(500, n_tokens)));
    }
    // Scores that rise from cell to cell, and such as no float's exponential has.
    Node rising = make({.n_heads = 2, .n_tokens = 3, .n_cells = 400}, seed++);
    for (size_t i = 0; i < rising.k.size(); i++) rising.k[i] = rising.q[i % 64] * float(i / 64 % 400) * 0.05f;
    near("rising", rising);
    for (float & x : rising.q) x *= 40;
    near("far apart", rising, 1, 1e-3f);  // scores of tens of thousands have few bits after the point
}

void what_it_does_not_depend_on() {
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_Q8_0}) {
        for (const int n_tokens : {2, 8, 33, 63, 64, 100}) {
            Node of = make({.n_tokens = n_tokens, .n_cells = 300 + 3 * n_tokens, .k_type = type, .v_type = type}, unsigned(n_tokens), forks(300, n_tokens));
            const Floats together = computed(of);
            CHECK(same_bits(together, computed(of, 2)));
            CHECK(same_bits(together, computed(of, 3)));
            for (int t = 0; t < n_tokens; t++) {
                Node one = alone(of, t);
                CHECK(same_bits(row_of(together, of, t), computed(one)));
                CHECK(same_bits(row_of(together, of, t), computed(one, 2)));
            }
        }
        // Nine heads, and threads that do not divide them; around the 512 cells from where on ggml shares out cells.
        for (const int n_cells : {508, 600}) {
            Node many = make({.n_heads = 9, .n_shared = 3, .n_tokens = 8, .n_cells = n_cells, .k_type = type, .v_type = type}, 3, forks(500, 8));
            const Floats all = computed(many);
            for (int t = 0; t < 8; t += 7) {
                Node one = alone(many, t);
                for (const int n_threads : {1, 2, 4, 5, 8, 18}) CHECK(same_bits(row_of(all, many, t), computed(one, n_threads)));
            }
        }
        // With what is done to scores; the biased ones are not biased where a token sees its own cell.
        for (const auto & [cap, bias, sunk] : std::initializer_list<std::tuple<float, float, bool>>{{3.0f, 0.0f, false}, {0.0f, 8.0f, false}, {2.0f, 4.0f, true}}) {
            Node done = make({.n_key = 96, .n_value = 96, .n_tokens = 40, .n_cells = 296, .cap = cap, .bias = bias, .k_type = type, .v_type = type}, 9, [](int t, int c) { return c <= 256 + t; });
            if (bias > 0) {
                for (int t = 0; t < 40; t++) done.mask[size_t(t) * 296 + 256 + size_t(t)] = 0;
                for (int c = 192; c < 256; c++) done.mask[size_t(7) * 296 + size_t(c)] = 0;
            }
            if (sunk) done.sinks = {-3, 0, 2, 5};
            const Floats all = computed(done);
            for (int t = 0; t < 40; t++) {
                Node one = alone(done, t);
                CHECK(same_bits(row_of(all, done, t), computed(one)));
            }
        }
        // Where the cells lie, and what lies between them.
        Node of = make({.n_tokens = 5, .n_cells = 200, .k_type = type, .v_type = type}, 77, forks(150, 5));
        const Floats dense = computed(of);
        for (int step = 1; step < 4; step++) {
            std::vector<int> places;
            for (int c = 0, at = 3 * step; c < 200; c++, at += 1 + (c * step) % 5) places.push_back(at);
            Node far = spread(of, places, places.back() + 40, type == GGML_TYPE_Q8_0 ? 1000.0f : NAN);
            CHECK(same_bits(dense, computed(far)));
            for (int t = 0; t < 5; t++) {
                Node one = alone(far, t);
                CHECK(same_bits(row_of(dense, of, t), computed(one)));
            }
        }
    }
}

void what_is_not_a_number_stays_with_who_sees_it() {
    for (const int n_tokens : {4, 70}) {
        Node of = make({.n_tokens = n_tokens, .n_cells = 200 + n_tokens}, 5, forks(200, n_tokens));
        const Floats clean = computed(of);
        for (const bool in_key : {true, false}) {
            Node bad = of;
            // The first token's own cell.
            (in_key ? bad.k : bad.v)[size_t(200) * 64 + 7] = NAN;
            const Floats got = computed(bad);
            for (int t = 1; t < n_tokens; t++) CHECK(same_bits(row_of(got, of, t), row_of(clean, of, t)));
            bool told = false;
            for (const float x : row_of(got, of, 0)) told |= std::isnan(x);
            CHECK(told);
        }
    }
}

// One thread; SmolLM2-135M's heads.
void times() {
    struct { const char * what; int n_tokens, prefix, n_own; } const rows[] = {
        {"1", 1, 2048, 8}, {"8", 8, 2048, 8}, {"32", 32, 2048, 8}, {"32, nothing seen by all", 32, 0, 256}, {"512, all cells seen", 512, 2048, 0}};
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
        for (const auto & row : rows) {
            Node of = make({.n_heads = 9, .n_shared = 3, .n_tokens = row.n_tokens, .n_cells = row.prefix + row.n_own * row.n_tokens, .k_type = type, .v_type = type}, 1, forks(row.prefix, row.n_tokens));
            double ms = 0;
            const Floats got = computed(of, 1, &ms);
            std::printf("%s, %s: %.3f ms, %.1e from the definition\n", ggml_type_name(type), row.what, ms, double(apart(got, defined(of))));
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    ggml_cpu_init();
    if (argc == 2 && std::string(argv[1]) == "times") {
        times();
        return 0;
    }
    what_it_is();
    what_it_does_not_depend_on();
    what_is_not_a_number_stays_with_who_sees_it();
    return check::result("test_attention");
}
