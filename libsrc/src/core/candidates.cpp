#include "core/candidates.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

namespace pyl {

static constexpr float none = -std::numeric_limits<float>::infinity();

static void keep(std::vector<Candidate> & c, size_t m) {
    if (m >= c.size()) return;
    std::nth_element(c.begin(), c.begin() + static_cast<std::ptrdiff_t>(m) - 1, c.end(), above);  // the least of those kept comes last
    c.resize(m);
}

// By ascending id, nothing left out.
static void take_all(const Weighed & row, const uint64_t * legal, std::vector<Candidate> & out) {
    auto changed = row.changed.begin();
    for (size_t i = 0; i < row.n; i++) {
        const bool is_changed = changed != row.changed.end() && changed->first == static_cast<Token>(i);
        const float logit = is_changed ? (changed++)->second : row.logits[i];
        if (logit > none && (!legal || legal[i / 64] >> i % 64 & 1)) out.push_back({static_cast<Token>(i), logit, 0});
    }
}

static constexpr size_t block = 64;

static float most(const float * x, size_t n) {
    constexpr size_t lanes = 16;  // the compiler may not reorder a single running maximum
    std::array<float, lanes> best;
    best.fill(none);
    size_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        for (size_t k = 0; k < lanes; k++) best[k] = x[i + k] > best[k] ? x[i + k] : best[k];  // false for what is no number
    }
    for (; i < n; i++) best[0] = x[i] > best[0] ? x[i] : best[0];
    for (const float y : best) best[0] = y > best[0] ? y : best[0];
    return best[0];
}

// The largest logit of each block, and a number that at least m logits are above.
static float find_maxima(const Weighed & row, size_t m, std::vector<float> & maxima) {
    const size_t n = (row.n + block - 1) / block;
    maxima.resize(n);
    for (size_t b = 0; b < n; b++) maxima[b] = most(row.logits + b * block, std::min(block, row.n - b * block));
    const size_t n_groups = std::min(n, 8 * m);  // each has a logit as large as its largest
    if (n_groups < m) return none;
    const size_t size = (n + n_groups - 1) / n_groups;
    for (size_t at = 0; at < n; at += size) maxima.push_back(most(maxima.data() + at, std::min(size, n - at)));
    const auto groups = maxima.begin() + static_cast<std::ptrdiff_t>(n), nth = groups + static_cast<std::ptrdiff_t>(m) - 1;
    if (nth >= maxima.end()) return none;
    std::nth_element(groups, nth, maxima.end(), std::greater<>());
    return std::nextafter(*nth, none);
}

void most_likely(const Weighed & row, size_t m, const uint64_t * legal, std::vector<Candidate> & out, std::vector<float> & maxima) {
    out.clear();
    if (m == 0) return;
    // As many more as differ: so many at most of those found by what the engine wrote are not what they seem.
    const size_t n_found = m + row.changed.size();
    if (n_found >= row.n / 4) {
        take_all(row, legal, out);
        return keep(out, m);
    }
    const size_t room = std::max<size_t>(2 * n_found, 256);
    float least = find_maxima(row, n_found, maxima);  // whatever is not above it is not among the m
    if (legal) least = none;
    for (size_t b = 0; b * block < row.n; b++) {
        if (!(maxima[b] > least)) continue;
        const size_t at = b * block, n = std::min(block, row.n - at);
        uint64_t bits = legal ? legal[b] : ~uint64_t{0};
        if (n < block) bits &= (uint64_t{1} << n) - 1;
        for (; bits; bits &= bits - 1) {
            const size_t i = at + static_cast<size_t>(std::countr_zero(bits));
            if (!(row.logits[i] > least)) continue;
            out.push_back({static_cast<Token>(i), row.logits[i], 0});
            if (out.size() < room) continue;
            keep(out, n_found);
            least = out.back().logit;  // an equal one that comes later has a higher id
        }
    }
    if (!row.changed.empty()) {
        const auto is_changed = [&](const Candidate & c) {
            const auto it = std::lower_bound(row.changed.begin(), row.changed.end(), c.id, [](const auto & pair, Token id) { return pair.first < id; });
            return it != row.changed.end() && it->first == c.id;
        };
        std::erase_if(out, is_changed);
        for (const auto & [id, logit] : row.changed) {
            const auto i = static_cast<size_t>(id);
            if (logit > none && (!legal || legal[i / 64] >> i % 64 & 1)) out.push_back({id, logit, 0});
        }
    }
    keep(out, m);
}

// Ascending where logits descend.
static uint32_t order_of(float logit) {
    const auto bits = std::bit_cast<uint32_t>(logit + 0.0f);  // -0 is 0
    return bits >> 31 ? bits : ~(bits | 0x80000000u);
}

void sort_candidates(std::vector<Candidate> & candidates, std::vector<Candidate> & room) {
    constexpr size_t many = 4096;
    const auto by_id = [](const Candidate & a, const Candidate & b) { return a.id < b.id; };
    if (candidates.size() < many || !std::is_sorted(candidates.begin(), candidates.end(), by_id)) {
        std::sort(candidates.begin(), candidates.end(), above);
        return;
    }
    room.resize(candidates.size());
    for (int shift = 0; shift < 33; shift += 11) {  // by digits from the last one on: equals stay in the order of their ids
        std::array<uint32_t, 2048> start{};
        for (const Candidate & c : candidates) start[order_of(c.logit) >> shift & 2047]++;
        uint32_t sum = 0;
        for (uint32_t & n : start) n = std::exchange(sum, sum + n);
        for (const Candidate & c : candidates) room[start[order_of(c.logit) >> shift & 2047]++] = c;
        candidates.swap(room);
    }
}

}  // namespace pyl
