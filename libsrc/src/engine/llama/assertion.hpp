// What the engine asserts about a file ends the process: GGML_ASSERT says a word and aborts. While an AssertionScope is alive, an
// assertion on its thread is thrown instead, and the engine's own catch blocks make an error of it like any other.
//
// For loading and laying out alone, where everything that is left behind is owned by C++ objects. Not for decoding: other threads
// compute there, whose assertions nobody could catch.
#pragma once

#include <stdexcept>

namespace pyl {

class EngineAssertion : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

class AssertionScope {
public:
    AssertionScope();
    ~AssertionScope();
    AssertionScope(const AssertionScope &) = delete;
    AssertionScope & operator=(const AssertionScope &) = delete;

private:
    bool outer_;
};

void watch_assertions();  // once, before the first scope

}  // namespace pyl
