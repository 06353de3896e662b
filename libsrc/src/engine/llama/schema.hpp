// What the files of the schema compiler share: schema.cpp reads the text and drives the converter, schema_walk.cpp decides on
// every keyword, schema_graph.cpp looks at what references and unions make together, pattern.cpp at regular expressions.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "json.h"

namespace pyl {

constexpr size_t max_schema_alternatives = 1024;  // that begin at one place: the engine follows every one of them

// A schema written anew, of nothing but what the converter follows exactly.
struct PlainSchema {
    struct Reference {
        size_t target, depth;  // so many schemas deep in the one it stands in
    };
    struct Target {
        common_json schema;
        std::string place;
        std::vector<Reference> references;
    };
    struct Union {
        common_json alternatives;
        std::string keyword, place;
    };

    std::vector<Target> targets;  // of references, by number; the first is the document itself
    std::vector<Union> unions;
    std::string mark;  // begins the names of targets; no property's name holds it

    std::string name_of(size_t target) const { return mark + std::to_string(target) + "x"; }
    common_json reference(size_t target) const {
        common_json out = common_json::object();
        out["$ref"] = "#/$defs/" + name_of(target);
        return out;
    }
    size_t target_of(const common_json & reference) const { return std::stoul(reference.at("$ref").get<std::string>().substr(8 + mark.size())); }
};

PlainSchema rewrite_schema(const common_json & schema);
void check_schema_graph(const PlainSchema & schema);
std::string pattern_problem(std::string_view pattern);  // why the converter would not follow it exactly; empty when it does

// Kinds of values as bits. A number is an integer or it is not, so that types can be told apart.
enum SchemaKind : unsigned { kind_null = 1, kind_boolean = 2, kind_integer = 4, kind_fraction = 8, kind_string = 16, kind_array = 32, kind_object = 64, kind_all = 127 };
unsigned kind_of(const common_json & value);
unsigned kinds_of_type(const std::string & type);  // 0 when there is no such type

// "KEYWORD at PLACE: why"
[[noreturn]] void refuse_schema(std::string_view keyword, const std::string & place, const std::string & why);
[[noreturn]] void malformed_schema(std::string_view keyword, const std::string & place, const std::string & why);
[[noreturn]] void schema_too_large(const std::string & what, size_t need, size_t have);
std::string shown(std::string_view text);  // cut to what a message can hold

}  // namespace pyl
