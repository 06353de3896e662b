// Branches as bytes. Only a branch alone is ever saved, and only into an empty lease of its own is it loaded: nothing here can
// touch another branch. Grammars are saved as what they were made from and what they were fed, and made again by feeding it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/saved.hpp"
#include "core/store.hpp"

namespace pyl {

namespace {

void put_biases(ByteWriter & out, const Biases & biases) {
    out.put<uint64_t>(biases ? biases->size() : 0);
    if (!biases) return;
    for (const auto & [token, by] : *biases) out.put(token), out.put(by);
}

void put_sampling(ByteWriter & out, const Sampler & sampler) {
    const SamplingParams & p = sampler.params();
    for (const float value : {p.temperature, p.top_p, p.min_p, p.typical_p, p.penalty_repeat, p.penalty_frequency, p.penalty_presence}) out.put(value);
    out.put(p.top_k);
    out.put(p.penalty_last_n);
    out.put<uint8_t>(p.ignore_eog);
    out.put_all(sampler.history().data(), sampler.history().size());
}

SamplingParams get_sampling(ByteReader & in) {
    SamplingParams p;
    for (float * value : {&p.temperature, &p.top_p, &p.min_p, &p.typical_p, &p.penalty_repeat, &p.penalty_frequency, &p.penalty_presence}) *value = in.get<float>();
    p.top_k = in.get<int32_t>();
    p.penalty_last_n = in.get<int32_t>();
    p.ignore_eog = in.get<uint8_t>() != 0;
    p.validate();
    return p;
}

void put_metrics(ByteWriter & out, const pyl_metrics & m) {
    out.put(m.levels);
    out.put(m.n_tokens);
    out.put(m.n_inside);
    for (const double value : {m.model_surprisal, m.model_entropy, m.last_model_surprisal, m.last_model_entropy, m.sampling_surprisal, m.sampling_entropy, m.last_sampling_surprisal, m.last_sampling_entropy}) out.put(value);
}

pyl_metrics get_metrics(ByteReader & in) {
    pyl_metrics m = Branch{}.metrics;
    m.levels = in.get<int32_t>();
    m.n_tokens = in.get<uint64_t>();
    m.n_inside = in.get<uint64_t>();
    for (double * value : {&m.model_surprisal, &m.model_entropy, &m.last_model_surprisal, &m.last_model_entropy, &m.sampling_surprisal, &m.sampling_entropy, &m.last_sampling_surprisal, &m.last_sampling_entropy}) *value = in.get<double>();
    return m;
}

}  // namespace

std::string Store::save(pyl_branch branch, bool with_logits) {
    Branch & found = get_healthy(branch);
    const ModelIdentity identity = model_->identity();
    const bool logits_too = with_logits && found.logits.any();
    ByteWriter out;
    const std::string cells = found.cells_own + found.cells_inherited ? context_->seq_save(sequence_of(found)) : std::string();
    out.reserve(saved_prefix + cells.size() + (logits_too ? n_vocab_ * sizeof(float) : 0) + 4096);
    out.bytes().assign(saved_prefix, '\0');
    SavedHead{identity.engine, identity.name, identity.fingerprint, static_cast<int32_t>(n_vocab_), params_.type_k, params_.type_v, context_->flash_attn(), found.position,
              found.cells_own + found.cells_inherited, found.last_token, logits_too, found.grammar != nullptr, found.sampler.seed(), found.sampler.draws()}
        .write(out);
    out.put(found.start);
    put_sampling(out, found.sampler);
    put_biases(out, found.bias);
    put_biases(out, found.steer);
    put_metrics(out, found.metrics);
    if (found.grammar) {
        if (!found.grammar_source) throw Error(PYL_E_INTERNAL, "the branch has a grammar of unknown origin");
        out.put<uint8_t>(found.grammar_source->is_chat);
        out.put(found.grammar_source->text);
        out.put(found.grammar_source->root);
        out.put<uint8_t>(found.grammar_source->is_lazy);
        out.put(found.grammar_source->triggers);
        const std::vector<Token> taken = found.grammar_taken.tokens();
        out.put_all(taken.data(), taken.size());
    }
    out.put_all(logits_too ? logits(found) : nullptr, logits_too ? n_vocab_ : 0);
    out.put(cells);
    seal(out.bytes());
    return std::move(out.bytes());
}

pyl_branch Store::load(std::string_view bytes) {
    ByteReader in(checked_payload(bytes));
    const SavedHead head = SavedHead::read(in);
    const ModelIdentity here = model_->identity();
    const auto must_agree = [](bool same, const std::string & what, const std::string & saved, const std::string & own) {
        if (!same) throw Error(PYL_E_UNSUPPORTED, "saved with " + what + " " + saved + "; this store has " + own);
    };
    const auto kv = [](int32_t k, int32_t v) { return std::string(kv_name(k)) + "/" + kv_name(v); };
    const auto flash = [](int32_t value) { return value == PYL_FLASH_ATTN_ON ? std::string("on") : std::string("off"); };
    must_agree(head.engine == here.engine, "engine", head.engine, here.engine);
    must_agree(head.fingerprint == here.fingerprint && head.n_vocab == static_cast<int32_t>(n_vocab_), "model", head.model, head.model == here.name ? "another file of that name" : here.name);
    must_agree(head.type_k == params_.type_k && head.type_v == params_.type_v, "KV types", kv(head.type_k, head.type_v), kv(params_.type_k, params_.type_v));
    must_agree(head.flash_attn == context_->flash_attn(), "flash attention", flash(head.flash_attn), flash(context_->flash_attn()));
    const auto damaged = [](bool ok) {
        if (!ok) throw Error(PYL_E_FORMAT, "the saved branch holds a value that cannot be");
    };
    damaged(head.position >= 0 && head.position <= most_pos && head.last_token >= -1 && head.last_token < static_cast<Token>(n_vocab_));
    if (const int64_t last = int64_t{head.position} - head.cells + live_.n_ctx; last > most_pos) {  // as create() has it
        throw Error(PYL_E_UNSUPPORTED, "the saved branch stands at position " + std::to_string(head.position) + ", and in this store of " + std::to_string(live_.n_ctx) + " cells could get beyond " + std::to_string(most_pos));
    }
    need_cells(head.cells);
    need_leases(1);

    // All that can fail is done on a branch that is in no store yet.
    Branch made;
    made.start = in.get<Pos>();
    damaged(made.start >= 0 && made.start <= head.position);
    const auto as_format = [](auto && read) {  // what is an invalid argument elsewhere is a wrong value in a file here
        try {
            read();
        } catch (Error & error) {
            if (error.code == PYL_E_INVALID || error.code == PYL_E_GRAMMAR) error.code = PYL_E_FORMAT;
            throw;
        }
    };
    as_format([&] { made.sampler.set_params(get_sampling(in)); });
    const auto token_list = [&] {
        auto tokens = in.get_all<Token>();
        for (const Token token : tokens) damaged(token >= 0 && static_cast<size_t>(token) < n_vocab_);
        return tokens;
    };
    made.sampler.restore(head.seed, head.draws, token_list());
    for (Biases * biases : {&made.bias, &made.steer}) {
        const auto n = in.get<uint64_t>();
        std::vector<std::pair<Token, float>> pairs;
        for (uint64_t i = 0; i < n; i++) {
            const auto token = in.get<Token>();
            const auto by = in.get<float>();
            damaged(token >= 0 && static_cast<size_t>(token) < n_vocab_ && by < std::numeric_limits<float>::infinity());
            pairs.emplace_back(token, by);
        }
        if (n) *biases = std::make_shared<const std::vector<std::pair<Token, float>>>(std::move(pairs));
    }
    made.metrics = get_metrics(in);
    damaged((made.metrics.levels & ~(PYL_METRICS_MODEL | PYL_METRICS_SAMPLING)) == 0 && made.metrics.n_inside <= made.metrics.n_tokens);
    if (head.has_grammar) {
        GrammarSource source{in.get<uint8_t>() != 0, std::string(in.get_text()), std::string(in.get_text())};
        source.is_lazy = in.get<uint8_t>() != 0;
        source.triggers = in.get_text();
        const std::vector<Token> taken = token_list();
        as_format([&] { constrain(made, std::move(source), taken); });
        damaged(made.grammar != nullptr);
    }
    auto row = in.get_all<float>();
    damaged(row.size() == (head.has_logits ? n_vocab_ : 0));
    if (head.has_logits) made.logits.copy = std::make_shared<const std::vector<float>>(std::move(row));
    const std::string_view cells = in.get_text();
    damaged(in.is_done() && cells.empty() == (head.cells == 0));

    if (head.cells) context_->seq_load(free_seqs_.back(), cells);  // empty, and empty again if this fails
    const uint32_t slot = take_slot();
    Branch & branch = slots_[slot];
    branch.position = head.position;
    branch.start = made.start;
    branch.cells_own = head.cells;
    cells_used_ += head.cells;
    branch.last_token = head.last_token;
    branch.logits = std::move(made.logits);
    branch.sampler = std::move(made.sampler);
    branch.grammar = std::move(made.grammar);
    branch.grammar_source = std::move(made.grammar_source);
    branch.grammar_taken = std::move(made.grammar_taken);
    branch.bias = std::move(made.bias);
    branch.steer = std::move(made.steer);
    branch.metrics = made.metrics;
    epoch_++;
    return handle(slot);
}

}  // namespace pyl
