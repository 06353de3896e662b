#include <algorithm>

#include "abi/guard.hpp"
#include "abi/handles.hpp"
#include "core/cpu.hpp"
#include "core/memory.hpp"
#include "core/saved.hpp"

namespace pyl {

static std::string_view bytes_of(const uint8_t * data, size_t n) {
    need(data != nullptr || n == 0, "the bytes are NULL");
    return {reinterpret_cast<const char *>(data), n};
}

static HandleTable<Store, pyl_store> & stores() {
    static auto * table = new HandleTable<Store, pyl_store>("store");  // never destroyed: a thread may still call at exit
    return *table;
}

std::shared_ptr<Store> store_of(const pyl_store * handle) { return stores().find(handle); }

size_t live_models();
size_t live_handles(bool of_stores);
size_t live_handles(bool of_stores) { return of_stores ? stores().size() : live_models(); }

static SamplingParams sampling_of(const pyl_sampling & s) {
    const SamplingParams params{s.temperature, s.top_k, s.top_p, s.min_p, s.typical_p, s.penalty_repeat, s.penalty_frequency, s.penalty_presence, s.penalty_last_n, s.ignore_eog != 0};
    params.validate();
    need(s.seed_mode >= PYL_SEED_KEEP && s.seed_mode <= PYL_SEED_RESTART, "seed_mode is none of PYL_SEED_*");
    return params;
}

static ContextParams context_params_of(const pyl_store_params & p, const pyl_model_info & info) {
    ContextParams out{};
    out.n_ctx = p.n_ctx ? p.n_ctx : static_cast<uint32_t>(std::max(0, info.n_ctx_train));
    out.n_seq_max = p.n_branches ? p.n_branches : 8;
    out.n_batch = p.n_batch ? p.n_batch : 512;
    out.n_threads = p.n_threads ? p.n_threads : usable_cores();
    out.flash_attn = p.flash_attn;
    out.type_k = p.type_k;
    out.type_v = p.type_v;
    out.swa_full = p.swa_full != 0 || info.n_swa <= 0;
    out.deterministic = p.deterministic != 0;
    out.n_ubatch = p.n_ubatch ? p.n_ubatch : out.n_batch;
    out.n_rs_seq = p.n_rs_seq;
    out.n_outputs = p.n_outputs ? p.n_outputs : out.n_seq_max;
    out.kv_unified = p.kv_unified != 0;
    out.offload_kqv = p.offload_kqv != 0;
    out.op_offload = p.op_offload != 0;
    need(out.n_ctx > 0 && out.n_ctx <= INT32_MAX, "n_ctx must be in 1..2147483647 (the model declares no context to take instead)");
    need(out.n_seq_max <= 256, "n_branches must be in 1..256");
    need(out.n_batch <= 65536, "n_batch must be at most 65536");
    need(out.n_threads <= 512, "n_threads must be at most 512");
    need(p.flash_attn >= PYL_FLASH_ATTN_AUTO && p.flash_attn <= PYL_FLASH_ATTN_OFF, "flash_attn is none of PYL_FLASH_ATTN_*");
    for (const int32_t type : {p.type_k, p.type_v}) need(type >= PYL_KV_F16 && type <= PYL_KV_IQ4_NL, "a KV type is none of PYL_KV_*");
    need(p.type_v < PYL_KV_Q8_0 || p.flash_attn != PYL_FLASH_ATTN_OFF, "a quantised V cache needs flash attention");
    if (out.n_batch < out.n_seq_max) throw Error(PYL_E_INVALID, "n_batch is smaller than n_branches: one tick must fit one dispatch").numbers(out.n_seq_max, out.n_batch);
    if (out.n_ubatch > out.n_batch || out.n_ubatch < out.n_seq_max) throw Error(PYL_E_INVALID, "n_ubatch must be in n_branches..n_batch").numbers(out.n_ubatch, out.n_batch);
    if (out.n_outputs > out.n_batch || out.n_outputs < out.n_seq_max) throw Error(PYL_E_INVALID, "n_outputs must be in n_branches..n_batch").numbers(out.n_outputs, out.n_batch);
    need(out.n_rs_seq <= 64, "n_rs_seq must be at most 64");
    return out;
}

}  // namespace pyl

