// The control of the benchmark: what a program that uses llama.cpp directly would do for the same work, and no more. llama.h alone, on the
// archives libpylloyal is linked with, with the context parameters, thread pool and barrier libpylloyal uses (of ours only the barrier).
//
//   bench_control                                  a runner: one JSON object a line on stdin, one JSON line back (docs/benchmark.md)
//   bench_control first MODEL TEXT_FILE N_THREADS  reads the text, prints its likeliest next token and ends: `pylloyal ask` without the rest
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "ggml-cpu.h"
#include "llama.h"

namespace {

using Json = nlohmann::ordered_json;
using Tokens = std::vector<llama_token>;

struct Free {
    void operator()(llama_model * p) const { llama_model_free(p); }
    void operator()(llama_context * p) const { llama_free(p); }
    void operator()(ggml_threadpool * p) const { ggml_threadpool_free(p); }
    void operator()(llama_sampler * p) const { llama_sampler_free(p); }
};
template <typename T> using Owned = std::unique_ptr<T, Free>;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void check(bool ok, const std::string & what) {
    if (!ok) throw std::runtime_error(what);
}

int64_t kib(const char * file, const std::string & key) {
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);) {
        if (line.rfind(key, 0) == 0) return std::atoll(line.c_str() + key.size());
    }
    return -1;
}
int64_t rss_kib() {  // the rollup is exact, the other is put together from each core's count now and then
    const int64_t exact = kib("/proc/self/smaps_rollup", "Rss:");
    return exact >= 0 ? exact : kib("/proc/self/status", "VmRSS:");
}

class Rows {  // one llama_batch, made once
public:
    explicit Rows(int32_t n) : room_(n), batch_(llama_batch_init(n, 0, 1)) {}
    ~Rows() { llama_batch_free(batch_); }
    Rows(const Rows &) = delete;
    Rows & operator=(const Rows &) = delete;
    void clear() { batch_.n_tokens = 0; }
    bool is_full() const { return batch_.n_tokens == room_; }
    int32_t size() const { return batch_.n_tokens; }
    void add(llama_token token, llama_pos pos, llama_seq_id seq, bool output) {
        const int32_t i = batch_.n_tokens++;
        batch_.token[i] = token, batch_.pos[i] = pos, batch_.n_seq_id[i] = 1, batch_.seq_id[i][0] = seq, batch_.logits[i] = output;
    }
    const llama_batch & raw() const { return batch_; }

private:
    int32_t room_;
    llama_batch batch_;
};

class Control {
public:
    Json open(const Json & a) {
        const double start = now();
        load(a.at("model"));
        start_context(a.at("n_ctx"), a.at("n_branches"), a.value("n_batch", 512U), a.at("n_threads"), a.value("flash_attn", std::string("on")) == "on");
        return {{"seconds", now() - start}};
    }

    void load(const std::string & path) {
        close();
        model_.reset(llama_model_load_from_file(path.c_str(), llama_model_default_params()));
        check(model_ != nullptr, "the engine does not open " + path);
        vocab_ = llama_model_get_vocab(model_.get());
        bans_.clear();
        for (llama_token t = 0; t < llama_vocab_n_tokens(vocab_); t++) {
            if (llama_vocab_is_eog(vocab_, t)) bans_.push_back({t, -INFINITY});
        }
    }

    void start_context(uint32_t n_ctx, uint32_t n_branches, uint32_t n_batch, int32_t n_threads, bool flash_attn) {
        llama_context_params p = llama_context_default_params();
        p.n_ctx = (n_ctx + 255) / 256 * 256;
        p.n_batch = p.n_ubatch = n_batch;
        p.n_seq_max = p.n_outputs_max = n_branches;
        p.n_threads = p.n_threads_batch = n_threads;
        p.flash_attn_type = flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        p.kv_unified = p.swa_full = p.no_perf = true;
        context_.reset(llama_init_from_model(model_.get(), p));
        check(context_ != nullptr, "the engine opens no context");
        ggml_threadpool_params pool = ggml_threadpool_params_default(n_threads);
        pool.poll = 0;
        pool_.reset(ggml_threadpool_new(&pool));
        llama_attach_threadpool(context_.get(), pool_.get(), pool_.get());
        rows_ = std::make_unique<Rows>(static_cast<int32_t>(n_batch));
    }

    // A text in dispatches of n_batch; the logits of its last token are then row `last`.
    int32_t read(const Tokens & text, llama_seq_id seq, llama_pos at) {
        int32_t last = -1;
        for (size_t i = 0; i < text.size(); i++) {
            if (i == 0 || rows_->is_full()) rows_->clear();
            rows_->add(text[i], at + static_cast<llama_pos>(i), seq, i + 1 == text.size());
            if (rows_->is_full() || i + 1 == text.size()) last = rows_->size() - 1, decode();
        }
        return last;
    }

