// Every keyword of a schema in its context: taken, and then written anew, or refused. What is written is the part the
// converter follows exactly, whatever it makes of the rest.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <set>

#include "engine/llama/schema.hpp"

namespace pyl {

using json = common_json;

namespace {

constexpr size_t max_nodes = 4096;
constexpr size_t max_place_bytes = 1u << 20;  // of all schemas' places together: each is the name of a rule
constexpr size_t max_properties = 256;        // the converter's work grows with the cube of the optional ones
constexpr size_t max_patterns = 256;          // it copies all its rules for each
constexpr size_t max_name = 256;              // bytes: its regular expressions recurse
constexpr int64_t max_length = 2000, max_items = 1000;      // beyond these the engine's grammar parser gives up
constexpr int64_t largest_integer = 9'999'999'999'999'999;  // sixteen digits are what the converter's integers have

const std::set<std::string> annotations{"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"};
// What a keyword constrains; "" for those that stand for a schema of their own.
const std::map<std::string, std::string> keywords{
    {"$ref", ""}, {"const", ""}, {"enum", ""}, {"anyOf", ""}, {"oneOf", ""}, {"allOf", ""}, {"type", ""},
    {"properties", "object"}, {"required", "object"}, {"additionalProperties", "object"},
    {"items", "array"}, {"prefixItems", "array"}, {"additionalItems", "array"}, {"minItems", "array"}, {"maxItems", "array"},
    {"minLength", "string"}, {"maxLength", "string"}, {"pattern", "string"}, {"format", "string"},
    {"minimum", "integer"}, {"maximum", "integer"}, {"exclusiveMinimum", "integer"}, {"exclusiveMaximum", "integer"},
};

// A step of a JSON pointer.
std::string step(std::string_view name) {
    std::string out = "/";
    for (const char c : name) c == '~' ? out += "~0" : c == '/' ? out += "~1" : out += c;
    return out;
}

// The longest run of the letter q in any key.
size_t longest_q(const json & value) {
    size_t longest = 0;
    if (!value.is_object() && !value.is_array()) return longest;
    for (const auto & [key, item] : value.items()) {
        size_t run = 0;
        for (const char c : key) longest = std::max(longest, run = c == 'q' ? run + 1 : 0);
        longest = std::max(longest, longest_q(item));
    }
    return longest;
}

class Walk {
public:
    // References are given names that no property's rule can have: the converter takes rules of one name for one rule.
    explicit Walk(const json & root) : root_(root) { out_.mark = std::string(longest_q(root) + 1, 'q'); }

    PlainSchema run() {
        add_target("#", &root_);
        for (now_ = 0; now_ < found_.size(); now_++) {  // which grows
            json made = node(*found_[now_], std::string(out_.targets[now_].place));
            out_.targets[now_].schema = std::move(made);
        }
        return std::move(out_);
    }

private:
    size_t add_target(const std::string & place, const json * schema) {
        index_.emplace(place, found_.size());
        found_.push_back(schema);
        out_.targets.push_back({json(), place, {}});
        return found_.size() - 1;
    }

    json node(const json & schema, const std::string & at) {
        depth_++;
        json out = decide(schema, at);
        depth_--;
        return out;
    }