using namespace pyl;

void pyl_store_params_init(pyl_store_params * params, uint32_t struct_size) {
    init_struct(params, struct_size, {sizeof(pyl_store_params), 0, 0, 0, 0, PYL_FLASH_ATTN_AUTO, PYL_KV_F16, PYL_KV_F16, 1, 0, 0, 0, 0, 1, 1, 1});
}

static pyl_store_params store_params_of(const pyl_store_params * given) {
    pyl_store_params p;
    pyl_store_params_init(&p, sizeof p);
    return given ? read_struct(given, p) : p;
}

int32_t pyl_store_open(pyl_store ** out, const pyl_model * model, const pyl_store_params * params) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        const auto found = model_of(model);
        const pyl_store_params p = store_params_of(params);
        *out = stores().add(std::make_shared<Store>(found, context_params_of(p, found->info())));
    });
}

int32_t pyl_store_free(pyl_store * store) {
    return guarded([&] { stores().remove(store)->drain(); });
}

int32_t pyl_store_drain(pyl_store * store) {
    return guarded([&] { store_of(store)->drain(); });
}

int32_t pyl_store_cancel(pyl_store * store) {
    return guarded([&] { store_of(store)->cancel(); });
}

int32_t pyl_store_pressure(const pyl_store * store, pyl_pressure * out) {
    return guarded([&] { write_struct(out, store_of(store)->pressure()); });
}

int32_t pyl_store_memory(pyl_store * store, pyl_text ** out) {
    return in_store(store, [&](Store & s) {
        need(out != nullptr, "out is NULL");
        *out = new_text(memory_json(s.memory(), false));
    });
}

int32_t pyl_dry_run(pyl_text ** out, const char * path, size_t n_path, const pyl_model_params * model_params, const pyl_store_params * store_params) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        const std::string file = path_text(path, n_path);
        const ModelParams m = model_params_of(model_params);
        const pyl_store_params p = store_params_of(store_params);
        *out = new_text(memory_json(engine_for(file).dry_run(file, m, [&](const pyl_model_info & info) { return context_params_of(p, info); }), true));
    });
}

uint64_t pyl_store_epoch(const pyl_store * store) {
    uint64_t epoch = 0;
    guarded([&] { epoch = store_of(store)->epoch(); });
    return epoch;
}

void pyl_sampling_init(pyl_sampling * sampling, uint32_t struct_size) {
    const SamplingParams d;
    init_struct(sampling, struct_size, {sizeof(pyl_sampling), d.temperature, d.top_k, d.top_p, d.min_p, d.typical_p, d.penalty_repeat, d.penalty_frequency, d.penalty_presence, d.penalty_last_n, PYL_SEED_KEEP, 0, d.ignore_eog});
}

int32_t pyl_branch_set_sampling(pyl_store * store, pyl_branch branch, const pyl_sampling * sampling) {
    return in_store(store, [&](Store & s) {
        pyl_sampling defaults;
        pyl_sampling_init(&defaults, sizeof defaults);
        const pyl_sampling given = read_struct(sampling, defaults);
        const SamplingParams params = sampling_of(given);
        Sampler & sampler = s.get_healthy(branch).sampler;
        sampler.set_params(params);
        if (given.seed_mode == PYL_SEED_RESTART || (given.seed_mode == PYL_SEED_SET && given.seed != sampler.seed())) sampler.reseed(given.seed);
    });
}

int32_t pyl_branch_get_sampling(pyl_store * store, pyl_branch branch, pyl_sampling * out) {
    return in_store(store, [&](Store & s) {
        const Sampler & sampler = s.get(branch).sampler;
        const SamplingParams & p = sampler.params();
        write_struct(out, {sizeof(pyl_sampling), p.temperature, p.top_k, p.top_p, p.min_p, p.typical_p, p.penalty_repeat, p.penalty_frequency, p.penalty_presence, p.penalty_last_n, PYL_SEED_SET, sampler.seed(), p.ignore_eog});
    });
}

