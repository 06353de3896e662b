// The one exception of the kernel: a code of pylloyal.h, the state after, and the live numbers that produced it.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "pylloyal.h"

namespace pyl {

struct Error : std::exception {
    int32_t code;
    int32_t state = PYL_STATE_UNCHANGED;
    int32_t engine_rc = 0;
    bool partial = false;
    int32_t index = -1;
    int64_t need = -1;
    int64_t have = -1;
    std::string message;

    Error(int32_t code_, std::string message_) : code(code_), message(std::move(message_)) {}
    Error && at(size_t i) && { index = static_cast<int32_t>(i); return std::move(*this); }
    Error && numbers(int64_t need_, int64_t have_) && { need = need_; have = have_; return std::move(*this); }
    Error && from_engine(int32_t rc) && { engine_rc = rc; return std::move(*this); }
    const char * what() const noexcept override { return message.c_str(); }
};

}  // namespace pyl
