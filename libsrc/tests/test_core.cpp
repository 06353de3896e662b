// The small parts of the kernel: the log, JSON strings, the registry of weights, the count of cores.
#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <unistd.h>
#endif

#include "check.hpp"
#include "core/cpu.hpp"
#include "core/history.hpp"
#include "core/json.hpp"
#include "core/log.hpp"
#include "core/registry.hpp"
#include "core/store.hpp"

using namespace pyl;

namespace {

std::string drained(uint64_t want_dropped = 0) {
    uint64_t dropped = 77;
    std::string out = log_drain(dropped);
    CHECK_EQ(dropped, want_dropped);
    return out;
}

void test_log() {
    CHECK(drained().empty());
    log_add(LogLevel::info, "below the default level\n");
    log_add(LogLevel::warning, "careful\n");
    log_add(LogLevel::error, "two\nlines \n");
    log_add(LogLevel::warning, "");
    CHECK(drained() == "WARNING careful\nERROR two lines\n");
    CHECK(drained().empty());
    log_set_level(LogLevel::debug);
    log_add(LogLevel::debug, "d");
    log_add(LogLevel::info, "i");
    log_add(LogLevel::info, "nfo", true);  // goes on where the line before stopped
    CHECK(drained() == "DEBUG d\nINFO info\n");
    log_set_level(LogLevel::nothing);
    log_add(LogLevel::error, "not even this");
    CHECK(drained().empty());
    log_set_level(LogLevel::warning);
    log_add(LogLevel::info, "unwanted");
    log_add(LogLevel::info, " and its rest", true);  // belongs to a line that was not collected
    CHECK(drained().empty());
    // The newest 4,096 are kept, the others counted.
    for (int i = 0; i < 5000; i++) log_add(LogLevel::warning, std::to_string(i));
    std::string want;
    for (int i = 904; i < 5000; i++) want += "WARNING " + std::to_string(i) + "\n";
    CHECK(drained(904) == want);
    CHECK(drained(0).empty());
    // What one thread says while it opens something ends up in its exception, not in another thread's.
    {
        LogCapture outer;
        CHECK(outer.words("nothing was said") == "nothing was said");
        log_add(LogLevel::warning, "first\n");
        log_add(LogLevel::info, "not a complaint\n");
        std::thread([] { log_add(LogLevel::error, "elsewhere\n"); }).join();
        {
            LogCapture inner;
            log_add(LogLevel::error, "inner\n");
            CHECK(inner.words("") == "inner");
        }
        log_add(LogLevel::error, "last\n");
        CHECK(outer.words("") == "first\nlast");
    }
    log_add(LogLevel::error, "after");
    CHECK(drained() == "WARNING first\nERROR elsewhere\nERROR inner\nERROR last\nERROR after\n");
    // From many threads: no line is lost or torn.
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++) {
        threads.emplace_back([] {
            for (int i = 0; i < 500; i++) log_add(LogLevel::warning, "a whole line");
        });
    }
    for (auto & thread : threads) thread.join();
    want.clear();
    for (int i = 0; i < 2000; i++) want += "WARNING a whole line\n";
    CHECK(drained() == want);
}

