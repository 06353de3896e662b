// Tokens in the order they came, shared with forks: what was there before a fork is one chain that both go on from.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "engine/engine.hpp"

namespace pyl {

class History {
public:
    History() = default;
    explicit History(std::vector<Token> tokens) : own_(std::move(tokens)) {}
    History(const History &) = delete;  // fork() instead: it may have to allocate, and changes both
    History & operator=(const History &) = delete;
    History(History && other) noexcept : before_(std::move(other.before_)), own_(std::move(other.own_)) { other.own_.clear(); }
    History & operator=(History && other) noexcept {
        drop();
        before_ = std::move(other.before_);
        own_ = std::move(other.own_);
        other.own_.clear();
        return *this;
    }
    ~History() { drop(); }

    // The same tokens once more. Cost: the same however many there are.
    History fork() {
        if (!own_.empty()) {
            auto link = std::make_shared<Link>();  // all that can fail
            link->n = size();
            link->before = std::move(before_);
            link->tokens = std::exchange(own_, {});
            before_ = std::move(link);
        }
        History out;
        out.before_ = before_;
        return out;
    }

    size_t size() const { return (before_ ? before_->n : 0) + own_.size(); }
    bool empty() const { return size() == 0; }
    // push_back() cannot fail after make_room().
    void make_room() {
        if (own_.size() == own_.capacity()) own_.reserve(2 * own_.size() + 16);
    }
    void push_back(Token token) { own_.push_back(token); }

    // All of them in one piece.
    std::vector<Token> tokens() const {
        std::vector<Token> out(size());
        auto end = std::copy_backward(own_.begin(), own_.end(), out.end());
        for (const Link * link = before_.get(); link; link = link->before.get()) end = std::copy_backward(link->tokens.begin(), link->tokens.end(), end);
        return out;
    }

private:
    struct Link {
        size_t n = 0;  // tokens here and before
        std::shared_ptr<Link> before;
        std::vector<Token> tokens;
    };

    // Link by link: left to themselves they would go one inside the other, and a branch may be the end of any number of forks.
    void drop() noexcept {
        while (before_ && before_.use_count() == 1) {
            auto next = std::move(before_->before);
            before_ = std::move(next);
        }
        before_.reset();
    }

    std::shared_ptr<Link> before_;
    std::vector<Token> own_;
};

}  // namespace pyl
