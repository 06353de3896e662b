// Log lines are collected here and drained by whoever wants them: no callback leaves the library, nothing is printed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace pyl {

enum class LogLevel : int { debug = 1, info, warning, error, nothing };

// Adds text to the log; thread-safe. `continues` joins it to the line before.
void log_add(LogLevel level, std::string_view text, bool continues = false);
void log_set_level(LogLevel level);
std::string log_drain(uint64_t & dropped);

// While one is alive, warnings and errors logged by this thread are also kept for the message of an exception.
class LogCapture {
public:
    // A quiet one keeps all to itself: for what is tried and may fail.
    explicit LogCapture(bool is_quiet = false);
    ~LogCapture();
    LogCapture(const LogCapture &) = delete;
    LogCapture & operator=(const LogCapture &) = delete;
    // What was said, one line each, trimmed; `otherwise` when nothing was.
    std::string words(std::string_view otherwise) const;

private:
    friend void log_add(LogLevel, std::string_view, bool);
    std::string text_;
    LogCapture * outer_;
    bool is_quiet_;
};

}  // namespace pyl
