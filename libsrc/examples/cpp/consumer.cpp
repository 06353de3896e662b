// As ../c/consumer.c, with pylloyal.hpp: nothing is freed by hand, and what is refused arrives as a typed exception.
//   consumer MODEL.gguf MMPROJ.gguf
#include <array>
#include <cstdio>
#include <cstring>
#include <pylloyal.hpp>

using namespace pylloyal;

static const char * const question = "<|im_start|>user\nWhat colour is the shape?<|im_end|>\n<|im_start|>assistant\n";

static pyl_sampling sampling_of(float temperature) {
    pyl_sampling s = sampling();
    s.temperature = temperature, s.top_k = 0, s.top_p = 1, s.min_p = 0;
    return s;
}

static void print(const char * name, const Said & said, const Model * model = nullptr) {
    std::printf("%s", name);
    if (model) std::printf(" '%s'", model->detokenize(said.tokens.data(), said.tokens.size()).c_str());
    for (const int32_t token : said.tokens) std::printf(" %d", static_cast<int>(token));
    if (said.finish == PYL_FINISH_EOG) std::printf(" end");
    std::printf("\n");
}

static void fork_a_prompt(const Model & model, Store & store) {
    Branch root = store.root(sampling_of(4));
    root.prefill(model.tokenize(question, PYL_TOKENIZE_PARSE_SPECIAL));
    const std::vector<Branch> forks = root.fork(std::vector<uint64_t>{1, 2, 3});
    std::vector<Branch> most_likely = root.fork(1);
    most_likely[0].set_sampling(sampling_of(0));
    print("greedy", store.tick(most_likely, 8)[0]);
    const std::vector<Said> said = store.tick(forks, 8);
    for (size_t i = 0; i < said.size(); i++) print(("sampled " + std::to_string(i + 1)).c_str(), said[i]);
}

static void question_a_picture(const Model & model, const Projector & projector, Branch & root, Store & store) {
    constexpr size_t side = 48;
    std::vector<uint8_t> rgb(side * side * 3, 245);  // a blue square at the top right, on white
    for (size_t y = 2; y < 14; y++) {
        for (size_t x = 34; x < 46; x++) std::memcpy(&rgb[(y * side + x) * 3], std::array<uint8_t, 3>{50, 80, 220}.data(), 3);
    }
    const std::string before = "<|im_start|>user\n";
    auto words = sized<pyl_part>(), picture = sized<pyl_part>();
    words.kind = PYL_PART_TEXT, words.text = before.data(), words.n = before.size(), words.flags = PYL_TOKENIZE_PARSE_SPECIAL;
    picture.kind = PYL_PART_IMAGE, picture.rgb = rgb.data(), picture.width = picture.height = side;
    const Prompt prompt(model, &projector, {words, picture});
    std::printf("picture %u cells %u positions\n", static_cast<unsigned>(prompt.quote().n_cells), static_cast<unsigned>(prompt.quote().n_pos));
    root.prefill(prompt);
    std::vector<Branch> forks = root.fork(2);
    forks[0].prefill(model.tokenize("What colour is the shape?<|im_end|>\n<|im_start|>assistant\n", PYL_TOKENIZE_PARSE_SPECIAL));
    forks[1].prefill(model.tokenize("Where is the shape?<|im_end|>\n<|im_start|>assistant\n", PYL_TOKENIZE_PARSE_SPECIAL));
    const std::vector<Said> said = store.tick(forks, 8);
    print("colour", said[0], &model);
    print("where", said[1], &model);
}

static void refuse_a_plan(const char * path) {
    constexpr long long allowed = 64 << 20;
    pyl_store_params params = store_params();
    params.n_ctx = 1 << 20;
    const std::string told = dry_run(path, params);
    const long long need = std::stoll(told.substr(told.find("\"context_bytes\":") + 16));
    std::printf("plan %s: %lld bytes of cells, %lld allowed\n", need > allowed ? "refused" : "taken", need, allowed);
}

static void refuse_a_decode(Store & store) {
    Branch root = store.root(sampling_of(0));
    const uint32_t used = store.pressure().cells_used;
    try {
        root.prefill(std::vector<int32_t>(600));
    } catch (const ContextFull & e) {
        std::printf("decode refused: code %d state %d need %lld have %lld\n", static_cast<int>(e.code), static_cast<int>(e.state), static_cast<long long>(e.need), static_cast<long long>(e.have));
        if (e.state != State::unchanged || store.pressure().cells_used != used || store.pressure().cells_remaining != e.have) std::printf("which is not so\n");
    }
}

static void run(const char * model_path, const char * mmproj_path) {
    pyl_store_params params = store_params();
    pyl_projector_params encoder = projector_params();
    params.n_ctx = 512, params.n_branches = 8, params.n_threads = 1, encoder.n_threads = 1;
    const Model model(model_path);
    const Projector projector(model, mmproj_path, encoder);
    Store store(model, params);
    fork_a_prompt(model, store);
    Branch root = store.root(sampling_of(0));  // kept: its cells are what is missing when the decode below is refused
    question_a_picture(model, projector, root, store);
    refuse_a_plan(model_path);
    refuse_a_decode(store);
}

int main(int argc, char ** argv) {
    if (argc != 3) return std::fprintf(stderr, "consumer MODEL.gguf MMPROJ.gguf\n"), 2;
    try {
        check_abi();
        run(argv[1], argv[2]);
    } catch (const Error & e) {
        std::fprintf(stderr, "code %d, state %d, need %lld, have %lld: %s\n", static_cast<int>(e.code), static_cast<int>(e.state), static_cast<long long>(e.need), static_cast<long long>(e.have), e.what());
        return 1;
    } catch (const std::exception & e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
    const pyl_live live = live_objects();
    const unsigned left = live.models + live.weights + live.stores + live.contexts + live.branches + live.grammars + live.texts + live.embedders + live.projectors + live.prompts;
    std::printf("left behind: %u\n", left);
    return left ? 1 : 0;
}
