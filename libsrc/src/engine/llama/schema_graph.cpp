// What no single schema shows: references that lead back to themselves, schemas that need themselves, unions that grow through
// references, and alternatives of oneOf that might both be met.
#include <algorithm>
#include <set>

#include "engine/llama/schema.hpp"

namespace pyl {

using json = common_json;

namespace {

constexpr size_t max_depth = 256;  // of schemas inside one another, as the converter comes upon them: it recurses

class Graph {
public:
    explicit Graph(const PlainSchema & schema) : schema_(schema), widths_(schema.targets.size()), is_open_(schema.targets.size()), is_finite_(schema.targets.size()) {}

    void check() {
        check_depth();
        for (size_t i = 0; i < schema_.targets.size(); i++) width(schema_.reference(i));
        for (const PlainSchema::Union & one : schema_.unions) {
            size_t sum = 0;
            for (const json * made : list(one.alternatives)) sum += width(*made);
            if (sum > max_schema_alternatives) refuse_schema(one.keyword, one.place, "more than " + std::to_string(max_schema_alternatives) + " alternatives, with those of the schemas it refers to");
            if (one.keyword == "oneOf") check_one_of(one);
        }
        check_finite();
    }

private:
    static std::vector<const json *> list(const json & array) {
        std::vector<const json *> out;
        for (size_t i = 0; i < array.size(); i++) out.push_back(&array.at(i));
        return out;
    }

    // The converter follows a reference where it first meets it.
    void check_depth() const {
        struct Step {
            size_t target, depth, next;
        };
        std::vector<bool> is_known(schema_.targets.size());
        std::vector<Step> path{{0, 0, 0}};
        while (!path.empty()) {
            Step & step = path.back();
            const auto & references = schema_.targets[step.target].references;
            if (step.next == references.size()) {
                path.pop_back();
                continue;
            }
            const auto [target, depth] = references[step.next++];
            if (step.depth + depth > max_depth) refuse_schema("$ref", schema_.targets[step.target].place, "more than " + std::to_string(max_depth) + " schemas inside one another");
            if (is_known[target]) continue;
            is_known[target] = true;
            path.push_back({target, step.depth + depth, 0});
        }
    }

    // How many alternatives begin where this schema does.
    size_t width(const json & made) {
        if (made.contains("$ref")) {
            const size_t i = schema_.target_of(made);
            if (widths_[i] == 0) {
                if (is_open_[i]) refuse_schema("$ref", schema_.targets[i].place, "it leads back to itself with nothing in between");
                is_open_[i] = true;
                widths_[i] = width(schema_.targets[i].schema);
            }
            return widths_[i];
        }
        if (!made.contains("anyOf")) return made.contains("enum") ? made.at("enum").size() : 1;
        size_t sum = 0;
        for (const json * alternative : list(made.at("anyOf"))) sum = std::min(sum + width(*alternative), 2 * max_schema_alternatives);
        return sum;
    }

    // Exactly one is the same as any when no value can meet two.
    void check_one_of(const PlainSchema::Union & one) const {
        std::set<std::string> constants;
        unsigned of_all = 0, of_others = 0;  // kinds met so far, by any alternative and by those that are no constants
        for (const json * made : list(one.alternatives)) {
            const unsigned kinds = reach(*made);
            const std::set<std::string> own = scalars(*made);
            bool is_apart = !(kinds & (own.empty() ? of_all : of_others));
            for (const std::string & value : own) is_apart &= constants.insert(value).second;
            if (!is_apart) refuse_schema(one.keyword, one.place, "the converter takes it for anyOf, and a value might meet two of them; alternatives of different types or of different constants are fine");
            of_all |= kinds;
            if (own.empty()) of_others |= kinds;
        }
    }

    // The kinds of values a schema lets through, or more.
    unsigned reach(const json & made) const {
        if (made.contains("$ref")) return reach(schema_.targets[schema_.target_of(made)].schema);
        if (made.contains("type")) return kinds_of_type(made.at("type").get<std::string>());
        if (made.contains("const")) return kind_of(made.at("const"));
        unsigned out = 0;
        if (made.contains("enum")) {
            for (const json * value : list(made.at("enum"))) out |= kind_of(*value);
        } else if (made.contains("anyOf")) {
            for (const json * alternative : list(made.at("anyOf"))) out |= reach(*alternative);
        } else {
            out = kind_all;
        }
        return out;
    }

    // The constants a schema consists of; none when it is anything else, or one of them could be spelled in two ways.
    static std::set<std::string> scalars(const json & made) {
        std::vector<const json *> values;
        if (made.contains("const")) values.push_back(&made.at("const"));
        if (made.contains("enum")) values = list(made.at("enum"));
        std::set<std::string> out;
        for (const json * value : values) {
            if (value->is_object() || value->is_array()) return {};
            out.insert(value->dump());
        }
        return out;
    }

    // A schema that needs itself would be written for ever.
    void check_finite() {
        for (bool has_changed = true; has_changed;) {
            has_changed = false;
            for (size_t i = schema_.targets.size(); i-- > 0;) {
                if (!is_finite_[i] && can_end(schema_.targets[i].schema)) has_changed = is_finite_[i] = true;
            }
        }
        for (size_t i = 0; i < schema_.targets.size(); i++) {
            if (!is_finite_[i]) refuse_schema("$ref", schema_.targets[i].place, "no value satisfies it: it needs another of its kind inside");
        }
    }

    bool can_end(const json & made) const {
        const auto ends = [&](const json * each) { return can_end(*each); };
        if (made.contains("$ref")) return is_finite_[schema_.target_of(made)];
        if (made.contains("anyOf")) {
            const auto alternatives = list(made.at("anyOf"));
            return std::any_of(alternatives.begin(), alternatives.end(), ends);
        }
        if (made.contains("prefixItems")) {
            const auto items = list(made.at("prefixItems"));
            return std::all_of(items.begin(), items.end(), ends);
        }
        if (made.contains("minItems")) return can_end(made.at("items"));
        if (!made.contains("required")) return true;
        const auto names = list(made.at("required"));
        return std::all_of(names.begin(), names.end(), [&](const json * name) { return can_end(made.at("properties").at(name->get<std::string>())); });
    }

    const PlainSchema & schema_;
    std::vector<size_t> widths_;
    std::vector<bool> is_open_, is_finite_;
};

}  // namespace

void check_schema_graph(const PlainSchema & schema) { Graph(schema).check(); }

}  // namespace pyl