static GrammarSource grammar_of(const pyl_grammar * given) {
    if (!given) return {};
    const pyl_grammar g = read_struct(given, pyl_grammar{sizeof(pyl_grammar), PYL_GRAMMAR_GBNF, nullptr, 0, nullptr, nullptr, 0});
    need(g.kind == PYL_GRAMMAR_GBNF || g.kind == PYL_GRAMMAR_CHAT, "kind is none of PYL_GRAMMAR_*");
    need(g.text != nullptr || g.n_text == 0, "the grammar is NULL");
    need(g.triggers != nullptr || g.n_triggers == 0, "the triggers are NULL");
    need(g.kind == PYL_GRAMMAR_GBNF || (!g.root && !g.triggers), "the conversation says itself where its grammar begins and what wakes it");
    GrammarSource source{g.kind == PYL_GRAMMAR_CHAT, g.n_text ? std::string(g.text, g.n_text) : std::string(), g.root ? g.root : "root"};
    source.is_lazy = g.triggers != nullptr;
    if (g.triggers) source.triggers.assign(g.triggers, g.n_triggers);
    return source;
}

int32_t pyl_branch_set_grammar(pyl_store * store, pyl_branch branch, const pyl_grammar * grammar) {
    return in_store(store, [&](Store & s) { s.set_grammar(branch, grammar_of(grammar)); });
}

int32_t pyl_branch_create(pyl_store * store, pyl_branch * out, int32_t start_pos, const pyl_sampling * sampling, const pyl_grammar * grammar) {
    return in_store(store, [&](Store & s) {
        need(out != nullptr, "out is NULL");
        pyl_sampling given;
        pyl_sampling_init(&given, sizeof given);
        if (sampling) given = read_struct(sampling, given);
        const SamplingParams params = sampling_of(given);
        *out = s.create(start_pos, params, given.seed_mode == PYL_SEED_KEEP ? random_seed() : given.seed, grammar_of(grammar));
    });
}

int32_t pyl_branch_fork_n(pyl_store * store, pyl_branch source, pyl_branch * out, size_t n, const uint64_t * seeds, uint32_t flags) {
    return in_store(store, [&](Store & s) {
        need((flags & ~PYL_FORK_WITHOUT_LOGITS) == 0, "flags is none of PYL_FORK_*");
        s.fork(source, span_of(out, n), seeds, (flags & PYL_FORK_WITHOUT_LOGITS) == 0);
    });
}

int32_t pyl_branch_prune_n(pyl_store * store, const pyl_branch * branches, size_t n) {
    return in_store(store, [&](Store & s) { s.prune(span_of(branches, n)); });
}

int32_t pyl_branch_prune_subtree(pyl_store * store, pyl_branch branch) {
    return in_store(store, [&](Store & s) { s.prune_subtree(branch); });
}

int32_t pyl_branch_retain_only(pyl_store * store, pyl_branch branch) {
    return in_store(store, [&](Store & s) { s.retain_only(branch); });
}

int32_t pyl_branch_fast_forward(pyl_store * store, pyl_branch parent, pyl_branch child) {
    return in_store(store, [&](Store & s) { s.fast_forward(parent, child); });
}

int32_t pyl_branch_reseed_kv(pyl_store * store, pyl_branch branch, const int32_t * tokens, size_t n_tokens, uint32_t * n_landed) {
    return in_store(store, [&](Store & s) {
        uint32_t ignored = 0;
        s.reseed_kv(branch, span_of(tokens, n_tokens), n_landed ? *n_landed : ignored);
    });
}

int32_t pyl_branch_save(pyl_store * store, pyl_branch branch, uint32_t flags, pyl_text ** out) {
    return in_store(store, [&](Store & s) {
        need(out != nullptr, "out is NULL");
        need((flags & ~PYL_SAVE_LOGITS) == 0, "flags is none of PYL_SAVE_*");
        *out = new_text(s.save(branch, (flags & PYL_SAVE_LOGITS) != 0));
    });
}

int32_t pyl_branch_load(pyl_store * store, pyl_branch * out, const uint8_t * data, size_t n_data) {
    return in_store(store, [&](Store & s) {
        need(out != nullptr, "out is NULL");
        *out = s.load(bytes_of(data, n_data));
    });
}

