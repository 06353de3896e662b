// Little-endian bytes, written and read back: fixed-width numbers, strings and arrays with their length in front.
#pragma once

#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/error.hpp"

namespace pyl {

static_assert(std::endian::native == std::endian::little, "saved branches are little-endian, and written as they lie in memory");

class ByteWriter {
public:
    template <typename T>
        requires std::is_arithmetic_v<T>
    void put(T value) {
        bytes_.append(reinterpret_cast<const char *>(&value), sizeof value);
    }
    void put(std::string_view text) {
        put<uint64_t>(text.size());
        bytes_.append(text);
    }
    template <typename T>
    void put_all(const T * data, size_t n) {
        put<uint64_t>(n);
        bytes_.append(reinterpret_cast<const char *>(data), n * sizeof(T));
    }
    void reserve(size_t n) { bytes_.reserve(bytes_.size() + n); }
    std::string & bytes() { return bytes_; }

private:
    std::string bytes_;
};

// Never reads beyond its end: PYL_E_FORMAT instead.
class ByteReader {
public:
    explicit ByteReader(std::string_view bytes) : left_(bytes) {}

    template <typename T>
        requires std::is_arithmetic_v<T>
    T get() {
        T value;
        std::memcpy(&value, take(sizeof value).data(), sizeof value);
        return value;
    }
    std::string_view get_text() { return take(length(1)); }
    template <typename T>
    std::vector<T> get_all() {
        const size_t n = length(sizeof(T));
        std::vector<T> out(n);
        if (n) std::memcpy(out.data(), take(n * sizeof(T)).data(), n * sizeof(T));
        return out;
    }
    bool is_done() const { return left_.empty(); }

private:
    size_t length(size_t width) {
        const auto n = get<uint64_t>();
        if (n > left_.size() / width) throw Error(PYL_E_FORMAT, "a saved branch ends too early");
        return static_cast<size_t>(n);
    }
    std::string_view take(size_t n) {
        if (n > left_.size()) throw Error(PYL_E_FORMAT, "a saved branch ends too early");
        const std::string_view out = left_.substr(0, n);
        left_.remove_prefix(n);
        return out;
    }

    std::string_view left_;
};

// FNV-1a over words of eight bytes: finds damage, not malice.
inline uint64_t checksum(std::string_view bytes, uint64_t hash = 0xCBF29CE484222325ull) {
    size_t i = 0;
    for (; i + 8 <= bytes.size(); i += 8) {
        uint64_t word;
        std::memcpy(&word, bytes.data() + i, 8);
        hash = (hash ^ word) * 0x100000001B3ull;
        hash ^= hash >> 29;  // a product alone never carries a high bit down
    }
    for (; i < bytes.size(); i++) hash = (hash ^ static_cast<unsigned char>(bytes[i])) * 0x100000001B3ull;
    return hash;
}

}  // namespace pyl
