// Attention over the cells of many branches: what ggml's CPU backend computes for a flash attention node, which it does row by row where
// there are few. cmake/edit_attention.cmake puts it into ops.cpp.
//
//  * Queries that see the same of a tile's cells are computed together: forks share the reading of their prefix, and of the
//    cells that only one of them sees the others read nothing, not even something that is not a number.
//  * A result depends on what a query sees, in the order of the cells, and on nothing else: not on who is computed beside it, nor
//    where the cells lie. Each sum runs over the cells one by one, and the scale they are added up in is a power of two, so that
//    raising it rounds nothing that is not 2^-126 of the largest (docs/adr/0012).
#pragma once

#if defined(__GNUC__) && ((defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)) || (defined(__ARM_NEON) && defined(__aarch64__)))
#define PYL_ATTENTION 1
#else
#define PYL_ATTENTION 0
#endif

#if PYL_ATTENTION
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

namespace pyl_attention {
namespace {

constexpr int n_lanes = 8;
constexpr int n_tile = 64;          // cells looked at together: a bit each
constexpr int max_rows = 64;        // queries of one head of K and V taken through the cells together
constexpr int max_lone_dims = 1024; // of V, where the sums of one query lie on the stack

#if defined(__AVX2__)
typedef float vec __attribute__((vector_size(4 * n_lanes)));
inline vec load(const float * from) { return (vec) _mm256_loadu_ps(from); }
inline vec load(const ggml_fp16_t * from) { return (vec) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) from)); }
inline void store(float * to, vec x) { _mm256_storeu_ps(to, (__m256) x); }
inline vec all(float x) { return (vec) _mm256_set1_ps(x); }
inline vec fma(vec a, vec b, vec c) { return (vec) _mm256_fmadd_ps((__m256) a, (__m256) b, (__m256) c); }
inline vec larger(vec a, vec b) { return (vec) _mm256_max_ps((__m256) a, (__m256) b); }
inline vec nearest(vec x) { return (vec) _mm256_round_ps((__m256) x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// The sums of four vectors' lanes, each added up in the same order.
inline void store_sums(float * to, vec a, vec b, vec c, vec d) {
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256) a, (__m256) b), _mm256_hadd_ps((__m256) c, (__m256) d));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}
// 2 to the power of whole numbers of at most 0; 0 where that would be subnormal.
inline vec power(vec n) {
    const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32((__m256) n), _mm256_set1_epi32(127)), 23);
    return (vec) _mm256_and_ps(_mm256_castsi256_ps(bits), _mm256_cmp_ps((__m256) n, _mm256_set1_ps(-126.0f), _CMP_GE_OQ));
}
#else
struct vec { float32x4_t low, high; };
inline vec operator-(vec a, vec b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline vec operator*(vec a, vec b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline vec load(const float * from) { return {vld1q_f32(from), vld1q_f32(from + 4)}; }
inline vec load(const ggml_fp16_t * from) {
    const float16x8_t x = vreinterpretq_f16_u16(vld1q_u16((const uint16_t *) from));
    return {vcvt_f32_f16(vget_low_f16(x)), vcvt_f32_f16(vget_high_f16(x))};
}
inline void store(float * to, vec x) { vst1q_f32(to, x.low); vst1q_f32(to + 4, x.high); }
inline vec all(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline vec fma(vec a, vec b, vec c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
inline vec larger(vec a, vec b) { return {vmaxq_f32(a.low, b.low), vmaxq_f32(a.high, b.high)}; }
inline vec nearest(vec x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }
inline void store_sums(float * to, vec a, vec b, vec c, vec d) {
    const float32x4_t low = vpaddq_f32(vpaddq_f32(a.low, b.low), vpaddq_f32(c.low, d.low));
    const float32x4_t high = vpaddq_f32(vpaddq_f32(a.high, b.high), vpaddq_f32(c.high, d.high));
    vst1q_f32(to, vaddq_f32(low, high));
}
inline float32x4_t power(float32x4_t n) {
    const int32x4_t bits = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_s32(bits), vcgeq_f32(n, vdupq_n_f32(-126.0f))));
}
inline vec power(vec n) { return {power(n.low), power(n.high)}; }
#endif

// Before a loop over what must stay in registers: GCC unrolls too late by itself.
#define PYL_UNROLL _Pragma("GCC unroll 8")

// 2 to the power of x - scale, for a whole `scale` of at least the nearest whole number to x: the fraction's power first, which
// does not know the scale. (Taylor's terms; the first that is left out is 5e-9.)
inline vec power_over(vec x, vec scale) {
    const vec whole = nearest(x), r = x - whole;
    vec p = all(1.525273380405984e-5f);
    p = fma(p, r, all(1.540353039338161e-4f));
    p = fma(p, r, all(1.333355814642844e-3f));
    p = fma(p, r, all(9.618129107628477e-3f));
    p = fma(p, r, all(5.550410866482158e-2f));
    p = fma(p, r, all(2.402265069591007e-1f));
    p = fma(p, r, all(6.931471805599453e-1f));
    p = fma(p, r, all(1.0f));
    return p * power(whole - scale);
}

// One query's way through the cells.
struct row {
    const float * q;
    const ggml_fp16_t * mask;  // nullptr: it sees all
    float slope;
    float scale;               // its sums are over 2 to this power; -INFINITY before the first cell
    float sum;
    float * mixed;             // the values it has seen, weighted [DV]
};

// Which of a tile's cells a row sees; *biased is set where that is not all its mask says.
inline uint64_t seen(const ggml_fp16_t * mask, int n, bool * biased) {
    constexpr uint16_t hidden = 0xFC00;  // minus infinity
    uint64_t bits = 0;
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        uint64_t four;
        memcpy(&four, mask + i, sizeof four);
        if (four == 0xFC00FC00FC00FC00u) continue;
        if (four == 0) {
            bits |= (uint64_t) 15 << i;
            continue;
        }
        for (int k = 0; k < 4; k++) {
            if (mask[i + k] == hidden) continue;
            bits |= (uint64_t) 1 << (i + k);
            *biased |= mask[i + k] != 0;
        }
    }
    for (; i < n; i++) {
        if (mask[i] == hidden) continue;
        bits |= (uint64_t) 1 << i;
        *biased |= mask[i] != 0;
    }
    return bits;
}

// scores[r][c] = rows[r]->q . k[c], for R rows and n cells (rounded up to four: k repeats its last).
template <int R, typename T>
inline void score(const row * const * rows, const T * const * k, int n, int n_dims, float * scores) {
    for (int c = 0; c < n; c += 4) {
        vec sum[R][4] = {};
        for (int d = 0; d < n_dims; d += n_lanes) {
            vec q[R];
            PYL_UNROLL for (int r = 0; r < R; r++) q[r] = load(rows[r]->q + d);
            PYL_UNROLL for (int i = 0; i < 4; i++) {
                const vec key = load(k[c + i] + d);
                PYL_UNROLL for (int r = 0; r < R; r++) sum[r][i] = fma(q[r], key, sum[r][i]);
            }
        }
        PYL_UNROLL for (int r = 0; r < R; r++) store_sums(scores + r * n_tile + c, sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
    }
}

// rows[r]->mixed += sum over c of weights[r][c] * v[c], cell by cell; N vectors of it, from dimension d on.
template <int R, int N, typename T>
inline void mix(row * const * rows, const T * const * v, int n, int d, const float * weights) {
    vec sum[R][N];
    PYL_UNROLL for (int r = 0; r < R; r++) {
        PYL_UNROLL for (int i = 0; i < N; i++) sum[r][i] = load(rows[r]->mixed + d + i * n_lanes);
    }
    for (int c = 0; c < n; c++) {
        vec value[N];
        PYL_UNROLL for (int i = 0; i < N; i++) value[i] = load(v[c] + d + i * n_lanes);
        PYL_UNROLL for (int r = 0; r < R; r++) {
            const vec weight = all(weights[r * n_tile + c]);
            PYL_UNROLL for (int i = 0; i < N; i++) sum[r][i] = fma(weight, value[i], sum[r][i]);
        }
    }
    PYL_UNROLL for (int r = 0; r < R; r++) {
        PYL_UNROLL for (int i = 0; i < N; i++) store(rows[r]->mixed + d + i * n_lanes, sum[r][i]);
    }
}

template <int R, typename T>
inline void mix_all(row * const * rows, const T * const * v, int n, int n_dims, const float * weights) {
    for (int c = 0; c < n; c++) {
        for (int r = 0; r < R; r++) rows[r]->sum += weights[r * n_tile + c];
    }
    int d = 0;
    for (; d + 2 * n_lanes <= n_dims; d += 2 * n_lanes) mix<R, 2>(rows, v, n, d, weights);
    for (; d < n_dims; d += n_lanes) mix<R, 1>(rows, v, n, d, weights);
}

struct shape {
    int n_key, n_value;  // dimensions of a head
    float factor, cap;   // of scores; cap 0 for none
};

// Turns a row's scores of n cells into their weights, and raises its scale where they ask for it.
inline void weigh(row & at, float * scores, const int * cells, int n, const shape & of, int64_t first, bool biased) {
    constexpr float log2e = 1.44269504088896341f;
    const int padded = (n + n_lanes - 1) / n_lanes * n_lanes;
    if (of.cap != 0.0f || biased) {
        for (int c = 0; c < n; c++) {
            float s = scores[c] * of.factor;
            if (of.cap != 0.0f) s = of.cap * tanhf(s);
            if (biased) s = fmaf(at.slope, GGML_CPU_FP16_TO_FP32(at.mask[first + cells[c]]), s);
            scores[c] = s * log2e;
        }
    } else {
        // In two steps, as above: a bias of 0 changes no bit.
        for (int c = 0; c < padded; c += n_lanes) store(scores + c, load(scores + c) * all(of.factor) * all(log2e));
    }
    for (int c = n; c < padded; c++) scores[c] = -INFINITY;
    vec most = all(-1e30f);
    for (int c = 0; c < padded; c += n_lanes) {
        const vec x = larger(all(-1e30f), load(scores + c));  // finite, or not a number
        store(scores + c, x);
        most = larger(x, most);  // whatever that makes of what is not a number: its weight is none either
    }
    float lane[n_lanes], top = -1e30f;
    store(lane, nearest(most));
    for (int i = 0; i < n_lanes; i++) top = lane[i] > top ? lane[i] : top;
    if (top > at.scale) {
        if (at.scale != -INFINITY) {
            float down[n_lanes];
            store(down, power(all(at.scale - top)));
            for (int d = 0; d < of.n_value; d += n_lanes) store(at.mixed + d, load(at.mixed + d) * all(down[0]));
            at.sum *= down[0];
        }
        at.scale = top;
    }
    for (int c = 0; c < padded; c += n_lanes) store(scores + c, power_over(load(scores + c), all(at.scale)));
}

// Rows that see the same n cells of a tile.
template <typename T>
inline void together(row * const * rows, int n_rows, const T * const * k, const T * const * v, const int * cells, int n, const shape & of, int64_t first, bool biased, float * scores) {
    int r = 0;
    for (; r + 3 <= n_rows; r += 3) score<3>(rows + r, k, n, of.n_key, scores + r * n_tile);
    for (; r < n_rows; r++) score<1>(rows + r, k, n, of.n_key, scores + r * n_tile);
    for (r = 0; r < n_rows; r++) weigh(*rows[r], scores + r * n_tile, cells, n, of, first, biased);
    r = 0;
    for (; r + 6 <= n_rows; r += 6) mix_all<6>(rows + r, v, n, of.n_value, scores + r * n_tile);
    for (; r + 2 <= n_rows; r += 2) mix_all<2>(rows + r, v, n, of.n_value, scores + r * n_tile);
    for (; r < n_rows; r++) mix_all<1>(rows + r, v, n, of.n_value, scores + r * n_tile);
}

// K or V of one head: rows of T, or of another type that is read into `space` first [n_tile][n_dims].
template <typename T>
struct cells_of {
    const char * data;
    size_t stride;
    ggml_to_float_t to_float;  // nullptr: they are T
    T * space;
    int n_dims;

    const T * at(int64_t first, int cell) const { return to_float ? space + cell * n_dims : (const T *) (data + (first + cell) * stride); }
    void read(int64_t first, uint64_t bits) const {
        if (!to_float) return;
        for (; bits != 0; bits &= bits - 1) {
            const int cell = __builtin_ctzll(bits);
            to_float(data + (first + cell) * stride, (float *) space + cell * n_dims, n_dims);
        }
    }
};

// Takes rows of one head of K and V through the cells from `begin` to `end`.
template <typename T>
inline void through(row * rows, int n_rows, const cells_of<T> & k, const cells_of<T> & v, int64_t begin, int64_t end, const shape & of, float * scores) {
    for (int64_t first = begin; first < end; first += n_tile) {
        const int n_here = (int) (end - first < n_tile ? end - first : n_tile);
        uint64_t sees[max_rows], any = 0;
        bool biased = false;
        for (int r = 0; r < n_rows; r++) any |= sees[r] = rows[r].mask ? seen(rows[r].mask + first, n_here, &biased) : ~(uint64_t) 0 >> (n_tile - n_here);
        k.read(first, any);
        v.read(first, any);
        for (int r = 0; r < n_rows; r++) {
            const uint64_t bits = sees[r];
            if (bits == 0) continue;
            row * group[max_rows];
            int n_group = 0;
            for (int other = r; other < n_rows; other++) {
                if (sees[other] != bits) continue;
                group[n_group++] = rows + other;
                sees[other] = 0;
            }
            int cells[n_tile], n = 0;
            const T * keys[n_tile + 3];
            const T * values[n_tile];
            for (uint64_t rest = bits; rest != 0; rest &= rest - 1) {
                cells[n] = __builtin_ctzll(rest);
                keys[n] = k.at(first, cells[n]);
                values[n] = v.at(first, cells[n]);
                n++;
            }
            for (int i = n; i < n + 3; i++) keys[i] = keys[n - 1];
            together(group, n_group, keys, values, cells, n, of, first, biased, scores);
        }
    }
}

// How a type's rows are read into f32; nullptr for those that are.
inline ggml_to_float_t reader(const ggml_tensor * t) { return t->type == GGML_TYPE_F32 ? nullptr : ggml_get_type_traits(t->type)->to_float; }

inline bool takes(const ggml_compute_params * params, const ggml_tensor * node) {
    const ggml_tensor * q = node->src[0];
    const ggml_tensor * k = node->src[1];
    const ggml_tensor * v = node->src[2];
    for (const ggml_tensor * t : {k, v}) {
        if (t->nb[0] != ggml_type_size(t->type) || t->ne[0] % n_lanes != 0 || (t->type != GGML_TYPE_F32 && !reader(t))) return false;
    }
    return !params->use_ref && q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && node->nb[0] == sizeof(float) && v->ne[0] <= max_lone_dims;
}

// Whether threads share one token's heads out among themselves, as they do those of several, and not its cells, which would be added
// up in parts: unless most of them had nothing to do.
inline bool by_heads(const ggml_compute_params * params, const ggml_tensor * node) { return takes(params, node) && 2 * node->src[0]->ne[2] >= params->nth; }

// The rows from ir0 to ir1 of a flash attention node, as ggml numbers them (head by head); false where ggml has to do them itself.
// With `partials`, which are those of the cells from begin to end, a row at a time.
inline bool compute(const ggml_compute_params * params, ggml_tensor * dst, int ir0, int ir1, int64_t begin, int64_t end, float * partials, int64_t partial_stride) {
    const ggml_tensor * q = dst->src[0];
    const ggml_tensor * k = dst->src[1];
    const ggml_tensor * v = dst->src[2];
    const ggml_tensor * mask = dst->src[3];
    const ggml_tensor * sinks = dst->src[4];
    const int n_key = (int) k->ne[0], n_value = (int) v->ne[0];
    const bool half = k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16;
    if (!takes(params, dst) || (partials && !half && (k->type != GGML_TYPE_F32 || v->type != GGML_TYPE_F32))) return false;

    float factor = 1.0f, max_bias = 0.0f, cap = 0.0f;
    memcpy(&factor, (const float *) dst->op_params + 0, sizeof factor);
    memcpy(&max_bias, (const float *) dst->op_params + 1, sizeof max_bias);
    memcpy(&cap, (const float *) dst->op_params + 2, sizeof cap);
    const shape of = {n_key, n_value, cap != 0.0f ? factor / cap : factor, cap};
    const int n_tokens = (int) q->ne[1], n_heads = (int) q->ne[2];
    const int per_key = (int) (n_heads / k->ne[2]), per_value = (int) (n_heads / v->ne[2]);
    const int power_of_heads = 1 << (int) floor(log2(n_heads));
    const auto slope = [&](int head) {
        if (max_bias <= 0.0f) return 1.0f;
        return head < power_of_heads ? powf(powf(2.0f, -max_bias / power_of_heads), head + 1) : powf(powf(2.0f, -(max_bias / 2.0f) / power_of_heads), 2 * (head - power_of_heads) + 1);
    };

    // A thread's share of the node's memory is what ggml's own tiles take. Partial sums lie in that memory too, so the work on one is on the stack.
    float lone_scores[n_tile], lone_mixed[max_lone_dims];
    float * share = (float *) params->wdata + params->ith * (GGML_FA_TILE_Q * n_key + 2 * GGML_FA_TILE_Q * GGML_FA_TILE_KV + GGML_FA_TILE_Q * n_value + GGML_FA_TILE_KV * n_value + GGML_FA_TILE_KV * n_key + CACHE_LINE_SIZE_F32);
    float * scores = partials ? lone_scores : share;
    float * mixed = partials ? lone_mixed : share + max_rows * n_tile;
    float * key_space = share + max_rows * n_tile + max_rows * n_value;
    float * value_space = key_space + n_tile * n_key;
    static_assert(GGML_FA_TILE_Q == max_rows && GGML_FA_TILE_KV == n_tile, "the share holds scores, sums, keys and values");

    for (int ir = ir0; ir < ir1;) {
        row rows[max_rows];
        int n = 0;
        const int batch = ir / (n_heads * n_tokens), head0 = ir / n_tokens % n_heads;
        for (; n < (partials ? 1 : max_rows) && ir + n < ir1; n++) {
            const int head = (ir + n) / n_tokens % n_heads, token = (ir + n) % n_tokens;
            if ((ir + n) / (n_heads * n_tokens) != batch || head / per_key != head0 / per_key || head / per_value != head0 / per_value) break;
            row & r = rows[n];
            r.q = (const float *) ((const char *) q->data + token * q->nb[1] + head * q->nb[2] + batch * q->nb[3]);
            r.mask = mask ? (const ggml_fp16_t *) ((const char *) mask->data + token * mask->nb[1] + (head % mask->ne[2]) * mask->nb[2] + (batch % mask->ne[3]) * mask->nb[3]) : nullptr;
            r.slope = slope(head);
            r.scale = -INFINITY;
            r.sum = 0.0f;
            r.mixed = mixed + n * n_value;
            memset(r.mixed, 0, n_value * sizeof(float));
        }
        const char * keys = (const char *) k->data + head0 / per_key * k->nb[2] + batch / (q->ne[3] / k->ne[3]) * k->nb[3];
        const char * values = (const char *) v->data + head0 / per_value * v->nb[2] + batch / (q->ne[3] / v->ne[3]) * v->nb[3];
        if (half) {
            through<ggml_fp16_t>(rows, n, {keys, k->nb[1], nullptr, nullptr, n_key}, {values, v->nb[1], nullptr, nullptr, n_value}, begin, end, of, scores);
        } else {
            through<float>(rows, n, {keys, k->nb[1], reader(k), key_space, n_key}, {values, v->nb[1], reader(v), value_space, n_value}, begin, end, of, scores);
        }
        for (int i = 0; i < n; i++) {
            row & r = rows[i];
            const int head = (ir + i) / n_tokens % n_heads, token = (ir + i) % n_tokens;
            if (sinks && begin == 0) {  // a score without a value
                float sink[n_lanes] = {((const float *) sinks->data)[head]};
                weigh(r, sink, nullptr, 1, {0, n_value, 1.0f, 0.0f}, 0, false);
                r.sum += sink[0];
            }
            if (partials) {
                float * partial = partials + (ir + i) * partial_stride;
                partial[0] = r.scale * 0.693147180559945309f;
                partial[1] = r.sum;
                memcpy(partial + 2, r.mixed, n_value * sizeof(float));
            } else {
                const float over = r.sum == 0.0f ? 0.0f : 1.0f / r.sum;
                float * to = (float *) ((char *) dst->data + (batch * dst->ne[2] * dst->ne[1] + head + token * dst->ne[1]) * dst->nb[1]);
                for (int d = 0; d < n_value; d += n_lanes) store(to + d, load(r.mixed + d) * all(over));
            }
        }
        ir += n;
    }
    return true;
}

}  // namespace
}  // namespace pyl_attention
#else
namespace pyl_attention {
inline bool by_heads(const ggml_compute_params *, const ggml_tensor *) { return false; }
inline bool compute(const ggml_compute_params *, ggml_tensor *, int, int, int64_t, int64_t, float *, int64_t) { return false; }
}  // namespace pyl_attention
#endif