// Several threads write and several drain: each line comes out once, in its writer's order, and nobody finishes another's line.
void test_log_on_many_threads() {
    log_add(LogLevel::warning, "mine");
    std::thread([] { log_add(LogLevel::warning, "another's"); }).join();
    log_add(LogLevel::warning, " goes on", true);
    CHECK(drained() == "WARNING mine\nWARNING another's\nWARNING  goes on\n");
    constexpr int n_writers = 3, n_lines = 400;
    std::atomic<int> n_writing{n_writers};
    std::array<std::string, 2> heard;
    std::vector<std::thread> threads;
    for (int t = 0; t < n_writers; t++) {
        threads.emplace_back([&, t] {
            for (int i = 0; i < n_lines; i++) {
                log_add(LogLevel::warning, std::to_string(t) + ":" + std::to_string(i));
                log_add(LogLevel::warning, std::string(3, static_cast<char>('a' + t)), true);  // joined, or a line of its own: never another's
            }
            n_writing--;
        });
    }
    for (std::string & into : heard) {
        threads.emplace_back([&] {
            uint64_t dropped = 0;
            for (bool is_last = false; !is_last;) {
                is_last = n_writing == 0;
                into += log_drain(dropped);
                CHECK_EQ(dropped, 0);
            }
        });
    }
    for (auto & thread : threads) thread.join();
    std::array<std::array<int, n_lines>, n_writers> n_seen{};
    std::array<int, n_writers> n_rests{};
    for (const std::string & all : heard) {
        std::array<int, n_writers> last{-1, -1, -1};
        std::istringstream lines(all);
        for (std::string line; std::getline(lines, line);) {
            const std::string said = line.substr(std::string("WARNING ").size());
            if (const size_t colon = said.find(':'); colon != std::string::npos) {
                const auto t = static_cast<size_t>(std::stoi(said));
                const int i = std::stoi(said.substr(colon + 1));
                CHECK(i > last[t]);
                last[t] = i;
                n_seen[t][static_cast<size_t>(i)]++;
            }
            const size_t letter = said.find_first_not_of("0123456789:");
            if (letter == std::string::npos) continue;
            const auto t = static_cast<size_t>(said[letter] - 'a');
            CHECK(t < n_writers && said.substr(letter) == std::string(3, said[letter]));
            CHECK(letter == 0 || said[0] == static_cast<char>('0' + t));
            n_rests[t]++;
        }
    }
    for (const auto & seen : n_seen) CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
    for (const int n : n_rests) CHECK_EQ(n, n_lines);
}

