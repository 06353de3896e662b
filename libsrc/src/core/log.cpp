#include "core/log.hpp"

#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <thread>

#include "core/atfork.hpp"

namespace pyl {

static constexpr size_t max_lines = 4096;
// Never destroyed: a thread may log while the process exits.
static std::mutex & mutex = *new std::mutex;
static std::deque<std::string> & lines = *new std::deque<std::string>;
static const bool is_guarded = (guard_across_fork(mutex), true);
static uint64_t n_dropped = 0;
static std::thread::id author;  // of the last line
static std::atomic<int> lowest{static_cast<int>(LogLevel::warning)};
static thread_local LogCapture * capture = nullptr;
static thread_local LogLevel last_level = LogLevel::info;

void log_add(LogLevel level, std::string_view text, bool continues) {
    if (continues) level = last_level;
    last_level = level;
    if (capture && level >= LogLevel::warning) capture->text_ += text;
    if (capture && capture->is_quiet_) return;
    if (static_cast<int>(level) < lowest.load(std::memory_order_relaxed)) return;
    while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
    static constexpr std::array names{"", "DEBUG", "INFO", "WARNING", "ERROR", ""};
    const std::scoped_lock lock(mutex);
    if (continues && !lines.empty() && author == std::this_thread::get_id()) {  // nobody's line is finished by another
        lines.back() += text;
        return;
    }
    if (text.empty()) return;
    std::string line = names[static_cast<size_t>(level)];
    line += ' ';
    for (const char c : text) line += c == '\n' ? ' ' : c;
    lines.push_back(std::move(line));
    author = std::this_thread::get_id();
    if (lines.size() > max_lines) {
        lines.pop_front();
        n_dropped++;
    }
}

void log_set_level(LogLevel level) {
    (void)is_guarded; lowest = static_cast<int>(level); }

std::string log_drain(uint64_t & dropped) {
    const std::scoped_lock lock(mutex);
    std::string out;
    for (const auto & line : lines) (out += line) += '\n';
    lines.clear();
    dropped = n_dropped;
    n_dropped = 0;
    return out;
}

LogCapture::LogCapture(bool is_quiet) : outer_(capture), is_quiet_(is_quiet || (outer_ && outer_->is_quiet_)) { capture = this; }
LogCapture::~LogCapture() { capture = outer_; }

std::string LogCapture::words(std::string_view otherwise) const {
    std::string_view said = text_;
    while (!said.empty() && (said.back() == '\n' || said.back() == ' ')) said.remove_suffix(1);
    if (said.size() > 2000) said = said.substr(said.size() - 2000);
    return std::string(said.empty() ? otherwise : said);
}

}  // namespace pyl