int32_t pyl_saved_describe(const uint8_t * data, size_t n_data, pyl_text ** out) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        ByteReader in(checked_payload(bytes_of(data, n_data)));
        *out = new_text(SavedHead::read(in).json(n_data));
    });
}

int32_t pyl_branch_set_metrics(pyl_store * store, pyl_branch branch, int32_t levels) {
    return in_store(store, [&](Store & s) { s.set_metrics(branch, levels); });
}

int32_t pyl_branch_get_metrics(pyl_store * store, pyl_branch branch, pyl_metrics * out) {
    return in_store(store, [&](Store & s) { write_struct(out, s.get(branch).metrics); });
}

int32_t pyl_branch_logits_at(pyl_store * store, pyl_branch branch, const int32_t * tokens, size_t n, float * logits) {
    return in_store(store, [&](Store & s) { s.logits_at(branch, span_of(tokens, n), span_of(logits, n).data()); });
}

int32_t pyl_branch_priors(pyl_store * store, pyl_branch branch, int32_t * tokens, float * log_probs, size_t capacity, size_t * n, size_t * n_legal) {
    return in_store(store, [&](Store & s) {
        need(n != nullptr, "n is NULL");
        const Store::Priors found = s.priors(branch, span_of(tokens, capacity), span_of(log_probs, capacity).data());
        *n = found.n;
        if (n_legal) *n_legal = found.n_legal;
    });
}

int32_t pyl_score_n(pyl_store * store, pyl_branch source, const int32_t * tokens, const uint32_t * lengths, size_t n_prompts, const int32_t * ids, size_t n_ids, float * out) {
    return in_store(store, [&](Store & s) {
        const auto prompts = split(tokens, lengths, n_prompts);
        need(out != nullptr || n_prompts == 0, "an output is NULL");
        s.score(source, prompts, span_of(ids, n_ids), out);
    });
}

int32_t pyl_branch_set_bias(pyl_store * store, pyl_branch branch, int32_t kind, const int32_t * tokens, const float * bias, size_t n) {
    return in_store(store, [&](Store & s) {
        need(kind == PYL_BIAS || kind == PYL_STEER, "kind is neither PYL_BIAS nor PYL_STEER");
        s.set_bias(branch, kind, span_of(tokens, n), span_of(bias, n).data());
    });
}

int32_t pyl_branch_set_logits(pyl_store * store, pyl_branch branch, const float * logits, size_t n) {
    return in_store(store, [&](Store & s) { s.set_logits(branch, span_of(logits, n)); });
}

int32_t pyl_branch_merge_logits(pyl_store * store, pyl_branch branch, const pyl_branch * experts, size_t n, float alpha) {
    return in_store(store, [&](Store & s) { s.merge_logits(branch, span_of(experts, n), alpha); });
}

int32_t pyl_branch_legal_n(pyl_store * store, pyl_branch branch, const int32_t * tokens, size_t n, uint8_t * legal) {
    return in_store(store, [&](Store & s) { s.legal(branch, span_of(tokens, n), span_of(legal, n).data()); });
}

int32_t pyl_branch_distribution(pyl_store * store, pyl_branch branch, pyl_distribution * out) {
    return in_store(store, [&](Store & s) { write_struct(out, s.distribution(branch)); });
}

int32_t pyl_branch_describe(pyl_store * store, pyl_branch branch, pyl_branch_info * out) {
    return in_store(store, [&](Store & s) {
        const Branch & b = s.get(branch);
        write_struct(out, {sizeof(pyl_branch_info), b.position, b.cells_own, b.cells_inherited, s.handle_of(b.parent), static_cast<uint32_t>(b.children.size()), b.logits.any(), b.is_poisoned, b.last_token,
                           b.grammar != nullptr, b.sampler.draws(), static_cast<int32_t>(b.cells_own + b.cells_inherited) - (b.position - b.start), 0});
    });
}

int32_t pyl_branch_list(pyl_store * store, pyl_branch children_of, pyl_branch * out, size_t capacity, size_t * n) {
    return in_store(store, [&](Store & s) {
        need(n != nullptr && (out != nullptr || capacity == 0), "an output is NULL");
        const std::vector<pyl_branch> found = s.list(children_of);
        *n = found.size();
        if (found.size() > capacity) throw Error(PYL_E_INVALID, "the branch buffer is too small").numbers(static_cast<int64_t>(found.size()), static_cast<int64_t>(capacity));
        std::copy(found.begin(), found.end(), out);
    });
}