    Json ticks(const Json & a) {
        const Tokens prefix = tokens_of(a, "prefix");
        const int32_t n = a.at("n_branches"), n_steps = a.at("n_steps"), skip = a.value("skip", 0);
        const std::string mode = a.at("mode");
        const uint32_t seed = a.value("seed", 1U);
        const Emptied emptied(*this);
        int32_t first = read(prefix, 0, 0);
        fork(n);
        std::vector<Owned<llama_sampler>> chains = samplers(mode, n, seed);
        std::vector<Tokens> said(static_cast<size_t>(n));
        double start = now();
        for (int32_t step = 0; step < skip + n_steps; step++) {
            if (step == skip) start = now();
            rows_->clear();
            for (int32_t b = 0; b < n; b++) {
                const auto i = static_cast<size_t>(b);
                const llama_token token = mode == "none" ? prefix[static_cast<size_t>(b + step) % prefix.size()] : llama_sampler_sample(chains[i].get(), context_.get(), first >= 0 ? first : b);
                said[i].push_back(token);
                rows_->add(token, static_cast<llama_pos>(prefix.size()) + step, b + 1, true);
            }
            decode();
            first = -1;
        }
        const double seconds = now() - start;
        return {{"seconds", seconds}, {"tokens", said}};
    }

    // A raw fork: read the document once, copy the sequence, read the questions packed, decode the answers together.
    Json document(const Json & a) {
        const Tokens text = tokens_of(a, "document");
        const std::vector<Tokens> questions = a.at("questions");
        const int32_t n_tokens = a.at("n_tokens");
        const auto n = static_cast<int32_t>(questions.size());
        const Emptied emptied(*this);
        const double start = now();
        read(text, 0, 0);
        fork(n);
        const auto end = static_cast<llama_pos>(text.size());
        std::vector<Owned<llama_sampler>> chains = samplers("greedy", n, 0);
        std::vector<Tokens> answers(questions.size());
        std::vector<std::pair<size_t, int32_t>> ready;  // whose last row this dispatch has, and where
        const auto land = [&] {
            decode();
            for (const auto & [i, row] : ready) answers[i].push_back(llama_sampler_sample(chains[i].get(), context_.get(), row));
            ready.clear(), rows_->clear();
        };
        rows_->clear();
        for (size_t i = 0; i < questions.size(); i++) {
            check(!questions[i].empty(), "a question is empty");
            for (size_t k = 0; k < questions[i].size(); k++) {
                const bool is_last = k + 1 == questions[i].size();
                if (is_last) ready.emplace_back(i, rows_->size());
                rows_->add(questions[i][k], end + static_cast<llama_pos>(k), static_cast<llama_seq_id>(i) + 1, is_last);
                if (rows_->is_full()) land();
            }
        }
        if (rows_->size()) land();
        const double prefill = now() - start;
        for (int32_t step = 1; step < n_tokens; step++) {
            rows_->clear();
            for (size_t i = 0; i < answers.size(); i++) rows_->add(answers[i].back(), end + static_cast<llama_pos>(questions[i].size() + answers[i].size()) - 1, static_cast<llama_seq_id>(i) + 1, true);
            decode();
            for (size_t i = 0; i < answers.size(); i++) answers[i].push_back(llama_sampler_sample(chains[i].get(), context_.get(), static_cast<int32_t>(i)));
        }
        const double seconds = now() - start;
        return {{"seconds", seconds}, {"prefill_s", prefill}, {"answers", answers}};
    }

    Json forks(const Json & a) {
        const Tokens prefix = tokens_of(a, "prefix");
        const int32_t n = a.at("n");
        const Emptied emptied(*this);
        read(prefix, 0, 0);
        const int64_t before = rss_kib();
        const double start = now();
        fork(n);
        const double seconds = now() - start;
        return {{"seconds", seconds}, {"rss_before_kib", before}, {"rss_after_kib", rss_kib()}};
    }

    Tokens tokenize(const std::string & text) const {
        Tokens out(text.size() + 8);
        const int32_t n = llama_tokenize(vocab_, text.data(), static_cast<int32_t>(text.size()), out.data(), static_cast<int32_t>(out.size()), true, false);
        check(n > 0, "the text has no tokens");
        out.resize(static_cast<size_t>(n));
        return out;
    }
    std::string likeliest(const Tokens & prompt) {
        const int32_t row = read(prompt, 0, 0);
        const llama_token token = llama_sampler_sample(samplers("greedy", 1, 0)[0].get(), context_.get(), row);
        char piece[256];
        const int32_t n = llama_token_to_piece(vocab_, token, piece, sizeof piece, 0, true);
        return {piece, static_cast<size_t>(std::max(n, 0))};
    }

