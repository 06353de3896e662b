// The one exception barrier: every exported function that can fail runs its body through guarded().
#pragma once

#include <cstddef>
#include <new>
#include <span>
#include <string>
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
T read_struct(const T * given, T out) {
    need(given != nullptr, "a struct pointer is NULL");
    need(given->struct_size >= sizeof(uint32_t) && given->struct_size <= sizeof(T), "struct_size is not set, or larger than this library knows");
    const auto * from = reinterpret_cast<const char *>(given);
    std::copy(from, from + given->struct_size, reinterpret_cast<char *>(&out));
    return out;
}

template <typename T>
void write_struct(T * out, T value) {
    need(out != nullptr, "a struct pointer is NULL");
    const uint32_t size = out->struct_size;
    need(size >= sizeof(uint32_t) && size <= sizeof(T), "struct_size is not set, or larger than this library knows");
    value.struct_size = size;
    const auto * from = reinterpret_cast<const char *>(&value);
    std::copy(from, from + size, reinterpret_cast<char *>(out));
}

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