static std::span<pyl_run> with_tokens(std::span<pyl_run> runs) {
    for (const pyl_run & run : runs) need(run.tokens != nullptr || run.n_tokens == 0, "a run has no tokens");
    return runs;
}

int32_t pyl_prefill_n(pyl_store * store, pyl_run * runs, size_t n_runs, uint32_t max_dispatches, uint32_t * n_dispatches) {
    return in_store(store, [&](Store & s) {
        const Structs<pyl_run> given(runs, n_runs);
        const auto all = with_tokens(given.items());
        uint32_t ignored = 0;
        s.prefill(all, max_dispatches, n_dispatches ? *n_dispatches : ignored);
    });
}

int32_t pyl_decode_prompts_n(pyl_store * store, pyl_item * items, size_t n_items) {
    return in_store(store, [&](Store & s) {
        const Structs<pyl_item> given(items, n_items);
        const auto all = given.items();
        std::vector<PromptItem> work;
        for (pyl_item & item : all) {
            work.push_back({item.branch, prompt_of(item.prompt), 0, 0, std::nullopt});
        }
        s.decode_prompts(work);
        size_t first = SIZE_MAX;  // nothing from here on may fail: branches have moved, and every item has to say so
        bool landed_any = false;
        for (size_t i = 0; i < all.size(); i++) {
            pyl_item & item = all[i];
            const PromptItem & done = work[i];
            item.code = done.error ? done.error->code : PYL_OK;
            item.state = done.error ? done.error->state : PYL_STATE_ADVANCED;
            item.engine_rc = done.error ? done.error->engine_rc : 0;
            item.n_segments_landed = done.n_segments_landed;
            item.n_cells_landed = done.n_cells_landed;
            item.message = nullptr;
            landed_any |= done.n_cells_landed > 0;
            if (done.error) first = std::min(first, i);
        }
        if (first == SIZE_MAX) return;
        for (size_t i = 0; i < all.size(); i++) {
            try {
                if (work[i].error) all[i].message = new_text(work[i].error->message);
            } catch (const std::bad_alloc &) {  // then without words
            }
        }
        Error error = std::move(*work[first].error);
        error.index = static_cast<int32_t>(first);
        error.partial = landed_any;
        throw error;
    });
}

int32_t pyl_sample_n(pyl_store * store, const pyl_branch * branches, size_t n, int32_t * tokens) {
    return in_store(store, [&](Store & s) { s.sample(span_of(branches, n), span_of(tokens, n).data()); });
}

int32_t pyl_commit_n(pyl_store * store, const pyl_branch * branches, const int32_t * tokens, size_t n) {
    return in_store(store, [&](Store & s) { s.commit(span_of(branches, n), span_of(tokens, n).data()); });
}

int32_t pyl_tick_n(pyl_store * store, pyl_tick * tick, pyl_lane * lanes, size_t n_lanes, int32_t * tokens) {
    return in_store(store, [&](Store & s) {
        const Structs<pyl_tick> ticks(tick, 1);
        const Structs<pyl_lane> given(lanes, n_lanes);
        pyl_tick & t = ticks.items().front();
        need(t.stop_tokens != nullptr || t.n_stop_tokens == 0, "stop_tokens is NULL");
        const Structs<pyl_run> runs(t.runs, t.n_runs, n_lanes);
        const struct Lent {  // the runs where the kernel reads them; the caller's pointer comes back whatever happens
            pyl_tick & tick;
            pyl_run * const was = tick.runs;
            ~Lent() { tick.runs = was; }
        } lent{t};
        t.runs = with_tokens(runs.items()).data();
        s.tick(t, given.items(), span_of(tokens, n_lanes).data());
    });
}

int32_t pyl_branch_logits(pyl_store * store, pyl_branch branch, pyl_logits_view * out) {
    return in_store(store, [&](Store & s) { write_struct(out, {sizeof(pyl_logits_view), static_cast<uint32_t>(s.n_vocab()), s.logits(s.get_healthy(branch)), s.epoch()}); });
}
