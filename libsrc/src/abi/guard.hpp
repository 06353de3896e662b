// The one exception barrier: every exported function that can fail runs its body through guarded().
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/store.hpp"

struct pyl_text {
    std::string bytes;
};

namespace pyl {

// Keeps the failure for pyl_error_last() and returns its code. Never throws.
int32_t remember(const Error & error) noexcept;
int32_t remember_out_of_memory() noexcept;

template <typename Body>
int32_t guarded(Body && body) noexcept {
    try {
        std::forward<Body>(body)();
        return PYL_OK;
    } catch (const Error & error) {
        return remember(error);
    } catch (const std::bad_alloc &) {
        return remember_out_of_memory();
    } catch (const std::exception & error) {
        return remember(Error(PYL_E_INTERNAL, error.what()));
    } catch (...) {
        return remember(Error(PYL_E_INTERNAL, "something that is not an exception was thrown"));
    }
}

inline void need(bool ok, const char * message) {
    if (!ok) throw Error(PYL_E_INVALID, message);
}

// Structs are read and written only as far as the caller's struct_size says, so older callers keep working.
// What an older caller does not know keeps its default.
template <typename T>
uint32_t known_size(const T * given) {
    need(given != nullptr, "a struct pointer is NULL");
    const uint32_t size = given->struct_size;
    if (size < sizeof(uint32_t) || size > sizeof(T)) throw Error(PYL_E_INVALID, "struct_size is not set, or larger than this library knows: it is older than the header of its caller").numbers(size, sizeof(T));
    return size;
}

template <typename T>
T read_struct(const T * given, T out) {
    const uint32_t size = known_size(given);
    const auto * from = reinterpret_cast<const char *>(given);
    std::copy(from, from + size, reinterpret_cast<char *>(&out));
    return out;
}

template <typename T>
void write_struct(T * out, T value) {
    const uint32_t size = known_size(out);
    value.struct_size = size;
#if defined(__has_builtin)
#  if __has_builtin(__builtin_clear_padding)
    __builtin_clear_padding(&value);  // the gaps between fields are copied too, and would be whatever lay on the stack
#  endif
#endif
    const auto * from = reinterpret_cast<const char *>(&value);
    std::copy(from, from + size, reinterpret_cast<char *>(out));
}

// The defaults, as far as a caller with structs of `size` has room for them. A size that is too large is refused where the struct is used.
template <typename T>
void init_struct(T * out, uint32_t size, T defaults) noexcept {
    if (!out || size < sizeof(uint32_t)) return;
    defaults.struct_size = size;
    std::memcpy(static_cast<void *>(out), &defaults, std::min<size_t>(size, sizeof(T)));
}

// Structs one after another. All have one struct_size, and that is how far apart they lie: an older caller's are copied to where
// this library reads them, and what was made of them is copied back, whether the call succeeds or not.
template <typename T>
class Structs {
  public:
    // An error tells the index of the struct, counted from first_index.
    Structs(T * given, size_t n, size_t first_index = 0) : given_(reinterpret_cast<Byte *>(given)), first_index_(first_index) {
        need(given != nullptr || n == 0, "an array is NULL");
        size_ = n ? size_at(0, sizeof(uint32_t)) : sizeof(T);
        for (size_t i = 1; i < n; i++) {
            if (size_at(i, size_) != size_) throw Error(PYL_E_INVALID, "struct_size differs from that of the first of the array").at(first_index_ + i);
        }
        if (size_ == sizeof(T)) {
            items_ = {given, n};
            return;
        }
        own_.resize(n);
        for (size_t i = 0; i < n; i++) std::memcpy(static_cast<void *>(&own_[i]), given_ + i * size_, size_);
        items_ = own_;
    }
    ~Structs() {
        if constexpr (!std::is_const_v<T>) {
            for (size_t i = 0; i < own_.size(); i++) std::memcpy(given_ + i * size_, &own_[i], size_);
        }
    }
    Structs(const Structs &) = delete;
    Structs & operator=(const Structs &) = delete;

    std::span<T> items() const { return items_; }

  private:
    using Plain = std::remove_const_t<T>;
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;

    uint32_t size_at(size_t i, uint32_t stride) const {
        uint32_t size;
        std::memcpy(&size, given_ + i * stride, sizeof size);
        // Multiples of four alone, as compilers make them: the next struct_size is read there.
        if (size < sizeof(uint32_t) || size > sizeof(T) || size % sizeof(uint32_t)) {
            throw Error(PYL_E_INVALID, "struct_size is not set, or larger than this library knows: it is older than the header of its caller").numbers(size, sizeof(T)).at(first_index_ + i);
        }
        return size;
    }

    Byte * given_;
    size_t first_index_;
    uint32_t size_;
    std::vector<Plain> own_;
    std::span<T> items_;
};

template <typename T>
std::span<T> span_of(T * data, size_t n) {
    need(data != nullptr || n == 0, "an array is NULL");
    return {data, n};
}

// Token lists that lie one after another.
inline std::vector<std::span<const int32_t>> split(const int32_t * tokens, const uint32_t * lengths, size_t n) {
    std::vector<std::span<const int32_t>> out;
    for (const uint32_t length : span_of(lengths, n)) {
        out.push_back(span_of(tokens, length));
        tokens += length;
    }
    return out;
}

pyl_text * new_text(std::string bytes);

// What a path and its params mean, wherever a model is opened or looked at.
const Engine & engine_for(const std::string & path);  // or PYL_E_UNSUPPORTED
std::string path_text(const char * path, size_t n);
ModelParams model_params_of(const pyl_model_params * given);

// Handles are tokens looked up here, never addresses.
std::shared_ptr<Model> model_of(const pyl_model * handle);
std::shared_ptr<Store> store_of(const pyl_store * handle);
std::shared_ptr<const Prompt> prompt_of(const pyl_prompt * handle);

// A call into a store: keeps it alive, and refuses a second one at the same time.
template <typename Body>
int32_t in_store(const pyl_store * handle, Body && body) noexcept {
    return guarded([&] {
        const std::shared_ptr<Store> store = store_of(handle);
        const Store::Call call(*store);
        body(*store);
    });
}

}  // namespace pyl