    void close() { rows_.reset(), context_.reset(), pool_.reset(), model_.reset(); }  // the context before its pool

private:
    struct Emptied {  // however an operation ends
        explicit Emptied(Control & control) : control_(control) { check(control.context_ != nullptr, "nothing is open"); }
        ~Emptied() { llama_memory_clear(llama_get_memory(control_.context_.get()), false); }
        Emptied(const Emptied &) = delete;
        Emptied & operator=(const Emptied &) = delete;
        Control & control_;
    };

    static Tokens tokens_of(const Json & a, const char * key) {
        Tokens out = a.at(key);
        check(!out.empty(), std::string(key) + " is empty");
        return out;
    }
    void decode() {
        const int32_t rc = llama_decode(context_.get(), rows_->raw());
        check(rc == 0, "llama_decode gave " + std::to_string(rc));
    }
    void fork(int32_t n) {
        check(n > 0 && static_cast<uint32_t>(n) < llama_n_seq_max(context_.get()), "more branches than the context has sequences");
        for (int32_t b = 1; b <= n; b++) llama_memory_seq_cp(llama_get_memory(context_.get()), 0, b, -1, -1);
    }
    // The engine's own chain for each branch, in its usual order. Tokens that end a text are banned as its ignore_eos does it.
    std::vector<Owned<llama_sampler>> samplers(const std::string & mode, int32_t n, uint32_t seed) const {
        std::vector<Owned<llama_sampler>> out;
        if (mode == "none") return out;
        check(mode == "greedy" || mode == "sampled", "no mode is called " + mode);
        for (int32_t b = 0; b < n; b++) {
            llama_sampler_chain_params p = llama_sampler_chain_default_params();
            p.no_perf = true;
            llama_sampler * chain = llama_sampler_chain_init(p);
            out.emplace_back(chain);
            llama_sampler_chain_add(chain, llama_sampler_init_logit_bias(llama_vocab_n_tokens(vocab_), static_cast<int32_t>(bans_.size()), bans_.data()));
            if (mode == "greedy") {
                llama_sampler_chain_add(chain, llama_sampler_init_greedy());
                continue;
            }
            llama_sampler_chain_add(chain, llama_sampler_init_top_k(40));
            llama_sampler_chain_add(chain, llama_sampler_init_top_p(0.95F, 0));
            llama_sampler_chain_add(chain, llama_sampler_init_min_p(0.05F, 0));
            llama_sampler_chain_add(chain, llama_sampler_init_temp(0.8F));
            llama_sampler_chain_add(chain, llama_sampler_init_dist(seed + static_cast<uint32_t>(b)));
        }
        return out;
    }

    Owned<llama_model> model_;
    Owned<ggml_threadpool> pool_;
    Owned<llama_context> context_;  // after the pool: it goes first
    std::unique_ptr<Rows> rows_;
    const llama_vocab * vocab_ = nullptr;
    std::vector<llama_logit_bias> bans_;
};

Json answer(Control & control, const std::string & line) {
    const Json a = Json::parse(line);
    const std::string op = a.at("op");
    if (op == "open") return control.open(a);
    if (op == "ticks") return control.ticks(a);
    if (op == "document") return control.document(a);
    if (op == "forks") return control.forks(a);
    if (op == "memory") return {{"peak_rss_kib", kib("/proc/self/status", "VmHWM:")}, {"rss_kib", rss_kib()}};
    if (op == "close") {
        control.close();
        return Json::object();
    }
    throw std::runtime_error("no operation is called " + op);
}

int first(const std::string & model, const std::string & file, int n_threads) {
    std::ifstream in(file, std::ios::binary);
    check(static_cast<bool>(in), file + " cannot be read");
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    Control control;
    control.load(model);
    const Tokens prompt = control.tokenize(text);
    control.start_context(static_cast<uint32_t>(prompt.size()) + 1, 2, 512, n_threads, true);
    std::printf("%s\n", control.likeliest(prompt).c_str());
    return 0;
}

}  // namespace

int main(int argc, char ** argv) try {
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR || level == GGML_LOG_LEVEL_WARN) std::fputs(text, stderr);
    }, nullptr);
    llama_backend_init();
    if (argc == 5 && std::string(argv[1]) == "first") return first(argv[2], argv[3], std::atoi(argv[4]));
    check(argc == 1, "usage: bench_control | bench_control first MODEL TEXT_FILE N_THREADS");
    std::cout << Json{{"runner", "control"}, {"versions", {{"llama.cpp", PYL_ENGINE_COMMIT}, {"cpu", PYL_CPU}, {"threads", PYL_THREADS}, {"attention", PYL_ENGINE_ATTENTION}}}} << std::endl;
    Control control;
    for (std::string line; std::getline(std::cin, line);) {
        try {
            std::cout << answer(control, line) << std::endl;
        } catch (const std::exception & error) {
            std::cout << Json{{"error", error.what()}} << std::endl;
        }
    }
    return 0;
} catch (const std::exception & error) {
    std::fprintf(stderr, "bench_control: %s\n", error.what());
    return 1;
}