    json decide(const json & schema, const std::string & at) {
        if (++n_nodes_ > max_nodes) schema_too_large("schemas in it", n_nodes_, max_nodes);
        if ((n_place_bytes_ += at.size()) > max_place_bytes) schema_too_large("bytes of names on the way to its schemas", n_place_bytes_, max_place_bytes);
        if (schema.is_boolean()) {
            if (!schema.get<bool>()) refuse_schema("false", at, "no value satisfies it");
            return json::object();
        }
        if (!schema.is_object()) malformed_schema("schema", at, "it is neither an object nor a boolean");
        const std::vector<std::string> given = read_keys(schema, at);
        for (const char * form : {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"}) {
            if (!schema.contains(form)) continue;
            const bool takes_type = form == std::string("const") || form == std::string("enum");
            for (const std::string & key : given) {
                if (key != form && !(takes_type && key == "type")) refuse_schema(key, at, std::string("the converter does not read it beside ") + form);
            }
            if (takes_type) return constant(schema, form, at);
            return form == std::string("$ref") ? refer(schema.at(form), at) : combine(schema.at(form), form, at);
        }
        if (given.empty()) return json::object();
        if (!schema.contains("type")) refuse_schema(given.front(), at, "it binds only values of one type, and the converter takes it for that type's mark; say type: " + keywords.at(given.front()));
        return typed(schema, given, at);
    }

    // The keywords that constrain something; all others are harmless, or refused.
    std::vector<std::string> read_keys(const json & schema, const std::string & at) {
        std::vector<std::string> given;
        for (const auto & [key, value] : schema.items()) {
            if (annotations.contains(key)) continue;
            if (key == "$defs" || key == "definitions") {
                if (!value.is_object()) malformed_schema(key, at, "it is not an object");
            } else if (key == "$schema" && at == "#") {
                read_draft(value);
            } else if (key == "$id" && at == "#") {
                if (!value.is_string()) malformed_schema(key, at, "it is not a string");
            } else if (keywords.contains(key)) {
                given.push_back(key);
            } else {
                refuse_schema(key, at, key == "$id" || key == "$schema" ? "only the outermost schema may have one: it changes what references mean" : "the converter does not read it");
            }
        }
        return given;
    }

    void read_draft(const json & value) {
        std::string uri = value.is_string() ? value.get<std::string>() : "";
        if (uri.ends_with('#')) uri.pop_back();
        const size_t scheme = uri.starts_with("http") ? uri.find("://json-schema.org/draft") : std::string::npos;
        const std::string draft = scheme == std::string::npos ? "" : uri.substr(scheme + 19);
        has_prefix_items_ = draft == "draft/2020-12/schema";
        has_item_lists_ = draft == "draft-06/schema" || draft == "draft-07/schema" || draft == "draft/2019-09/schema";
        if (!has_prefix_items_ && !has_item_lists_) refuse_schema("$schema", "#", "the drafts known are 6, 7, 2019-09 and 2020-12");
    }

    // ------------------------------------------------------------------------------------------------------ references

    json refer(const json & value, const std::string & at) {
        if (!value.is_string()) malformed_schema("$ref", at, "it is not a string");
        const std::string ref = value.get<std::string>();
        if (ref != "#" && !ref.starts_with("#/")) refuse_schema("$ref", at, "'" + shown(ref) + "' is not a path into this document (#/...); nothing is fetched, and anchors are not read");
        if (ref.find_first_of("~%") != std::string::npos) refuse_schema("$ref", at, "'" + shown(ref) + "' has escapes, which the converter does not read");
        const auto known = index_.find(ref);
        const size_t i = known == index_.end() ? add_target(ref, resolve(ref, at)) : known->second;
        out_.targets[now_].references.push_back({i, depth_});
        return out_.reference(i);
    }

    // Only to places where a schema stands, and never across a schema with an $id of its own.
    const json * resolve(const std::string & ref, const std::string & at) const {
        std::vector<std::string> steps;
        for (size_t from = 1; from < ref.size();) {
            const size_t end = std::min(ref.find('/', from + 1), ref.size());
            steps.push_back(ref.substr(from + 1, end - from - 1));
            from = end;
        }
        const json * here = &root_;
        for (size_t i = 0; i < steps.size(); i++) {
            const std::string & key = steps[i];
            if (!here->is_object() || !here->contains(key)) refuse_schema("$ref", at, "'" + shown(ref) + "' leads nowhere");
            const bool is_map = key == "$defs" || key == "definitions" || key == "properties";
            const bool is_schema = key == "items" || key == "additionalProperties" || key == "additionalItems" || key == "anyOf" || key == "oneOf" || key == "allOf" || key == "prefixItems";
            if (!is_map && !is_schema) refuse_schema("$ref", at, "'" + shown(ref) + "' does not lead to where a schema stands");
            here = &here->at(key);
            if (is_map || here->is_array()) {
                if (++i == steps.size()) refuse_schema("$ref", at, "'" + shown(ref) + "' does not lead to where a schema stands");
                here = member(*here, steps[i]);
                if (!here) refuse_schema("$ref", at, "'" + shown(ref) + "' leads nowhere");
            }
            if (here->is_object() && here->contains("$id")) refuse_schema("$ref", at, "'" + shown(ref) + "' leads through a schema with an $id of its own");
        }
        return here;
    }

    static const json * member(const json & of, const std::string & name) {
        if (of.is_object()) return of.contains(name) ? &of.at(name) : nullptr;
        if (!of.is_array() || name.empty() || name.size() > 6 || name.find_first_not_of("0123456789") != std::string::npos) return nullptr;
        const size_t index = std::stoul(name);
        return index < of.size() ? &of.at(index) : nullptr;
    }

    // ---------------------------------------------------------------------------------------------- constants and unions

    json constant(const json & schema, const std::string & form, const std::string & at) {
        const unsigned kinds = schema.contains("type") ? kinds_of(schema.at("type"), at) : unsigned{kind_all};
        const json & given = schema.at(form);
        const auto check = [&](const json & value) {
            check_numbers(value, form, at);
            if (!(kind_of(value) & kinds)) refuse_schema(form, at, shown(value.dump()) + " is not of the type, which the converter does not read beside " + form);
        };
        if (form == "const") {
            check(given);
        } else {
            if (!given.is_array()) malformed_schema(form, at, "it is not an array");
            if (given.empty()) refuse_schema(form, at, "no value satisfies it");
            if (given.size() > max_schema_alternatives) refuse_schema(form, at, "more than " + std::to_string(max_schema_alternatives) + " values");
            for (size_t i = 0; i < given.size(); i++) check(given.at(i));
        }
        json out = json::object();
        out[form] = given;
        return out;
    }

    // A constant is written in one way: whole numbers without a fraction, no number with an exponent.
    static void check_numbers(const json & value, const std::string & form, const std::string & at) {
        if (value.is_number_float()) {
            const std::string text = value.dump();
            if (text.ends_with(".0") || text.find('e') != std::string::npos) refuse_schema(form, at, "the converter writes the number as " + text + " and in no other way; give whole numbers without a fraction, and none that need an exponent");
        }
        if (!value.is_object() && !value.is_array()) return;
        for (const auto & [key, item] : value.items()) check_numbers(item, form, at);
    }

    json combine(const json & given, const std::string & form, const std::string & at) {
        if (!given.is_array() || given.empty()) malformed_schema(form, at, "it is not an array of at least one schema");
        const std::string place = at + "/" + form + "/";
        if (given.size() == 1) return node(given.at(size_t{0}), place + "0");
        if (form == "allOf") refuse_schema(form, at, "the converter merges schemas only roughly; a single one is fine");
        if (given.size() > max_schema_alternatives) refuse_schema(form, at, "more than " + std::to_string(max_schema_alternatives) + " alternatives");
        json alternatives = json::array();
        for (size_t i = 0; i < given.size(); i++) alternatives.push_back(node(given.at(i), place + std::to_string(i)));
        out_.unions.push_back({alternatives, form, at});
        json out = json::object();
        out["anyOf"] = alternatives;
        return out;
    }

    // ----------------------------------------------------------------------------------------------------------- types

    static std::vector<std::string> types_of(const json & value, const std::string & at) {
        std::vector<std::string> out;
        if (value.is_string()) {
            out.push_back(value.get<std::string>());
        } else if (value.is_array()) {
            for (size_t i = 0; i < value.size(); i++) out.push_back(value.at(i).is_string() ? value.at(i).get<std::string>() : "");
        }
        for (const std::string & type : out) {
            if (!kinds_of_type(type)) malformed_schema("type", at, "it is none of null, boolean, integer, number, string, array and object");
        }
        if (out.empty() || std::set<std::string>(out.begin(), out.end()).size() != out.size()) malformed_schema("type", at, "it is neither a type nor a list of different types");
        return out;
    }

    static unsigned kinds_of(const json & value, const std::string & at) {
        unsigned out = 0;
        for (const std::string & type : types_of(value, at)) out |= kinds_of_type(type);
        return out;
    }

    json typed(const json & schema, const std::vector<std::string> & given, const std::string & at) {
        const std::vector<std::string> types = types_of(schema.at("type"), at);
        const auto has = [&](const std::string & type) { return std::find(types.begin(), types.end(), type) != types.end(); };
        for (const std::string & key : given) {
            const std::string & of = keywords.at(key);
            if (of == "integer" && has("number")) refuse_schema(key, at, "the converter reads it for integers only, and the type is number");
            if (!of.empty() && !has(of)) refuse_schema(key, at, "it says nothing about the type that is given; it belongs to type: " + of);
        }
        json alternatives = json::array();
        for (const std::string & type : types) {
            json out = json::object();
            out["type"] = type;
            if (type == "object") object(schema, at, out);
            if (type == "array") array(schema, at, out);
            if (type == "string") string(schema, at, out);
            if (type == "integer") integer(schema, at, out);
            if (types.size() == 1) return out;
            alternatives.push_back(out);
        }
        json out = json::object();
        out["anyOf"] = alternatives;
        return out;
    }

    void object(const json & schema, const std::string & at, json & out) {
        const json properties = schema.contains("properties") ? schema.at("properties") : json::object();
        if (!properties.is_object()) malformed_schema("properties", at, "it is not an object");
        if (properties.size() > max_properties) refuse_schema("properties", at, "more than " + std::to_string(max_properties));
        const json required = schema.contains("required") ? schema.at("required") : json::array();
        if (!required.is_array()) malformed_schema("required", at, "it is not an array");
        for (size_t i = 0; i < required.size(); i++) {
            if (!required.at(i).is_string()) malformed_schema("required", at, "it is not an array of strings");
            const std::string name = required.at(i).get<std::string>();
            if (!properties.contains(name)) refuse_schema("required", at, "'" + shown(name) + "' is not among the properties, and the converter would not ask for it");
        }
        const bool has_more = schema.contains("additionalProperties");
        if (properties.empty()) {
            if (!has_more || (schema.at("additionalProperties").is_boolean() && schema.at("additionalProperties").get<bool>())) return;
            out["additionalProperties"] = schema.at("additionalProperties").is_boolean() ? json(false) : node(schema.at("additionalProperties"), at + "/additionalProperties");
            return;
        }
        if (!has_more || !schema.at("additionalProperties").is_boolean() || schema.at("additionalProperties").get<bool>()) {
            refuse_schema("additionalProperties", at, std::string(has_more ? "beside properties it can only be false" : "beside properties it has to be false, and without it others may come") + ": the converter's rule for other names lets through what is no JSON");
        }
        json made = json::object();
        for (const auto & [name, property] : properties.items()) {
            check_name(name, at);
            made[name] = node(property, at + "/properties" + step(name));
        }
        out["properties"] = made;
        out["required"] = required;
        out["additionalProperties"] = false;
    }

    static void check_name(const std::string & name, const std::string & at) {
        if (name.size() > max_name) refuse_schema("properties", at, "'" + shown(name) + "' has more than " + std::to_string(max_name) + " bytes");
        // It makes names of rules from names of properties, and any run of other characters a hyphen.
        const auto becomes = [&](std::string_view first, std::string_view last) {
            if (name.size() <= first.size() + last.size() || !name.starts_with(first) || !name.ends_with(last)) return false;
            const std::string_view between = std::string_view(name).substr(first.size(), name.size() - first.size() - last.size());
            return std::none_of(between.begin(), between.end(), [](unsigned char c) { return std::isalnum(c) || c == '-'; });
        };
        // Names it gives to something else: the start, any further property, its rules for numbers.
        if (name.empty() || name == "*" || becomes("integral", "part") || becomes("decimal", "part")) refuse_schema("properties", at, "the converter has another use for a property named '" + name + "'");
    }

    void array(const json & schema, const std::string & at, json & out) {
        const bool has_prefix = schema.contains("prefixItems"), has_list = schema.contains("items") && schema.at("items").is_array();
        const int64_t least = count(schema, "minItems", max_items, at, 0), most = count(schema, "maxItems", max_items, at, -1);
        if (most >= 0 && most < least) refuse_schema("maxItems", at, "no array is as long as minItems and as short as maxItems");
        if (has_prefix || has_list) return tuple(schema, has_prefix ? "prefixItems" : "items", least, most, at, out);
        if (schema.contains("additionalItems")) refuse_schema("additionalItems", at, "it says nothing without a list of items");
        out["items"] = schema.contains("items") ? node(schema.at("items"), at + "/items") : json::object();
        if (least > 0) out["minItems"] = least;
        if (most >= 0) out["maxItems"] = most;
    }

    // The converter writes a tuple whole, whatever minItems says, and nothing after it.
    void tuple(const json & schema, const std::string & key, int64_t least, int64_t most, const std::string & at, json & out) {
        const bool is_prefix = key == "prefixItems";
        if (!(is_prefix ? has_prefix_items_ : has_item_lists_)) refuse_schema(key, at, is_prefix ? "this draft does not have it" : "a list of items is prefixItems in this draft");
        const json & list = schema.at(key);
        if (!list.is_array() || list.empty()) malformed_schema(key, at, "it is not an array of at least one schema");
        const std::string rest = is_prefix ? "items" : "additionalItems";
        if (is_prefix && schema.contains("additionalItems")) refuse_schema("additionalItems", at, "it says nothing beside prefixItems");
        const auto n = static_cast<int64_t>(list.size());
        bool is_closed = most == n;
        if (schema.contains(rest)) {
            if (!schema.at(rest).is_boolean() || schema.at(rest).get<bool>()) refuse_schema(rest, at, "after the items of a list it can only be false");
            is_closed = true;
        }
        if (n > max_items) refuse_schema(key, at, "more than " + std::to_string(max_items) + " items");
        if (least != n || !is_closed || (most >= 0 && most < n)) refuse_schema(key, at, "the converter writes a list of items whole and nothing after it: minItems has to be " + std::to_string(n) + ", and " + rest + " false or maxItems the same");
        json made = json::array();
        for (size_t i = 0; i < list.size(); i++) made.push_back(node(list.at(i), at + "/" + key + "/" + std::to_string(i)));
        out["prefixItems"] = made;
    }

    void string(const json & schema, const std::string & at, json & out) {
        const bool has_pattern = schema.contains("pattern"), has_format = schema.contains("format");
        for (const char * key : {"minLength", "maxLength", "format"}) {
            if (schema.contains(key) && (has_pattern || (has_format && key != std::string("format")))) refuse_schema(key, at, std::string("the converter does not read it beside ") + (has_pattern ? "pattern" : "format"));
        }
        if (has_pattern) {
            if (++n_patterns_ > max_patterns) schema_too_large("patterns", n_patterns_, max_patterns);
            if (!schema.at("pattern").is_string()) malformed_schema("pattern", at, "it is not a string");
            const std::string pattern = schema.at("pattern").get<std::string>();
            if (const std::string problem = pattern_problem(pattern); !problem.empty()) refuse_schema("pattern", at, "in '" + shown(pattern) + "': " + problem);
            out["pattern"] = pattern;
        } else if (has_format) {
            if (!schema.at("format").is_string()) malformed_schema("format", at, "it is not a string");
            const std::string format = schema.at("format").get<std::string>();
            const bool is_rough = format == "time" || format == "date-time" || (format.size() == 5 && format.starts_with("uuid"));
            if (format != "uuid" && format != "date") refuse_schema("format", at, "'" + shown(format) + (is_rough ? "' is one the converter knows only roughly" : "' is none the converter knows"));
            out["format"] = format;
        } else {
            const int64_t least = count(schema, "minLength", max_length, at, 0), most = count(schema, "maxLength", max_length, at, -1);
            if (most >= 0 && most < least) refuse_schema("maxLength", at, "no string is as long as minLength and as short as maxLength");
            if (least > 0) out["minLength"] = least;
            if (most >= 0) out["maxLength"] = most;
        }
    }

    static void integer(const json & schema, const std::string & at, json & out) {
        std::string first;
        for (const char * key : {"maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"}) first = schema.contains(key) ? key : first;
        if (first.empty()) return;
        const int64_t low = std::max({-largest_integer, bound(schema, "minimum", at, -largest_integer), bound(schema, "exclusiveMinimum", at, -largest_integer)});
        const int64_t high = std::min({largest_integer, bound(schema, "maximum", at, largest_integer), bound(schema, "exclusiveMaximum", at, largest_integer)});
        if (low > high) refuse_schema(first, at, "no integer of at most 16 digits lies within the bounds");
        // One bound alone goes wrong in the converter from three digits on and below zero; two are always right, but long.
        if (low > -largest_integer || high < 0) out["minimum"] = low;
        if (high < largest_integer || low > 99) out["maximum"] = high;
    }

    // The outermost integer a bound admits, or one beyond what can be written.
    static int64_t bound(const json & schema, const std::string & key, const std::string & at, int64_t otherwise) {
        if (!schema.contains(key)) return otherwise;
        const json & value = schema.at(key);
        if (!value.is_number()) malformed_schema(key, at, "it is not a number");
        const bool is_low = key.ends_with("inimum"), is_exclusive = key.starts_with("exclusive");
        const double rough = value.get<double>();
        if (std::abs(rough) > static_cast<double>(largest_integer) + 1) return (rough < 0) == is_low ? otherwise : -otherwise + (is_low ? 1 : -1);
        if (value.is_number_integer()) return value.get<long long>() + (is_exclusive ? (is_low ? 1 : -1) : 0);
        const double whole = is_low ? std::ceil(rough) : std::floor(rough);
        return static_cast<int64_t>(whole) + (is_exclusive && whole == rough ? (is_low ? 1 : -1) : 0);
    }

    static int64_t count(const json & schema, const std::string & key, int64_t limit, const std::string & at, int64_t otherwise) {
        if (!schema.contains(key)) return otherwise;
        const json & value = schema.at(key);
        if (!value.is_number() || value.get<double>() < 0 || value.get<double>() != std::floor(value.get<double>())) malformed_schema(key, at, "it is not a whole number from 0 on");
        if (value.get<double>() > static_cast<double>(limit)) refuse_schema(key, at, "more than " + std::to_string(limit));
        return static_cast<int64_t>(value.get<double>());
    }

    const json & root_;
    PlainSchema out_;
    std::vector<const json *> found_;  // what the targets are made of
    std::map<std::string, size_t> index_;
    size_t now_ = 0, depth_ = 0;  // the target that is walked, and the schemas around the present one
    size_t n_nodes_ = 0, n_place_bytes_ = 0, n_patterns_ = 0;
    bool has_prefix_items_ = true, has_item_lists_ = true;
};

}  // namespace

PlainSchema rewrite_schema(const json & schema) { return Walk(schema).run(); }

}  // namespace pyl
