#include <array>
#include <mutex>
#include <string_view>
#include <thread>

#include "core/cpu.hpp"
#include "engine/llama/assertion.hpp"
#include "engine/llama/llama_parts.hpp"
#include "engine/llama/pretend.hpp"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "log.h"
#include "mtmd.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace pyl {
namespace {

void take_log(ggml_log_level level, const char * text, void *) {
    const LogLevel ours = level == GGML_LOG_LEVEL_ERROR ? LogLevel::error : level == GGML_LOG_LEVEL_WARN ? LogLevel::warning : level == GGML_LOG_LEVEL_DEBUG ? LogLevel::debug : LogLevel::info;
    log_add(ours, text, level == GGML_LOG_LEVEL_CONT);
}

void start() {
    static std::once_flag once;
    std::call_once(once, [] {
        common_log_set_verbosity_thold(-1);  // its logger would start a thread and print; what matters is checked instead
        llama_log_set(take_log, nullptr);
        mtmd_log_set(take_log, nullptr);
        llama_backend_init();
        watch_buffers();
        watch_assertions();
    });
}

struct Feature {
    const char * name;
    bool is_used;
    bool is_here;
};

#if defined(__x86_64__) && defined(__GNUC__)
// What the processor says of itself, and for which registers the system keeps room. Not __builtin_cpu_supports: some of the runtimes that
// Clang is linked with (zig's) know of no instructions at all.
class Processor {
public:
    Processor() {
        unsigned a = 0, b = 0, d = 0;
        if (!__get_cpuid(1, &a, &b, &basic_, &d) || (basic_ & bit_OSXSAVE) == 0) return;
        uint32_t kept = 0, high = 0;
        __asm__ volatile("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
        has_avx_ = (kept & 0x6) == 0x6 && (basic_ & bit_AVX) != 0;
        if (!has_avx_) return;
        __get_cpuid_count(7, 0, &a, &wide_, &wider_, &d);
        __get_cpuid_count(7, 1, &latest_, &b, &b, &d);
#if defined(__APPLE__)
        constexpr bool has_room = true;  // it is made at their first use
#else
        const bool has_room = (kept & 0xe0) == 0xe0;
#endif
        has_avx512_ = has_room && (wide_ & bit_AVX512F) != 0;
    }
    bool ssse3() const { return (basic_ & bit_SSSE3) != 0; }
    bool avx() const { return has_avx_; }
    bool avx2() const { return (wide_ & bit_AVX2) != 0; }
    bool fma() const { return has_avx_ && (basic_ & bit_FMA) != 0; }
    bool f16c() const { return has_avx_ && (basic_ & bit_F16C) != 0; }
    bool bmi2() const { return (wide_ & bit_BMI2) != 0; }
    bool avx512f() const { return has_avx512_; }
    bool avx512vbmi() const { return has_avx512_ && (wider_ & bit_AVX512VBMI) != 0; }
    bool avx512vnni() const { return has_avx512_ && (wider_ & bit_AVX512VNNI) != 0; }
    bool avx512bf16() const { return has_avx512_ && (latest_ & bit_AVX512BF16) != 0; }
    bool avxvnni() const { return has_avx_ && (latest_ & (1u << 4)) != 0; }  // not every cpuid.h has its name

private:
    unsigned basic_ = 0, wide_ = 0, wider_ = 0, latest_ = 0;
    bool has_avx_ = false, has_avx512_ = false;
};
#endif

// Instructions ggml's CPU code was compiled to use, against those of this machine. Only that code uses them: what runs before it is
// asked for, static initialisers and these lines among it, is compiled for the architecture's baseline, and nothing here calls it.
std::vector<Feature> features() {
    std::vector<Feature> out;
#if defined(__x86_64__) && defined(__GNUC__)
    const Processor here;
    const auto add = [&](const char * name, int is_used, bool is_here) { out.push_back({name, is_used != 0, is_here}); };
    add("ssse3", ggml_cpu_has_ssse3(), here.ssse3());
    add("avx", ggml_cpu_has_avx(), here.avx());
    add("avx2", ggml_cpu_has_avx2(), here.avx2());
    add("fma", ggml_cpu_has_fma(), here.fma());
    add("f16c", ggml_cpu_has_f16c(), here.f16c());
    add("bmi2", ggml_cpu_has_bmi2(), here.bmi2());
    add("avx512f", ggml_cpu_has_avx512(), here.avx512f());
    add("avx512vbmi", ggml_cpu_has_avx512_vbmi(), here.avx512vbmi());
    add("avx512vnni", ggml_cpu_has_avx512_vnni(), here.avx512vnni());
    add("avx512bf16", ggml_cpu_has_avx512_bf16(), here.avx512bf16());
    add("avxvnni", ggml_cpu_has_avx_vnni(), here.avxvnni());
    add("amx_int8", ggml_cpu_has_amx_int8(), true);  // the engine asks the system itself, and is built without: docs/adr/0013
#elif defined(__aarch64__)
    for (const auto & [name, used] : {std::pair{"neon", ggml_cpu_has_neon()}, {"fp16", ggml_cpu_has_fp16_va()}, {"dotprod", ggml_cpu_has_dotprod()}, {"i8mm", ggml_cpu_has_matmul_int8()}, {"sve", ggml_cpu_has_sve()}}) {
        out.push_back({name, used != 0, true});
    }
#endif
    return out;
}

std::vector<std::string> missing_features() {
    std::vector<std::string> out;
    for (const Feature & f : features()) {
        if (f.is_used && !f.is_here) out.emplace_back(f.name);
    }
    return out;
}

// Backends are registered by code such a CPU cannot run: it has none.
EngineInfo info() {
    EngineInfo out{"llama.cpp", PYL_ENGINE_COMMIT, PYL_CPU, PYL_THREADS, PYL_ENGINE_ATTENTION, {}, {}, missing_features()};
    for (const Feature & f : features()) {
        if (f.is_used) out.cpu_features.emplace_back(f.name);
    }
    if (!out.cpu_missing.empty()) return out;
    start();
    for (size_t i = 0; i < ggml_backend_reg_count(); i++) out.backends.emplace_back(ggml_backend_reg_name(ggml_backend_reg_get(i)));
    return out;
}

std::vector<Device> devices() {
    std::vector<Device> out;
    if (!missing_features().empty()) return out;
    start();
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_props props;
        ggml_backend_dev_get_props(ggml_backend_dev_get(i), &props);
        const char * kind = props.type == GGML_BACKEND_DEVICE_TYPE_CPU ? "cpu" : props.type == GGML_BACKEND_DEVICE_TYPE_GPU ? "gpu" : props.type == GGML_BACKEND_DEVICE_TYPE_IGPU ? "igpu" : "accel";
        uint64_t free_bytes = props.memory_free;
        if (props.type == GGML_BACKEND_DEVICE_TYPE_CPU && free_bytes == props.memory_total) free_bytes = available_memory_bytes();  // the engine does not measure it
        out.push_back({props.name, props.description ? props.description : "", ggml_backend_reg_name(ggml_backend_dev_backend_reg(ggml_backend_dev_get(i))), kind, props.memory_total, free_bytes});
    }
    return out;
}

// Before start(): the engine's first steps use those instructions already.
void need_cpu() {
    std::string missing;
    for (const std::string & name : missing_features()) (missing += missing.empty() ? "" : ", ") += name;
    if (missing.empty()) return;
    const bool is_portable = std::string_view(PYL_CPU) == "portable";
    throw Error(PYL_E_UNSUPPORTED, "this library was compiled to use " + missing + ", which this CPU lacks; build it here (preset native)" + (is_portable ? "" : " or use the portable one (preset cpu)"));
}

std::shared_ptr<Model> open(const std::string & path, const ModelParams & params) {
    need_cpu();
    start();
    return std::make_shared<LlamaModel>(path, params);
}

Memory dry_run(const std::string & path, const ModelParams & params, const std::function<ContextParams(const pyl_model_info &)> & context) {
    need_cpu();
    start();
    return llama_dry_run(path, params, context);
}

ProjectorMemory projector_dry_run(const std::string & path, const ProjectorParams & params, const PictureShape & picture) {
    need_cpu();
    start();
    return llama_projector_dry_run(path, params, picture);
}

}  // namespace

const Engine & llama_engine() {
    static const Engine engine{info, devices, open, llama_chat_parse, llama_schema_to_gbnf, dry_run, projector_dry_run};
    return engine;
}

}  // namespace pyl
