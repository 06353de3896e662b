// macOS, built with zig: its linker knows no list of exports, and its C++ library's operators new and delete would show. The loader makes
// one of all such operators in a process, so that memory of ours could be freed by another library's. Ours are compiled hidden (see
// cmake/exports.cmake), and the C++ library's, which lie in an archive, are then not taken.
#if defined(__APPLE__) && defined(PYL_HIDDEN_NEW)
#include <cstdlib>
#include <new>

static void * take(std::size_t size) noexcept { return std::malloc(size > 0 ? size : 1); }
static void * take(std::size_t size, std::align_val_t alignment) noexcept {
    const auto at = static_cast<std::size_t>(alignment) < sizeof(void *) ? sizeof(void *) : static_cast<std::size_t>(alignment);
    void * memory = nullptr;
    return posix_memalign(&memory, at, size > 0 ? size : 1) == 0 ? memory : nullptr;
}
static void * need(void * memory) {
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

void * operator new(std::size_t n) { return need(take(n)); }
void * operator new[](std::size_t n) { return need(take(n)); }
void * operator new(std::size_t n, const std::nothrow_t &) noexcept { return take(n); }
void * operator new[](std::size_t n, const std::nothrow_t &) noexcept { return take(n); }
void * operator new(std::size_t n, std::align_val_t a) { return need(take(n, a)); }
void * operator new[](std::size_t n, std::align_val_t a) { return need(take(n, a)); }
void * operator new(std::size_t n, std::align_val_t a, const std::nothrow_t &) noexcept { return take(n, a); }
void * operator new[](std::size_t n, std::align_val_t a, const std::nothrow_t &) noexcept { return take(n, a); }
void operator delete(void * p) noexcept { std::free(p); }
void operator delete[](void * p) noexcept { std::free(p); }
void operator delete(void * p, std::size_t) noexcept { std::free(p); }
void operator delete[](void * p, std::size_t) noexcept { std::free(p); }
void operator delete(void * p, const std::nothrow_t &) noexcept { std::free(p); }
void operator delete[](void * p, const std::nothrow_t &) noexcept { std::free(p); }
void operator delete(void * p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void * p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void * p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void * p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete(void * p, std::align_val_t, const std::nothrow_t &) noexcept { std::free(p); }
void operator delete[](void * p, std::align_val_t, const std::nothrow_t &) noexcept { std::free(p); }
#endif