void test_json() {
    CHECK(json_quote("") == R"("")");
    CHECK(json_quote("a\"b\\c/") == R"("a\"b\\c/")");
    CHECK(json_quote("\n\t\x01\x1f") == R"("\u000a\u0009\u0001\u001f")");
    CHECK(json_quote(std::string_view("\0", 1)) == R"("\u0000")");
    CHECK(json_quote("\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80") == "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"");
    CHECK(json_quote("a\xff" "b\xc3") == "\"a\xef\xbf\xbd" "b\xef\xbf\xbd\"");
    const std::vector<std::pair<std::string, size_t>> cases{
        {"abc", 3}, {"\xc3\xa9", 2}, {"a\xc3", 1}, {"\xe2\x82", 0}, {"\x80", 0}, {"\xc0\x80", 0}, {"\xc1\xbf", 0}, {"\xe0\x9f\xbf", 0}, {"\xe0\xa0\x80", 3}, {"\xed\x9f\xbf", 3}, {"\xed\xa0\x80", 0},
        {"\xf0\x8f\xbf\xbf", 0}, {"\xf0\x90\x80\x80", 4}, {"\xf4\x8f\xbf\xbf", 4}, {"\xf4\x90\x80\x80", 0}, {"\xf5\x80\x80\x80", 0}, {"ab\xe2\x82\xac\xff", 5}, {"\xe2(\xac", 0},
    };
    for (const auto & [text, n] : cases) CHECK_EQ(utf8_valid_prefix(text), n);
}

void test_registry() {
    auto a = open_shared(stub_engine(), "stub:", {}), b = open_shared(stub_engine(), "stub:", {});
    CHECK(a == b);
    CHECK_EQ(live_counts().weights, 1);
    const auto other_path = open_shared(stub_engine(), "stub:n_vocab=301", {}), other_params = open_shared(stub_engine(), "stub:", {7, true, false});
    CHECK(other_path != a && other_params != a);
    CHECK(open_shared(stub_engine(), "stub:", {0, false, false}) != a);
    CHECK_EQ(live_counts().weights, 3);
    for (int i = 0; i < 2; i++) CHECK_THROWS(PYL_E_FORMAT, open_shared(stub_engine(), "stub:nonsense", {}));  // a failure is not remembered as a success
    const auto weak = std::weak_ptr(a);
    a.reset(), b.reset();
    CHECK(weak.expired());  // the registry itself keeps nothing alive
    a = open_shared(stub_engine(), "stub:", {});
    CHECK_EQ(live_counts().weights, 3);
}

void test_history() {
    // Against plain vectors, through forks, moves and deaths in any order.
    struct Twin {
        History history;
        std::vector<Token> tokens;
    };
    std::vector<Twin> twins(1);
    uint32_t x = 7;
    const auto random = [&](size_t n) { return ((x = x * 1664525u + 1013904223u) >> 8) % n; };
    for (int step = 0; step < 20000; step++) {
        Twin & at = twins[random(twins.size())];
        switch (random(8)) {
        case 0:
            if (twins.size() < 40) twins.push_back({at.history.fork(), at.tokens});
            break;
        case 1:
            if (&at != &twins.back()) at = std::move(twins.back()), twins.pop_back();
            break;
        default:
            at.history.make_room();
            at.history.push_back(step);
            at.tokens.push_back(step);
        }
        const Twin & looked_at = twins[random(twins.size())];
        CHECK_EQ(looked_at.history.size(), looked_at.tokens.size());
        CHECK_EQ(looked_at.history.empty(), looked_at.tokens.empty());
        if (step % 50 == 0) CHECK(looked_at.history.tokens() == looked_at.tokens);
    }
    for (const Twin & twin : twins) CHECK(twin.history.tokens() == twin.tokens);
    // A branch that is the end of a great many forks is not the end of the stack.
    History line;
    for (int i = 0; i < 1000000; i++) {
        line.push_back(i);
        line = line.fork();
    }
    CHECK_EQ(line.size(), 1000000);
    CHECK_EQ(line.tokens()[999999], 999999);
    History other = line.fork();
    line = History();
    CHECK_EQ(other.size(), 1000000);
}

#if defined(__linux__)
// A machine's files, as far as quotas are told in them.
class Machine {
public:
    Machine() : root_(std::filesystem::temp_directory_path() / ("pylloyal-test-core-" + std::to_string(getpid()))) { std::filesystem::remove_all(root_); }
    ~Machine() { std::filesystem::remove_all(root_); }
    Machine(const Machine &) = delete;
    Machine & operator=(const Machine &) = delete;
    void write(const char * path, const char * text) {
        std::filesystem::create_directories((root_ / path).parent_path());
        std::ofstream(root_ / path) << text;
    }
    double quota() const { return cpu_quota(root_.string()); }

private:
    std::filesystem::path root_;
};

void test_quota() {
    {
        Machine m;
        CHECK(m.quota() == 0);
        m.write("proc/self/cgroup", "0::/outer/inner\n");
        CHECK(m.quota() == 0);
        m.write("sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n");
        CHECK(m.quota() == 0);
        m.write("sys/fs/cgroup/outer/cpu.max", "250000 100000\n");  // of the group above, and it holds below
        CHECK(m.quota() == 2.5);
        m.write("sys/fs/cgroup/outer/inner/cpu.max", "50000 100000\n");
        CHECK(m.quota() == 0.5);
        m.write("sys/fs/cgroup/cpu.max", "20000 100000\n");  // a container's own, where its groups are named as seen from outside
        CHECK(m.quota() == 0.2);
        m.write("sys/fs/cgroup/cpu.max", "20000 0\n");
        CHECK(m.quota() == 0.5);
        m.write("proc/self/cgroup", "1:cpu:no-path\n0::\n0::outer/inner\n");  // nothing that a kernel writes: passed over, where a walk upwards would not end
        CHECK(m.quota() == 0);
    }
    Machine m;
    m.write("proc/self/cgroup", "4:memory:/a\n2:cpuset:/b\nnonsense\n1:cpu,cpuacct:/c\n0::/\n");
    m.write("sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "-1\n");
    m.write("sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "100000\n");
    for (const char * other : {"a", "b"}) {
        m.write((std::string("sys/fs/cgroup/cpu/") + other + "/cpu.cfs_quota_us").c_str(), "1\n");
        m.write((std::string("sys/fs/cgroup/cpu/") + other + "/cpu.cfs_period_us").c_str(), "100000\n");
    }
    CHECK(m.quota() == 0);
    m.write("sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "150000\n");
    CHECK(m.quota() == 1.5);
}
#endif

}  // namespace

int main() {
    test_log();
    test_log_on_many_threads();
    test_json();
    test_registry();
    test_history();
#if defined(__linux__)
    test_quota();
#endif
    CHECK_EQ(live_counts().weights, 0);
    CHECK(usable_cores() >= 1 && usable_cores() <= std::max(1u, std::thread::hardware_concurrency()));
    return check::result("test_core");
}
