// JSON Schema to GBNF through llama.cpp's own converter. It reads a part of JSON Schema, passes over the rest without a word,
// and gets some of what it reads wrong. So a schema is walked first: whatever the converter would not follow exactly is
// refused by name and place, and the rest is written anew, in the forms it gets right. docs/schema.md lists both.
#include "engine/llama/schema.hpp"

#include <map>

#include "core/json.hpp"
#include "engine/llama/llama_parts.hpp"
#include "json-schema-to-grammar.h"

namespace pyl {

using json = common_json;

namespace {

constexpr size_t max_bytes = 1u << 20;
constexpr size_t max_depth = 128;
constexpr size_t max_members = 1024;  // of one object: the engine's JSON looks for a key from the first one on

// One of the converter's rules, and the exact one that takes its place.
struct Replacement {
    std::string_view name, theirs, ours;
};
constexpr Replacement replacements[] = {
    // No half of a surrogate pair; a whole one is a single character, which is how minLength counts.
    {"char", R"~([^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4}))~",
     R"~([\x20-\x21\x23-\x5B\x5D-\uD7FF\uE000-\U0010FFFF] | [\\] (["\\bfnrt] | "u" ([0-9A-Ca-cE-Fe-f] [0-9A-Fa-f]{3} | [Dd] ([0-7] [0-9A-Fa-f]{2} | [89ABab] [0-9A-Fa-f]{2} "\\u" [Dd] [C-Fc-f] [0-9A-Fa-f]{2}))))~"},
    // No 30th of February.
    {"date", R"~([0-9]{4} "-" ( "0" [1-9] | "1" [0-2] ) "-" ( "0" [1-9] | [1-2] [0-9] | "3" [0-1] ))~",
     R"~([0-9]{4} "-" (("0" [13578] | "1" [02]) "-" ("0" [1-9] | [12] [0-9] | "3" [01]) | ("0" [469] | "11") "-" ("0" [1-9] | [12] [0-9] | "30") | "02-" ("0" [1-9] | "1" [0-9] | "2" [0-8])) | ([0-9]{2} ("0" [48] | [2468] [048] | [13579] [26]) | ("0" [048] | [2468] [048] | [13579] [26]) "00") "-02-29")~"},
};

[[noreturn]] void fail(int32_t code, std::string_view keyword, const std::string & place, const std::string & why) { throw Error(code, shown(keyword) + " at " + place + ": " + why); }

// Bounds a text before it is parsed, in one pass, and counts the members of its objects.
size_t scan(std::string_view text) {
    if (text.size() > max_bytes) schema_too_large("bytes", text.size(), max_bytes);
    std::vector<size_t> members;
    size_t total = 0;
    for (size_t i = 0; i < text.size(); i++) {
        const char c = text[i];
        if (c == '"') {
            for (i++; i < text.size() && text[i] != '"'; i++) i += text[i] == '\\';
        } else if (c == '{' || c == '[') {
            if (members.size() == max_depth) schema_too_large("nested levels", max_depth + 1, max_depth);
            members.push_back(0);
        } else if ((c == '}' || c == ']') && !members.empty()) {
            members.pop_back();
        } else if (c == ':') {
            total++;
            if (!members.empty() && ++members.back() > max_members) schema_too_large("members in one object", max_members + 1, max_members);
        }
    }
    return total;
}

size_t count_members(const json & value) {
    if (!value.is_object() && !value.is_array()) return 0;
    size_t n = value.is_object() ? value.size() : 0;
    for (const auto & [key, item] : value.items()) n += count_members(item);
    return n;
}

json parse(std::string_view text) {
    const size_t n_members = scan(text);
    if (const size_t ok = utf8_valid_prefix(text); ok != text.size()) throw Error(PYL_E_FORMAT, "the schema is not UTF-8 at byte " + std::to_string(ok));
    json out;
    try {
        out = json::parse(std::string(text));
    } catch (const common_json_error & error) {
        throw Error(PYL_E_FORMAT, std::string("the schema is not JSON: ") + error.what());
    }
    if (count_members(out) != n_members) throw Error(PYL_E_FORMAT, "the schema has an object with the same key twice");
    return out;
}

void replace_rules(std::string & gbnf) {
    for (const Replacement & rule : replacements) {
        const std::string head = "\n" + std::string(rule.name) + " ::= ";
        size_t at = ("\n" + gbnf).find(head);
        if (at == std::string::npos) continue;
        at += head.size() - 1;
        if (gbnf.compare(at, rule.theirs.size() + 1, std::string(rule.theirs) + "\n") != 0) throw Error(PYL_E_INTERNAL, "the converter's rule '" + std::string(rule.name) + "' is not the one this library knows");
        gbnf.replace(at, rule.theirs.size(), rule.ours);
    }
}

}  // namespace

std::string shown(std::string_view text) {
    if (text.size() <= 80) return std::string(text);
    return std::string(text.substr(0, utf8_valid_prefix(text.substr(0, 80)))) + "...";
}

void refuse_schema(std::string_view keyword, const std::string & place, const std::string & why) { fail(PYL_E_UNSUPPORTED, keyword, place, why); }
void malformed_schema(std::string_view keyword, const std::string & place, const std::string & why) { fail(PYL_E_FORMAT, keyword, place, why); }
void schema_too_large(const std::string & what, size_t need, size_t have) {
    throw Error(PYL_E_UNSUPPORTED, "the schema is too large: more than " + std::to_string(have) + " " + what).numbers(static_cast<int64_t>(need), static_cast<int64_t>(have));
}

unsigned kind_of(const json & value) {
    if (value.is_number()) return value.is_number_integer() ? kind_integer : kind_fraction;
    return value.is_null() ? kind_null : value.is_boolean() ? kind_boolean : value.is_string() ? kind_string : value.is_array() ? kind_array : kind_object;
}

unsigned kinds_of_type(const std::string & type) {
    static const std::map<std::string, unsigned> kinds{{"null", kind_null}, {"boolean", kind_boolean}, {"integer", kind_integer}, {"number", kind_integer | kind_fraction}, {"string", kind_string}, {"array", kind_array}, {"object", kind_object}};
    const auto found = kinds.find(type);
    return found == kinds.end() ? 0 : found->second;
}

std::string llama_schema_to_gbnf(std::string_view text) {
    const PlainSchema plain = rewrite_schema(parse(text));
    check_schema_graph(plain);
    json defs = json::object(), document = plain.targets[0].schema;
    for (size_t i = 0; i < plain.targets.size(); i++) defs[plain.name_of(i)] = plain.targets[i].schema;
    document["$defs"] = defs;
    std::string gbnf;
    try {
        gbnf = json_schema_to_grammar(document, true);
    } catch (const std::logic_error & error) {
        throw Error(PYL_E_UNSUPPORTED, std::string("the engine's converter: ") + error.what());
    }
    replace_rules(gbnf);
    try {
        check_llama_grammar(gbnf);  // what is given out can be put on a branch
    } catch (const Error & error) {
        throw Error(PYL_E_UNSUPPORTED, "the schema makes a grammar that the engine does not take: " + error.message);
    }
    return gbnf;
}

}  // namespace pyl
