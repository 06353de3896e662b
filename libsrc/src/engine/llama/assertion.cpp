#include "engine/llama/assertion.hpp"

#include <cstdio>
#include <exception>
#include <string>
#include <string_view>

#include "ggml.h"

namespace pyl {

namespace {

thread_local bool is_watched = false;

// The callback runs inside ggml_abort, which is C. Compilers give C functions the tables an exception needs to pass them on every
// platform we build for (x86-64 and AArch64 demand them); that it does pass is what tests/aborts/test_hostile_models.py shows.
void on_abort(const char * message) {
    if (is_watched && std::uncaught_exceptions() == 0) {
        std::string_view words = message;
        if (const size_t at = words.find("src/"); at != std::string_view::npos) words.remove_prefix(at);  // not the folder it was built in
        throw EngineAssertion(std::string(words));
    }
    std::fprintf(stderr, "%s\n", message);
}

}  // namespace

AssertionScope::AssertionScope() : outer_(is_watched) { is_watched = true; }
AssertionScope::~AssertionScope() { is_watched = outer_; }

void watch_assertions() { ggml_set_abort_callback(on_abort); }

}  // namespace pyl
