// Numbers of a file the engine divides by without a look: a zero there is a signal no C++ code can catch (SIGFPE), so they are read
// before it does. The header is walked, no string of it kept: tens of milliseconds for the largest vocabularies.
#include <array>
#include <cstdint>
#include <fstream>

#include "core/registry.hpp"
#include "engine/llama/llama_parts.hpp"

namespace pyl {

namespace {

// What loaders take for the distance between full-attention layers (src/models/qwen35.cpp, qwen3next.cpp, minimax-01.cpp and their kin).
constexpr std::array<std::string_view, 1> divisors{".full_attention_interval"};

class Walk {
public:
    explicit Walk(const std::string & path) : file_(path_of(path), std::ios::binary) {}

    template <class T>
    T number() {
        T value{};
        file_.read(reinterpret_cast<char *>(&value), sizeof value);
        return value;
    }
    std::string text() {
        const auto n = number<uint64_t>();
        std::string out(n < 1024 ? n : 0, '\0');
        file_.read(out.data(), static_cast<std::streamsize>(out.size()));
        if (out.size() < n) skip(n - out.size());
        return out;
    }
    void skip(uint64_t n) {
        if (n > INT64_MAX / 2) file_.setstate(std::ios::failbit);
        else if (n < 4096) file_.ignore(static_cast<std::streamsize>(n));  // a seek throws away what was read ahead
        else file_.seekg(static_cast<std::streamoff>(n), std::ios::cur);
    }
    bool is_good() const { return file_.good(); }

private:
    std::ifstream file_;
};

// Bytes of a GGUF value of one of the fixed sizes; 0 for the others.
uint64_t size_of(uint32_t type) {
    constexpr std::array<uint64_t, 13> sizes{1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < sizes.size() ? sizes[type] : 0;
}

}  // namespace

// A file that cannot be walked is left to the engine, which says what is wrong with it.
void check_divisors(const std::string & path) {
    Walk walk(path);
    walk.skip(4);
    const auto version = walk.number<uint32_t>();
    walk.skip(8);
    const auto n = walk.number<uint64_t>();
    if (version < 2 || version > 3) return;
    for (uint64_t i = 0; i < n && walk.is_good(); i++) {
        const std::string key = walk.text();
        const auto type = walk.number<uint32_t>();
        if (type == 8) {
            walk.skip(walk.number<uint64_t>());
        } else if (type == 9) {
            const auto inner = walk.number<uint32_t>();
            const auto length = walk.number<uint64_t>();
            if (inner != 8) walk.skip(length < INT64_MAX / 16 ? length * size_of(inner) : UINT64_MAX);
            for (uint64_t k = 0; inner == 8 && k < length && walk.is_good(); k++) walk.skip(walk.number<uint64_t>());
        } else if (size_of(type) == 4) {
            const auto value = walk.number<uint32_t>();
            for (const std::string_view name : divisors) {
                if (value == 0 && walk.is_good() && key.ends_with(name)) throw Error(PYL_E_FORMAT, path + ": " + key + " is 0, and the engine divides by it");
            }
        } else {
            walk.skip(size_of(type));
        }
    }
}

}  // namespace pyl
